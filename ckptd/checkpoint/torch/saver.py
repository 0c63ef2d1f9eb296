"""From a live state to a save under way: flatten, plan, slot, copies, warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from ckptd import events
from ckptd.base.digest import digest_hex
from ckptd.base.grids.owners import Owners
from ckptd.base.grouping import by_key
from ckptd.base.runtime.pauses import no_collection
from ckptd.base.torch.device import is_capturing
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.codec import checked_metadata, shares
from ckptd.checkpoint.format.manifest import ObjectEntry, Runs3
from ckptd.checkpoint.save.client import WriterClient, post_failure
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import INLINE_OBJECT_BYTES, Extra, SaveRequest
from ckptd.checkpoint.save.structure import (
    RankGroup,
    ReplicaHolders,
    SavePlan,
    Structure,
    build_plan,
)
from ckptd.checkpoint.torch.copy import CopyForm, CopySources, Snapshot, copy_steps
from ckptd.checkpoint.torch.feed import CopyStep
from ckptd.checkpoint.torch.gate import Gate
from ckptd.checkpoint.torch.layouts import LayoutSave, NoLayout
from ckptd.checkpoint.torch.ondevice import DeviceCopies, captured
from ckptd.checkpoint.torch.options import CopyOptions
from ckptd.checkpoint.torch.replicas import Samples, replica_digests, shards_in_common
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.flatten import Flattener
from ckptd.checkpoint.torch.state.leaves import Leaves, TensorLeaf
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, ProcessError, SaveError
from ckptd.events.bus import at_step, phase

_groups = json_decoder(dict[str, Runs3])

_FAILED = "structure-failed"


class SavePlanner:
    """Keeps the plan of the last structure.

    A rank whose structure did not change goes on with the plan it has and exchanges nothing. When
    the structure changes on every rank at one save (an optimizer's first step, say), all of them
    take part in one exchange: a digest a rank to rank 0, and the distinct structures to every rank.
    When it changes on some ranks only, those wait for the others in vain and raise that.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._known = ""
        self.structure = ""
        """Digest of this rank's structure at the last call of `plan`."""
        self.holders: ReplicaHolders | None = None
        """Ranks that hold the same parts as this one, by the last plan; None in a job of one."""
        self._plan: SavePlan | None = None
        self._planned: Structure | None = None
        self._failures = 0

    def after_failure(self, error: CkptdError) -> None:
        """Plan afresh at the next save if that is what a failed save was about, on any rank.

        Where something else failed, on a rank alone perhaps, every rank goes on with the plan it
        has: one that made another would wait for ranks that exchange nothing.
        """
        board = self._agreement.board
        failures = 0 if board.world == 1 else board.count(_FAILED)
        if error.kind == "structure" or failures != self._failures:
            self._known, self._failures = "", failures

    def plan(self, structure: Structure, save: str = "") -> SavePlan:
        """Return the plan for this structure, the same on every rank.

        Parameters
        ----------
        save
            Names the save, the same on every rank; empty where every rank plans each time.

        Raises
        ------
        DeadlineError
            Some ranks did not take part: their structure did not change.
        UsageError
            Ranks disagree on the shape or dtype of a tensor.
        """
        if self._plan is not None and structure is self._planned and self.structure == self._known:
            return self._plan
        raw = structure.encode()
        own = self.structure = digest_hex(raw)
        if self._plan is not None and own == self._known:
            self._planned = structure
            return self._plan
        board = self._agreement.board
        if board.world == 1:
            groups = [RankGroup(structure, (0,))]
        else:
            try:
                groups = self._exchange(own, raw, save)
            except CkptdError:
                self._known = ""
                with suppress(CkptdError):  # what failed is raised, not this
                    board.add(_FAILED)  # the others have a plan, and see that it is of no use
                raise
        plan = build_plan(groups, board.world)
        self.holders = ReplicaHolders(groups, board.rank) if board.world > 1 else None
        self._plan = plan
        self._known, self._planned = own, structure
        return self._plan

    def _exchange(self, own: str, raw: bytes, save: str) -> list[RankGroup]:
        board = self._agreement.board

        def tabulate(digests: list[bytes]) -> bytes:
            ranks = by_key((digest.decode(), rank) for rank, digest in enumerate(digests))
            return msgspec.json.encode({d: Owners.from_array(r).runs for d, r in ranks.items()})

        table = self._agreement.all_reports("structure", own.encode(), tabulate, save)
        by_digest = {d: Owners(r).array().tolist() for d, r in _groups.decode(table).items()}
        # Only the first rank of each group publishes its structure, under its digest.
        if by_digest[own][0] == board.rank:
            board.set(f"structure/{own}", raw)
        groups = []
        for digest, ranks in by_digest.items():
            key = f"structure/{digest}"
            body = raw if digest == own else self._agreement.wait(key, ranks[0], 600.0)
            groups.append(RankGroup(Structure.decode(body), tuple(ranks)))
        return groups


_log = logging.getLogger("ckptd")
_COPIER = "ckptd-copy"


def wait_for_copying(until: float) -> bool:
    """Wait until the threads have ended that copy for savers that were closed or left.

    Parameters
    ----------
    until
        When to wait no more, by ``time.monotonic``.

    Returns
    -------
    bool
        False: one still copies, and keeps its slot and what it copies from.
    """
    threads = [t for t in threading.enumerate() if t.name.startswith(_COPIER)]
    return all(_has_ended(thread, until) for thread in threads)


def _has_ended(thread: threading.Thread, until: float) -> bool:
    while True:
        try:
            thread.join(max(0.0, until - time.monotonic()))
        except RuntimeError:
            # An interrupt ended the call that starts it, before it had begun: it does so by itself.
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)
        else:
            return not thread.is_alive()


