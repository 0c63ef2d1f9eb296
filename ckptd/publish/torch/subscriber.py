"""`Subscriber`: finds versions, updates a worker's tensors, audits them, derived tensors.

In it: how often it looks, how long it waits; which errors mean that no trainer is there.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptd import events
from ckptd.base.closing import Closing
from ckptd.base.digest import digest
from ckptd.base.net.address import parse_address
from ckptd.base.runtime.host import address_towards
from ckptd.base.runtime.ownership import OfOneProcess, one_at_a_time
from ckptd.base.runtime.ranks import Board, LocalBoard, RankHeartbeat
from ckptd.base.torch.device import has_streams
from ckptd.base.torch.ranks import Agreement, board_of
from ckptd.base.torch.tensors import as_bytes
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.state.leaves import Leaves, SavedNames, TensorLeaf
from ckptd.checkpoint.torch.state.restore import apply_objects, look, prepare
from ckptd.errors import (
    CkptdError,
    MismatchError,
    NotFoundError,
    TransientStoreError,
    UsageError,
    first_few,
)
from ckptd.lay.local import local_tensors
from ckptd.publish.carrier import SlotReader, WeightCarrier
from ckptd.publish.follow import StoredWeights
from ckptd.publish.link import ServerLink, VersionHold
from ckptd.publish.meeting import MeetingPlace, is_store
from ckptd.publish.messages import (
    AskAbout,
    AskRelease,
    AskWhere,
    HoldAnswer,
    PublishedAbout,
    ServerEntry,
    ServerList,
)
from ckptd.publish.passing import Passing
from ckptd.publish.pull import HeldTensors, PullPlan, PullReport, StagedPull
from ckptd.publish.quantized import ScaleMemory, quantized_tensors
from ckptd.publish.torch.fallback import RootFallback
from ckptd.reshard.torch.relayout import (
    RelayoutSide,
    by_name,
    check_filled,
    memory_of,
    own_tensors,
)

_log = logging.getLogger("ckptd")
_POLL_S = 0.1
_DIGEST_WORDS = 1 << 22
_MOST_WAIT_S = 30.0
_ANSWER_S = 5.0
"""Wait for immediate answers, in seconds: a server that is late is stopped, or its host is gone."""
_RELEASE_S = 1.0
"""Wait for an answer after a pull that failed, in seconds: the leader may be stopped."""
_NOT_THERE = frozenset({"no-version", "link-lost", "link-late", "link-protocol"})
"""Kinds of errors while a publisher ends, or goes on to another version."""


class WeightVersion(NamedTuple):
    """A version of the weights.

    Attributes
    ----------
    step
        As the trainer gave it.
    number
        Counts the versions of one publisher, from 1; 0 for a checkpoint of the root.
    epoch
        Tells that publisher from all others; empty for a checkpoint of the root.
    """

    step: int
    number: int
    epoch: str


@dataclass(frozen=True, kw_only=True)
class UpdateReport(PullReport):
    """Result of an update on this rank, with the bytes of a `ckptd.publish.pull.PullReport`.

    Attributes
    ----------
    version
        The version that the tensors hold now.
    seconds
        In all; the wait for a version is left out.
    lag_s
        Since the trainer published the version; 0 where it came from a root.
    """

    version: WeightVersion
    seconds: float = 0.0
    lag_s: float = 0.0


@dataclass(frozen=True)
class _Proof:
    """Proof that a tensor and its scales have the same memory, not written to since.

    Attributes
    ----------
    look
        Address, shape, type, and torch's count of writes, of both.
    digest
        Of the values: writes through ``.data``, numpy or a custom kernel are not counted.
    """

    look: tuple[Any, ...]
    digest: bytes

    @staticmethod
    def of(tensors: tuple[torch.Tensor, ...]) -> _Proof:
        """Return the proof of what a tensor holds now."""
        return _Proof(_looks(tensors), _digests(tensors))

    def holds(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether it holds that still."""
        return self.look == _looks(tensors) and self.digest == _digests(tensors)