class Saver:
    """Turns states into saves for one checkpointer.

    Parameters
    ----------
    ranks
        Global ranks of the process group by group rank.
    layout
        What says which tensors of the state are parts of larger ones.
    copy
        What is copied after `save` returned, and what is digested.
    refer
        Refer to chunks that did not change.
    """

    def __init__(
        self,
        agreement: Agreement,
        ranks: Sequence[int],
        timeout_s: float,
        layout: NoLayout,
        *,
        copy: CopyOptions,
        refer: bool = True,
    ) -> None:
        self._layout = layout
        self._refer = refer
        self._board = agreement.board
        self._flattener = Flattener()
        self._planner = SavePlanner(agreement)
        self._describer = Describer(ranks)
        self._timeout_s = timeout_s
        self._structure: tuple[object, Structure] | None = None
        self._steps: list[CopyStep] = []
        self._steps_of, self._tensor_bytes = "", 0
        self._form: tuple[object, CopyForm] | None = None
        self._options = copy
        self.gate = Gate(timeout_s)
        """Holds mutations back until the copies are done."""
        self._unchecked: list[SaveTracker] = []
        self._warned = False
        self._device_copies = DeviceCopies()
        # Not a daemon: a process that ends without close() still completes what it began to copy.
        self._copier = ThreadPoolExecutor(1, _COPIER)

    def is_locked(self, memory: memoryview) -> bool:
        """Tell whether memory of the arena is page-locked, so that devices copy from it."""
        return self._device_copies.pins.covers(memory)

    def close(self) -> None:
        """Complete the copying and remove the hooks of the optimizers."""
        self.gate.release()
        self._copier.shutdown(wait=False)
        self._device_copies.close()

    def leave(self, timeout_s: float) -> None:
        """Remove the hooks of the optimizers; wait so long for a copy under way, in seconds."""
        self.gate.leave(timeout_s)
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._device_copies.close()

    @phase("ckpt")
    def save(
        self,
        client: WriterClient,
        state: Mapping[str, Any],
        wanted: SaveRequest,
        metadata: Mapping[str, Any],
        *,
        goes_on: bool = False,
    ) -> SaveTracker:
        """Begin to copy the state into a slot, and have it written.

        On return everything is copied but what the gate holds.

        Parameters
        ----------
        wanted
            What is known before the state is looked at.
        metadata
            The user's; rank 0's counts.
        goes_on
            That the writing process died is not raised; the handle has it.

        Raises
        ------
        CkptdError
            The state cannot be saved, ranks disagree, or the previous save does not end. The
            other ranks' saves of this attempt then fail too, with the same reason.
        """
        step, near, root = wanted.step, wanted.near, wanted.root
        at_step(step)
        handle = SaveTracker(step, wanted.generation, wanted.attempt, 0, near=near, root=root)
        key = f"save/{wanted.generation}/{step}/{wanted.attempt}"
        # Failures of earlier saves, also of those whose handles the program has looked at.
        for failed in [h for h in self._unchecked if h.done or h.failure is not None]:
            self._unchecked.remove(failed)
            if failed.failure is not None:
                self._planner.after_failure(failed.failure)
        self._unchecked.append(handle)
        try:
            if is_capturing():
                raise captured("save")
            self.gate.check()
            # Only rank 0's count; what is wrong with them is raised before a byte is copied.
            checked = checked_metadata(metadata) if self._board.rank == 0 else {}
            handle.numbers = events.numbers_of(checked)
            with events.span("flatten"), no_collection():
                laid, structure = self._described(state)
                leaves = laid.leaves
            with events.span("plan"):
                plan = self._planner.plan(structure, key)
            objects, extras, bodies = self._values(leaves, plan)
            save = msgspec.structs.replace(
                wanted,
                plan=plan.digest,
                extra=extras,
                objects=objects,
                metadata=checked,
                refer=self._refer,
            )
            self._copy(client, save, plan, laid, bodies, handle, key)
            for value in leaves.per_rank.values():
                if value.follower is not None:
                    value.follower.saved(step)
        except CkptdError as error:
            post_failure(self._board, key, error, near)
            if not (goes_on and isinstance(error, ProcessError)):
                handle.fail(error)
                raise
            _log.warning("step %d is not saved: %s", step, error.message)
            for tier in near:
                handle.settle(tier, error)
            if root:
                handle.fail(error)
        except BaseException as error:  # of the program's own methods, or of its user
            left = SaveError(f"save was interrupted: {error!r}"[:500], kind="aborted")
            handle.fail(left)
            with suppress(CkptdError):  # what was raised counts
                post_failure(self._board, key, left, near)
            raise
        return handle

    def _described(self, state: Mapping[str, Any]) -> tuple[LayoutSave, Structure]:
        """Return the leaves of a state, by what a layout says of them, and their structure."""
        laid = self._layout.saving(self._flattener.flatten(state))
        leaves = laid.leaves
        key = (leaves.known, *leaves.objects)
        known = self._structure
        if known is not None and leaves.known is not None and known[0] == key:
            structure = known[1]
        else:
            structure = self._describer.structure(leaves, list(leaves.objects))
            self._structure = (key, structure)
            if self._board.world > 1 and self._board.rank == 0 and not self._warned:
                self._warn_of_statistics(leaves)
        return laid, laid.structure(structure)

    def _warn_of_statistics(self, leaves: Leaves) -> None:
        """Log once whose statistics are saved, where nothing shows that the others' are of no use.

        A wrapper that overwrites them from rank 0 may be there and not in the state.
        """
        names = [n for n, leaf in leaves.tensors.items() if leaf.own == "statistics"]
        if names:
            self._warned = True
            _log.warning(
                "%d buffers of norm layers (%s, ...) are statistics of what each rank has seen: "
                "those of the lowest rank that has them are saved, as DistributedDataParallel "
                "broadcasts them; torch.nn.SyncBatchNorm has the same on all ranks",
                len(names),
                names[0],
            )

    def _sources_of(self, laid: LayoutSave) -> CopySources:
        held: Callable[[TensorLeaf], bool] = lambda leaf: self._options.lazy == "all"  # noqa: E731
        if self._options.lazy != "off":
            # Each time: hooks may have been lost.
            guarded = self.gate.guard(laid.leaves.optimizers)
            held = guarded if self._options.lazy == "auto" else held
        tensors, known = laid.sources, laid.known
        key = (known, self._steps_of)
        if self._form is None or known is None or self._form[0] != key:
            self._form = key, CopyForm(self._steps, tensors, held)
        return CopySources(self._form[1], tensors)

    def _copy(
        self,
        client: WriterClient,
        save: SaveRequest,
        plan: SavePlan,
        laid: LayoutSave,
        bodies: list[bytes],
        handle: SaveTracker,
        key: str,
    ) -> None:
        """Hand the save over, copy what may change at once, and let a thread copy the rest."""
        rank = self._board.rank
        if self._steps_of != plan.digest:
            self._steps_of = ""
            plan.filemap.check_header(rank)  # too many chunks: now, not later
            with no_collection():
                self._steps = copy_steps(plan, rank, laid, self._describer)
            self._steps_of, self._tensor_bytes = plan.digest, plan.filemap.data_bytes(rank)
        total = self._tensor_bytes + sum(map(len, bodies))
        handle.total_bytes = total
        with no_collection():
            sources = self._sources_of(laid)
        holders = self._planner.holders
        samples = None
        if holders is not None:
            shards = shards_in_common(laid.leaves.tensors, holders)
            samples = Samples(shards, laid.views(holders))

        def give_up(reason: object) -> None:
            client.abandon(save.job, f"copying the state failed: {reason}"[:500])

        with events.span("acquire"):
            slot = client.acquire(total, self._timeout_s)
        scope = events.current()  # the copier's thread does not inherit it
        try:
            client.begin(save, plan, handle, key, slot)
            with events.span("enqueue"), no_collection():
                snapshot = Snapshot(
                    sources,
                    slot,
                    look=self._options.debug,
                    copies=self._device_copies,
                    clone=self._options.lazy != "off",
                    samples=samples,
                    timeout_s=self._timeout_s,
                )
                snapshot.copy_now()
                at = self._tensor_bytes
                for body in bodies:
                    slot.put(at, np.frombuffer(body, dtype=np.uint8))
                    at += len(body)

            def finish() -> None:
                try:
                    with events.about(*scope), events.span("copy", nbytes=total):
                        snapshot.copy_rest()
                    slot.staged = total
                    common: tuple[Any, ...] = ()
                    if holders is not None and samples is not None:
                        known, leaves = laid.replica_tables(holders, samples), laid.leaves
                        common = replica_digests(
                            leaves.tensors, leaves.objects, holders, known, samples
                        )
                    client.seal(save.job, slot, *common)
                    slot.warm_up()
                    if snapshot.devices:
                        self._device_copies.lock_later(slot, snapshot.devices)
                except CkptdError as error:
                    client.abandon(save.job, error.message, error)
                except BaseException as error:  # noqa: BLE001 - the handle has it
                    give_up(repr(error))

            copy = self._copier.submit(finish)
            self.gate.close(copy, give_up, snapshot if snapshot.devices else None)
        except BaseException as error:
            cause = error if isinstance(error, CkptdError) else None
            client.abandon(save.job, f"copying the state failed: {error!r}"[:500], cause)
            self.gate.close_behind(self._copier)
            raise
        if self._options.lazy == "off":
            self.gate.settle()

    def _values(
        self, leaves: Leaves, plan: SavePlan
    ) -> tuple[tuple[ObjectEntry, ...], tuple[Extra, ...], list[bytes]]:
        """Encode what is no tensor.

        Returns
        -------
        objects
            What stands in the manifest; from the lowest rank of each group of alike ranks alone.
        extras, bodies
            Chunks of private size, and their bytes: per-rank values, then large objects.
        """
        extras, bodies = [], []
        for name in sorted(leaves.per_rank):
            leaf = leaves.per_rank[name]
            body = msgspec.json.encode(leaf.raw)
            bodies.append(body)
            extras.append(Extra(name, len(body), leaf.on_change, shares(body)))
        if self._board.rank not in plan.leaders:
            return (), tuple(extras), bodies
        large: dict[str, bytes] = {}
        for name, value in leaves.objects.items():
            if value.kind == "value" and not isinstance(value.raw, int | float | bool | None):
                body = msgspec.json.encode(value.raw)
                if len(body) > INLINE_OBJECT_BYTES:
                    large[name] = body
        for name in sorted(large):
            if plan.homes.get(name) == self._board.rank:
                bodies.append(large[name])
                extras.append(Extra(name, len(bodies[-1]), shares=shares(bodies[-1])))
        inline = tuple(
            ObjectEntry(name, value.raw, kind=value.kind)
            for name, value in leaves.objects.items()
            if name not in large
        )
        return inline, tuple(extras), bodies