def _looks(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return tuple(_look(t) for t in tensors)


def _digests(tensors: tuple[torch.Tensor, ...]) -> bytes:
    return b"".join(tensor_digest(t) for t in tensors)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    writes = -1 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.device, writes


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of a contiguous tensor's values, computed where it lies.

    On a device it is two sums over words, one of them weighted by their places: enough against
    writes by mistake.
    """
    if tensor.device.type == "cpu":
        return digest(as_bytes(tensor).data)
    flat = tensor.reshape(-1).view(torch.uint8)
    words = flat.numel() // 4
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for at in range(0, words, _DIGEST_WORDS):
        part = flat[4 * at : 4 * min(at + _DIGEST_WORDS, words)].view(torch.int32).long()
        places = torch.arange(at, at + part.numel(), device=tensor.device) * 2 + 1
        found += torch.stack([part.sum(), (part * places).sum()])
    rest = bytes(flat[4 * words :].cpu().tolist())
    return b"".join(v.to_bytes(8, "little", signed=True) for v in found.tolist()) + rest


class Subscriber(OfOneProcess, Closing):
    """Fills the tensors of an inference worker with the newest published version.

    Every rank of a rollout makes one and calls `update` alike; a rollout is one model over the
    ranks of `group`. All of them get the same version, or none does: a version is pulled whole
    first, and tensors change only when every rank has all that it needs. A trainer that dies, at
    any moment, leaves the version before.

    Parameters
    ----------
    layout
        How the rollout holds the model; see `ckptd.Checkpointer`. Its mesh has as many ranks as
        `group`.
    into
        A module, or a state as `ckptd.relayout` fills it.
    at, secret
        As the trainer's `Publisher` has them; or its `to`, a URL of a store, which takes no secret:
        what the worker needs of a version is then kept in host memory from update to update.
    group
        The process group of the rollout; None for a rollout of one process.
    budget_bytes
        Most memory for what is pulled over sockets before it is applied; None: as much as it takes.
        What is on this host is not staged.
    in_place
        What does not fit the budget is written as it comes, once all ranks are ready, instead of
        being refused. If that breaks off, `update` raises and the tensors are of no version:
        `version` is None, and another `update` has to succeed before they are used.
    carrier
        Brings the weights by another way than the servers' memory and sockets, as
        `ckptd.publish.torch.carrier.GroupCarrier` does; the publisher has its counterpart.
    derived
        Of tensors that an engine has computed of the weights, which are not published themselves:
        what refreshes them, by a glob of their names, such as ``*.w_vc``. It is called with each
        name, an attribute of a module in `into` or an entry of it, when an update is applied.
    pass_on
        Pass on to other workers what comes over sockets, and take it of them: the trainer then
        sends once what workers of one layout need. They connect to each other, so this process
        listens, and what was pulled last stays in host memory until it is replaced.
    root
        Where no publisher is reached, the newest checkpoint of this root is loaded.
    root_layout
        The layout of checkpoints there that were saved without one.
    timeout_s
        Longest time without a byte of a server, or without progress of another rank, in seconds.

    Raises
    ------
    UsageError, MismatchError
        The layout does not fit the tensors, on every rank.
    """

    def __init__(
        self,
        layout: LayoutSpec,
        into: nn.Module | Mapping[str, Any],
        at: str | os.PathLike[str],
        secret: str | bytes | None = None,
        *,
        group: Any = None,
        budget_bytes: int | None = None,
        in_place: bool = False,
        carrier: WeightCarrier | None = None,
        derived: Mapping[str, Callable[[str], object]] | None = None,
        pass_on: bool = False,
        root: str | os.PathLike[str] | None = None,
        root_layout: LayoutSpec | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._board: Board = LocalBoard() if group is None else board_of(group, timeout_s)
        self._agreement = Agreement(self._board, timeout_s)
        self._timeout_s = timeout_s
        self._budget_bytes = budget_bytes
        self._in_place = in_place
        self._carrier = carrier
        self._derived = dict(derived or {})
        self._pass_on = pass_on
        self._passing: Passing | None = None
        every = self._agreement.on_every_rank
        self._place: MeetingPlace | StoredWeights = every(
            lambda: StoredWeights(os.fspath(at)) if is_store(at) else MeetingPlace.of(at, secret)
        )
        self._state: Mapping[str, Any] = {"model": into} if isinstance(into, nn.Module) else into
        self._side = every(
            lambda: RelayoutSide.of(
                self._state, layout, self._agreement, range(self._board.world), quantized=True
            )
        )
        every(self._derivations)
        self._side.leaves = Leaves()  # an engine may free its tensors between updates
        self._filled = every(lambda: self._forms(look(self._state)))
        self._leaves = Leaves()
        """Those of an update, while it goes on."""
        self._fallback = (
            None
            if root is None
            else RootFallback(root, layout, root_layout, self._agreement, timeout_s)
        )
        self._version: WeightVersion | None = None
        self._leader: ServerLink | StoredWeights | None = None
        self._links: dict[int, ServerLink] = {}
        self._plan: PullPlan | None = None
        self._tensors: dict[str, tuple[torch.Tensor, ...]] = {}
        """This rank's tensors by their names in the program, each with the scales of its blocks, if
        it has any, while an update goes on."""
        self._where: dict[str, Any] = {}
        self._proofs: dict[str, _Proof] = {}
        self._pulse = RankHeartbeat(self._board, "update")
        self._answer_s = min(_ANSWER_S, timeout_s / 4)
        self._far = self._closed = False
        self.last_error: CkptdError | None = None
        """Why the last update found no publisher, or lost it; None where it did not."""

    @property
    def version(self) -> WeightVersion | None:
        """The version that the tensors hold; None before an update, and after one that failed."""
        return self._version

    @one_at_a_time
    def update(self, wait_s: float = 0.0, *, older: bool = False) -> UpdateReport | None:
        """Fill the tensors with the newest version. Every rank of the rollout calls it.

        Where no publisher is reached in this time, the newest checkpoint of `root` is loaded if its
        step is above the one that is held: whole, or not at all.

        Parameters
        ----------
        wait_s
            For a publisher, and a version that is newer than the one that is held, in seconds. A
            server that does not answer is waited for some 5 s in any case. What is found is pulled
            however long that takes, unless nothing comes for `timeout_s`.
        older
            Whether a checkpoint of `root` may be older than what is held, or the same again.

        Returns
        -------
        UpdateReport
            None: nothing is newer, or the publisher is not reached; the tensors are as before.

        Raises
        ------
        MismatchError, UsageError
            The published model is another one, or does not fit the budget; nothing was written. Or
            this is closed.
        CkptdError
            `state_corrupted`: the tensors are of no version, and `version` is None.
        """
        if self._closed:
            raise UsageError("the subscriber is closed", kind="closed")
        end = time.monotonic() + wait_s
        self.last_error = None
        while True:
            found = self._newest(max(0.0, end - time.monotonic()))
            if not isinstance(found, tuple):
                return None if found else self._from_root(older=older)
            begun = time.monotonic()
            version, leader, age_s = found
            try:
                stage = partial(self._stage, version, leader)
                staged = self._agreement.on_every_rank(stage, self._pulse)
            except CkptdError as error:
                self._let_go(_RELEASE_S)
                if error.kind not in _NOT_THERE:
                    raise
                self.last_error = error.without_frames()  # they hold what was pulled
                self._disconnect()
                _log.warning(
                    "could not get the weights of step %d: %s", version.step, error.message
                )
                # Ranks that came at other times would part here.
                if self._agreement.on_rank_zero("late", lambda: not time.monotonic() < end):
                    return self._from_root(older=older)
                time.sleep(_POLL_S)
                continue
            self._apply(staged, version)
            self.last_error = None
            seconds = time.monotonic() - begun
            report = UpdateReport(
                version=version, **asdict(staged.report), seconds=seconds, lag_s=age_s + seconds
            )
            self._emit(report)
            return report

    def _emit(self, report: UpdateReport) -> None:
        events.emit(
            events.VersionApplied(
                step=report.version.step,
                generation=0,
                rank=self._board.rank,
                at_ns=events.now_ns(),
                number=report.version.number,
                bytes=report.bytes_needed,
                unchanged=report.bytes_unchanged,
                received=report.bytes_received,
                duration_ns=int(report.seconds * 1e9),
                lag_ns=int(report.lag_s * 1e9),
            )
        )

    def _from_root(self, *, older: bool) -> UpdateReport | None:
        """Load the newest checkpoint, where there is a root and it has a newer one."""
        if self._fallback is None:
            return None
        held, begun = self._version, time.monotonic()
        above = -1 if held is None or older else held.step
        side = self._side
        own = own_tensors(side, look(self._state), {""})
        names = frozenset(side.names[x.laid.name] for x in own)
        try:
            report = self._fallback.load(self._state, names, above)
        except BaseException as error:
            if not isinstance(error, CkptdError) or error.state_corrupted:
                self._version = None
            raise
        if report is None:
            return None
        self._version = WeightVersion(report.step, 0, "")
        _log.info("no publisher is reachable: loading step %d from the root", report.step)
        read = report.read.bytes_copied
        found = UpdateReport(
            version=self._version, bytes_needed=read, seconds=time.monotonic() - begun
        )
        self._emit(found)
        return found

    # --- which version --------------------------------------------------------------------------

    def _newest(self, wait_s: float) -> tuple[WeightVersion, ServerEntry, float] | bool:
        """Return what all ranks of the rollout are to have, as rank 0 finds it, and its age.

        Without that: whether a publisher was reached.
        """
        end = time.monotonic() + wait_s
        raw = None
        while raw is None:  # for an answer of rank 0 the others wait `timeout_s` at most
            raw = self._agreement.on_rank_zero("newest", lambda: self._look(end))
        if isinstance(raw, bool):
            return raw
        step, number, age_s, epoch, host, address, socket = raw
        entry = ServerEntry(host, address, socket, epoch)
        return WeightVersion(step, number, epoch), entry, age_s

    def _look(self, end: float) -> list[Any] | bool | None:
        """Ask for a newer version until there is one; else say whether a publisher is there.

        None: neither is known yet, and there is time left.
        """
        own = min(end, time.monotonic() + self._timeout_s / 2)
        while True:
            left = own - time.monotonic()
            try:
                found = self._ask(max(0.0, min(left, _MOST_WAIT_S)))
                self.last_error = None
            except CkptdError as error:
                self._disconnect()
                if error.kind not in _NOT_THERE:
                    raise
                found, self.last_error = None, error.without_frames()
            if found is not None:
                return found
            if left <= 0:
                return self._leader is not None if own == end else None
            if self._leader is None:
                time.sleep(min(_POLL_S, max(0.0, left)))

    def _ask(self, wait_s: float) -> list[Any] | None:
        end = time.monotonic() + wait_s
        entry = self._place.find()
        if entry is None:
            return None
        known = self._leader
        if known is not None and entry.epoch and entry.epoch != known.entry.epoch:
            self._disconnect()  # another publisher has come
        leader = self._connect(entry)
        held = self._version
        than = held.number if held is not None and held.epoch == leader.entry.epoch else 0
        newest = leader.newest(than, max(0.0, min(end - time.monotonic(), 2.0)), self._answer_s)
        if not newest.number:
            return None
        at = leader.entry
        return [newest.step, newest.number, newest.age_s, at.epoch, at.host, at.address, at.socket]

    def _connect(self, entry: ServerEntry) -> ServerLink | StoredWeights:
        if self._leader is None or self._leader.lost:
            self._disconnect()
            place = self._place
            at = place.at(entry) if isinstance(place, StoredWeights) else self._link(entry, place)
            self._leader = at
        return self._leader

    def _link(self, entry: ServerEntry, place: MeetingPlace) -> ServerLink:
        return ServerLink.to(
            entry,
            place.proof,
            wait_s=self._timeout_s,
            connect_s=self._answer_s,
            far=self._far,
        )

    # --- one version ----------------------------------------------------------------------------

    def _stage(self, version: WeightVersion, entry: ServerEntry) -> StagedPull:
        """Hold a version, and pull it up to the last byte."""
        if self._leader is not None and self._leader.entry.epoch != entry.epoch:
            self._disconnect()
        leader = self._connect(entry)
        hold = VersionHold(leader, version.number)
        if not hold.good:
            raise TransientStoreError(
                "the version was replaced while it was read", kind="no-version"
            )
        plan = self._planned(version, leader)
        held = self._version
        same = held is not None and held.epoch == version.epoch
        since = HeldTensors(held.number, self._proved()) if held is not None and same else None
        return self._pulled(
            plan, version, leader, hold, since, in_place=self._in_place, pass_on=self._pass_on
        )

    def _pulled(
        self,
        plan: PullPlan,
        version: WeightVersion,
        leader: ServerLink | StoredWeights,
        hold: VersionHold,
        since: HeldTensors | None,
        *,
        in_place: bool,
        pass_on: bool = False,
    ) -> StagedPull:
        def step() -> None:
            hold.keep()
            self._pulse.beat()

        budget = self._budget_bytes
        if isinstance(leader, StoredWeights):
            mirrors, received, kept = leader.pull(plan, version.number, budget, step)
            readers: Mapping[int, SlotReader] = mirrors
        else:
            readers = self._readers(plan, leader)
        far = not all(r.local for r in readers.values())
        passing = self._passes(leader) if pass_on and far else None
        staged = plan.stage(
            version.number,
            readers,
            budget,
            since,
            in_place=in_place,
            step=step,
            passing=passing,
        )
        if isinstance(leader, StoredWeights):
            staged.report = replace(
                staged.report, bytes_received=received, bytes_mapped=0, staged_bytes=kept
            )
        return staged

    def _passes(self, leader: ServerLink | StoredWeights) -> Passing | None:
        """Return what passes on, for another update."""
        if self._passing is None and isinstance(self._place, MeetingPlace):
            there = parse_address(leader.entry.address, "a publisher's address")
            self._passing = Passing(self._place.proof, address_towards(there.host))
        if self._passing is not None:
            self._passing.begin()
        return self._passing

    def _readers(self, plan: PullPlan, leader: ServerLink) -> Mapping[int, SlotReader]:
        """Return what reads from each rank of the publisher."""
        missing = [g for g in plan.givers if g not in self._links or self._links[g].lost]
        for giver in missing:
            if (old := self._links.pop(giver, None)) is not None:
                old.close()
        if missing and isinstance(self._place, MeetingPlace):
            found = leader.ask(AskWhere(tuple(missing)), ServerList).entries
            for giver, at in zip(missing, found, strict=True):
                self._links[giver] = self._link(at, self._place)
        links = {g: self._links[g] for g in plan.givers}
        carrier = self._carrier
        return links if carrier is None else {g: carrier.reader(g, x) for g, x in links.items()}

    def _proved(self) -> frozenset[str]:
        """Return the own tensors that hold what was applied last, whatever happened to them."""
        found = self._tensors
        return frozenset(n for n, p in self._proofs.items() if n in found and p.holds(found[n]))

    def _scales(self, leaves: Leaves) -> dict[str, TensorLeaf]:
        """Return the scales of this rank's quantized tensors, by the names of these.

        Raises
        ------
        MismatchError
            ``lay-fit``: they are not there.
        """
        side, found = self._side, by_name(leaves)
        if side.laid.rank is None:
            return {}
        tensors = local_tensors(side.job.form, side.laid.rank)
        wanted = {t.name: n for t, _, n in quantized_tensors(side.job.form, tensors)}
        names = {ours: wanted[theirs] for ours, theirs in side.names.items() if theirs in wanted}
        missing = sorted(n for n in names.values() if n not in found)
        if missing:
            raise MismatchError(
                "scales are missing for tensors that the layout declares quantized",
                kind="lay-fit",
                where=first_few(missing),
            )
        return {ours: found[n] for ours, n in names.items()}

    def _forms(self, leaves: Leaves) -> SavedNames:
        """Return type and shape of what updates fill, by its names in the state."""
        check_filled(self._side, self._state, leaves)
        names = {*self._side.names.values(), *(x.name for x in self._scales(leaves).values())}
        found = {n: (x.dtype, x.shape) for n, x in by_name(leaves).items() if n in names}
        return SavedNames(found, live=True)

    def _prove(self, staged: StagedPull, *, first: bool) -> None:
        """Note what the tensors hold, of those that do not change at every version.

        To be sure of a tensor costs a pass over it before and after: that is spared for those that
        change anyway.
        """
        if first:
            self._proofs.clear()
        elif staged.changed is None:
            for name in staged.written:  # what was proved was an earlier version
                self._proofs.pop(name, None)
            return
        for name, tensor in self._tensors.items():
            changes = staged.changed is not None and name in staged.changed
            if changes:
                self._proofs.pop(name, None)
            elif first or name not in self._proofs or name in staged.written:
                self._proofs[name] = _Proof.of(tensor)

    def _planned(self, version: WeightVersion, leader: ServerLink | StoredWeights) -> PullPlan:
        """Return the plan for a publisher and for the memory that the tensors have now."""
        side = self._side
        self._leaves = leaves = prepare(self._state, self._filled)
        check_filled(side, self._state, leaves)
        own = list(own_tensors(side, leaves, {""}))
        memory = {x.laid.name: memory_of(x.local, x.leaf.name) for x in own}
        found = self._scales(leaves)
        scales = {
            n: ScaleMemory(x.name, memory_of(x.local, x.name), x.shape) for n, x in found.items()
        }
        for x in own:
            name = x.laid.name
            self._tensors[name] = (x.local, found[name].local) if name in found else (x.local,)
        where = {n: (m.numel, m.dtype) for n, m in memory.items()}
        where |= {x.name: (x.memory.numel, x.memory.dtype) for x in scales.values()}
        if self._plan is None or self._plan.epoch != version.epoch or self._where != where:
            about = leader.ask(AskAbout(), PublishedAbout)
            self._plan = PullPlan(about, side.form.bound, side.laid.rank or 0, memory, scales)
            self._where = where
        else:
            self._plan.lend(memory, scales)
        return self._plan

    def _apply(self, staged: StagedPull, version: WeightVersion) -> None:
        first = self._version is None or self._version.epoch != version.epoch
        self._version = None
        problem: CkptdError | None = None
        try:
            with torch.no_grad():
                staged.apply()
                self._settle()
                if self._passing is not None:
                    self._passing.keep(staged.handed())
                staged.give_back()
                self._prove(staged, first=first)
            # What modules do as they are loaded comes after: a proof is of what was published.
            filled = {x.name for n in self._filled.tensors if (x := self._leaves.tensor(n))}
            apply_objects(self._leaves, {}, tensors=filled)
            with torch.no_grad():
                self._derive()
            self._settle()
        except CkptdError as error:
            problem = error
        finally:
            self._let_go()
        try:
            self._agreement.no_errors(problem, self._pulse)
        except CkptdError as error:
            error.state_corrupted = True
            raise
        self._version = version

    def _derivations(self) -> dict[str, Callable[[str], object]]:
        """Return what refreshes each derived tensor, by its name in the state.

        Raises
        ------
        UsageError
            A glob has none.
        """
        every: set[str] = set()
        for name, value in self._state.items():
            modules = value.named_modules() if isinstance(value, nn.Module) else ()
            for at, module in modules:
                own = {**vars(module), **module._buffers, **module._parameters}
                found = [n for n, x in own.items() if isinstance(x, torch.Tensor)]
                every |= {f"{at}.{n}" if at else n for n in found}
            every |= set(value) if isinstance(value, Mapping) else {name}
        out: dict[str, Callable[[str], object]] = {}
        for glob, refresh in self._derived.items():
            names = sorted(fnmatch.filter(every, glob))
            if not names:
                raise UsageError("no tensor has the name of a derived one", where=glob)
            out |= dict.fromkeys(names, refresh)
        return out

    def _derive(self) -> None:
        """Refresh what is derived of the weights."""
        for name, refresh in self._derivations().items() if self._derived else ():
            try:
                refresh(name)
            except Exception as error:
                raise CkptdError(
                    "a derived tensor was not refreshed", where=name, found=repr(error)[:500]
                ) from error

    def _derived_digest(self, name: str) -> bytes:
        """Return the digest of a derived tensor as it is now."""
        for value in self._state.values():
            found: Any = value.get(name) if isinstance(value, Mapping) else value
            try:
                for part in name.split(".") if isinstance(value, nn.Module) else ():
                    found = getattr(found, part)
            except AttributeError:
                continue
            if isinstance(found, torch.Tensor):
                return tensor_digest(found.detach().contiguous())
        return b""

    @one_at_a_time
    def audit(self) -> tuple[str, ...]:
        """Return names of own tensors that differ from the version that is held. Every rank calls.

        Names are those of the layout, and of this rank's tensors alone.
        The version is pulled once more, into other memory, and compared bit for bit. What is
        derived is refreshed, and named if that changed it: it was stale.

        Raises
        ------
        UsageError
            No published version is held.
        NotFoundError
            Kind ``no-version``: its publisher does not have it any more.
        """
        version = self._version
        if version is None or not version.number:
            raise UsageError("no published version is held, so there is nothing to compare")
        return self._agreement.on_every_rank(lambda: self._audited(version), self._pulse)

    def _audited(self, version: WeightVersion) -> tuple[str, ...]:
        entry = self._place.find()
        leader = None if entry is None else self._connect(entry)
        hold = None
        if leader is not None and leader.entry.epoch == version.epoch:
            hold = VersionHold(leader, version.number)
        if leader is None or hold is None or not hold.good:
            raise NotFoundError(
                "version not available from the publisher",
                kind="no-version",
                where=f"version {version.number}",
            )
        try:
            plan, own = self._planned(version, leader), dict(self._tensors)
            found = self._scales(self._leaves)
            fresh = {n: tuple(t.detach().clone() for t in x) for n, x in own.items()}
            plan.lend(
                {n: memory_of(x[0], n) for n, x in fresh.items()},
                {
                    n: ScaleMemory(x.name, memory_of(fresh[n][1], x.name), x.shape)
                    for n, x in found.items()
                },
            )
            staged = self._pulled(plan, version, leader, hold, None, in_place=True)
            with torch.no_grad():
                staged.apply()
                self._settle()
                staged.give_back()
            names = [n for n, x in own.items() if _digests(x) != _digests(fresh[n])]
            stale = []
            if self._derived:
                before = {n: self._derived_digest(n) for n in self._derivations()}
                with torch.no_grad():
                    self._derive()
                stale = [n for n, was in before.items() if self._derived_digest(n) != was]
        finally:
            self._let_go()
        return (*names, *stale)

    def _settle(self) -> None:
        """Wait until devices have what was enqueued: other streams may use the weights next."""
        found = {t.device for own in self._tensors.values() for t in own}
        for device in filter(has_streams, found):
            torch.get_device_module(device).synchronize(device)

    def _let_go(self, wait_s: float = _ANSWER_S) -> None:
        """Allow the version's slot to be filled; its memory is left where that is not answered."""
        self._tensors, self._leaves = {}, Leaves()
        if self._plan is not None:
            self._plan.lend({})
        if self._leader is not None:
            with suppress(CkptdError):
                self._leader.ask(AskRelease(), HoldAnswer, min(wait_s, self._answer_s))

    def _disconnect(self) -> None:
        for link in (self._leader, *self._links.values()):
            if link is not None:
                link.close()
        self._leader = None
        self._links = {}

    @one_at_a_time
    def close(self) -> None:
        """End the connections. Idempotent."""
        self._closed = True
        self._disconnect()
        if self._passing is not None:
            self._passing.close()
        if isinstance(self._place, StoredWeights):
            self._place.end()
