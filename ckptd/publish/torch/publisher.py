"""`Publisher`: slots and their memory, copies, versions that are skipped, servers that died.

In it: how many slots at least; the share of memory for deltas; how many versions it remembers; how
long a place, a copy and the end are awaited.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd import events
from ckptd.base.closing import Closing
from ckptd.base.net.address import is_here, is_loopback
from ckptd.base.runtime.agentlink import run_folder
from ckptd.base.runtime.launched import whole as uninterrupted
from ckptd.base.runtime.ownership import (
    OfOneProcess,
    not_at_exit,
    not_below,
    not_within,
    one_at_a_time,
)
from ckptd.base.runtime.ranks import Board, error_fields, posted
from ckptd.base.torch.device import is_capturing
from ckptd.base.torch.ranks import Agreement, JobBoard, bind_address, board_of
from ckptd.base.torch.tensors import dtype_name
from ckptd.checkpoint.format.names import check_step
from ckptd.checkpoint.root.policy import check_positive
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.torch.copy import CopyForm, CopySources, Snapshot
from ckptd.checkpoint.torch.feed import CopyStep
from ckptd.checkpoint.torch.gate import Gate
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.ondevice import DeviceCopies, captured
from ckptd.checkpoint.torch.state.flatten import Flattener
from ckptd.checkpoint.torch.state.leaves import Leaves, TensorLeaf
from ckptd.decoding import json_decoder, msgpack_decoder
from ckptd.elastic.torch.session.elastichooks import abandonable, let_be
from ckptd.errors import (
    CkptdError,
    DeadlineError,
    NotFoundError,
    ProcessError,
    SaveError,
    UsageError,
)
from ckptd.lay.bind import bind_sizes, with_globs
from ckptd.publish.blocks import gather_blocks, read_bytes
from ckptd.publish.carrier import WeightCarrier
from ckptd.publish.client import PublishClient
from ckptd.publish.meeting import MeetingPlace
from ckptd.publish.messages import (
    BlockRead,
    Opening,
    PublishedAbout,
    PublishedTensor,
    ServerEntry,
    SetDirectory,
    SetLeader,
    SetTensors,
    SlotAnswer,
    SlotMemory,
    VersionDropped,
    VersionSealed,
    VersionWhole,
    check_about,
)
from ckptd.reshard.torch.relayout import RelayoutSide, own_tensors
from ckptd.types import dtype_of

_log = logging.getLogger("ckptd")
_ALIGN = 64
_DELTA_SHARE = 4
"""Of the memory of a slot, a part that the server keeps of what changed from version to version."""
_MOST_STEP = (1 << 63) - 1
"""Messages carry no larger integer. A step may count the milliseconds since 1970."""
_KNOWN = 64
"""Versions of which it stays known whether they were whole; of those before, which were not."""
_POLL_S = 0.02
_PLACE_S = 0.2
_LEAVE_S = 0.3
_DROPPED = 1 << 32
_LOST, _SETTLED = "publish/lost", "publish/settled"
_entries = json_decoder(ServerEntry)
_settled = msgpack_decoder(tuple[tuple[int, ...], tuple[int, ...]])


class Publication(OfOneProcess):
    """One call of `Publisher.publish`.

    Attributes
    ----------
    step
        As given.
    number
        Counts the versions of this publisher, from 1.
    skipped
        Why this version is not published; empty where it is.
    """

    def __init__(self, step: int, number: int, skipped: str = "") -> None:
        self.step = step
        self.number = number
        self.skipped = skipped
        self._copied: Future[None] = Future()
        self._whole: Callable[[float], None] | None = None

    def wait(self, timeout_s: float = 300.0) -> bool:
        """Return whether every rank has its share in place, so that workers can have it.

        False for a version that is skipped.

        Raises
        ------
        CkptdError
            It will never be: what this rank failed with.
        DeadlineError
            Not within `timeout_s`.
        UsageError
            Kind ``under-way``: a signal handler calls it within a call of a publisher.
        """
        not_below("Publisher", "wait")
        if self.skipped:
            return False
        try:
            self._copied.result(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                "copying a version did not finish in time",
                kind="board",
                wanted=f"within {timeout_s:.0f} s",
            ) from None
        if self._whole is not None:
            self._whole(timeout_s)
        return True


class _Shape(NamedTuple):
    """The tensors that this rank publishes.

    Attributes
    ----------
    names
        Of the leaves, in the order of the slot.
    """

    side: RelayoutSide
    names: tuple[str, ...]
    tensors: tuple[PublishedTensor, ...]
    steps: list[CopyStep]
    nbytes: int
    looks: tuple[tuple[str, tuple[int, ...], str], ...]


class Publisher(OfOneProcess, Closing):
    """Publishes the weights of a trainer to inference workers.

    Every rank makes one, at the same time, and calls `publish` at the same steps. Each rank copies
    what it has into a slot in shared memory, as a save does: tensors that only an optimizer in
    `state` changes are copied while training goes on. A process beside the rank serves the slots.
    Workers (`ckptd.Subscriber`) pull what they need of each; the trainer waits for none of them.

    Parameters
    ----------
    layout
        How the ranks hold the model; see `ckptd.Checkpointer`. Its mesh has as many ranks as the
        process group.
    at
        Where workers find the publisher: a folder that all see, or ``tcp://HOST:PORT``, an address
        of rank 0's machine, which then listens there.
    secret
        What trainer and workers prove to each other; ``CKPTD_SECRET`` when None, and without that
        in a folder the one of a file there.
    budget_bytes
        Most memory of this rank for all slots; None: as much as they take. Its server keeps changes
        from version to version in a quarter of a slot more, or in what this leaves.
    to
        URL of a store that versions are written to, for workers without a connection: ``s3://``,
        ``file:///``, or another one. `at` may be left out then.
    anchor_every, keep_anchors
        Of the versions there every so many have all bytes, the others what changed; so many of
        those stay, with what came after.
    slots
        Versions that there is room for on every rank, at least 2: one that a worker holds, and one
        that is being filled.
    process_group
        The trainer's ranks; the default group when None.
    lease_s
        For so long a worker may hold a version, in seconds; then its slot is given up to it.
    linger_s
        For so long after the trainer's death workers still get the last version, in seconds.
    carrier
        Answers workers that have its counterpart; see `ckptd.Subscriber`.
    timeout_s
        Longest wait for other ranks, in seconds.

    Raises
    ------
    UsageError
        The layout, the place or the secret is none. Fewer than two slots; no time or memory.
    """

    inert = frozenset({"close", "abandon", "before_mutation", "__exit__"})

    def __init__(
        self,
        layout: LayoutSpec,
        at: str | os.PathLike[str] | None = None,
        secret: str | bytes | None = None,
        budget_bytes: int | None = None,
        *,
        to: str | None = None,
        anchor_every: int = 16,
        keep_anchors: int = 2,
        slots: int = 2,
        process_group: Any = None,
        lease_s: float = 120.0,
        linger_s: float = 30.0,
        carrier: WeightCarrier | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if type(slots) is not int or slots < 2:
            raise UsageError(
                "a publisher needs at least two slots", wanted="an int from 2 on", found=repr(slots)
            )
        check_positive("lease_s", lease_s, (int, float))
        if budget_bytes is not None:
            check_positive("budget_bytes", budget_bytes, (int,))
        self._layout = layout
        self._slot_count = slots
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._board: Board = board_of(process_group, timeout_s)
        self._agreement = Agreement(self._board, timeout_s)
        every = self._agreement.on_every_rank
        self._to = to or "", (anchor_every, keep_anchors)
        self._place = every(lambda: self._met(at, secret))
        self.epoch: str = self._agreement.on_rank_zero("epoch", _new_epoch)
        # A wait of one thread must not hold up another.
        self._far_board, self._known_board = self._clone(), self._clone()
        self._settled: tuple[deque[int], deque[int]] = deque(maxlen=_KNOWN), deque(maxlen=_KNOWN)
        self._client = every(lambda: self._start(lease_s, linger_s))
        self._others: tuple[ServerEntry, ...] = ()
        try:
            self._entry = self._meet(every(self._client.ready))
        except BaseException:
            self._client.close()  # its process would be there as long as this one
            raise
        self._shape: _Shape | None = None
        self._slots: dict[int, Slot] = {}
        self._reading = threading.Lock()
        self._form: tuple[object, CopyForm] | None = None
        self._flattener = Flattener()
        self._gate = Gate(timeout_s)
        self._device_copies = DeviceCopies()
        # The name is one that a session waits for when it leaves a generation.
        self._copier = ThreadPoolExecutor(1, "ckptd-copy-published")
        self._number = 0
        self._shares: set[int] = set()
        self._sharing = threading.Lock()
        self._carrier = carrier
        if carrier is not None:
            carrier.serve(self._read)
        self._closed = self._left = self._ended = False
        abandonable(self)

    def _met(self, at: str | os.PathLike[str] | None, secret: str | bytes | None) -> MeetingPlace:
        """Return where workers connect to; of a store alone nobody but other ranks does."""
        if at is not None:
            return MeetingPlace.of(at, secret)
        url, anchors = self._to
        if "://" not in url or min(anchors) < 1:
            raise UsageError(
                "a publisher needs a place",
                wanted="at=, a folder or tcp://HOST:PORT; or to=, a URL of a store such as "
                "s3://bucket/live or file:///folder, with at least 1 anchor kept, every 1 version",
                found=f"to={url!r}, anchor_every={anchors[0]}, keep_anchors={anchors[1]}",
            )
        drawn = self._agreement.on_rank_zero("secret", lambda: secrets.token_hex(32))
        return MeetingPlace(None, None, drawn.encode())

    def _clone(self) -> Board:
        return self._board.clone() if isinstance(self._board, JobBoard) else self._board

    def _start(self, lease_s: float, linger_s: float) -> PublishClient:
        rank, address = self._board.rank, self._place.address
        bind, port = bind_address(), 0
        if rank == 0 and address is not None:
            if not is_here(address.host):
                raise UsageError(
                    "rank 0's machine does not have the publisher's address",
                    where=f"tcp://{address}",
                )
            bind, port = address.host, address.port
        elif address is not None and is_loopback(address.host):
            bind = "127.0.0.1"
        opening = Opening(
            self.epoch,
            rank,
            self._board.world,
            self._place.proof,
            bind,
            port,
            str(run_folder()),
            self._slot_count,
            lease_s,
            linger_s,
            *self._to,
        )
        return PublishClient(opening, self._lose, self._settle)

    def _meet(self, entry: ServerEntry) -> ServerEntry:
        """Give rank 0 the entries of all; return that of rank 0's server."""

        def gather(reports: list[bytes]) -> bytes:
            self._others = tuple(posted(_entries, r) for r in reports)
            return reports[0]

        raw = self._agreement.all_reports("publishers", msgspec.json.encode(entry), gather)
        leader = posted(_entries, raw)
        if self._board.rank:
            self._client.send(SetLeader(leader))
        return leader

    @property
    def server_pid(self) -> int:
        """Process id of this rank's server."""
        return self._client.pid

    # --- what is published ----------------------------------------------------------------------

    def _described(self, state: Mapping[str, Any], leaves: Leaves) -> _Shape:
        """Bind the layout to the first state. Collective."""
        agreement = self._agreement
        side = RelayoutSide.of(state, self._layout, agreement, None)
        # Workers bind it from this alone: what they would miss is missed here.
        bound = side.form.bound
        bind_sizes(with_globs(side.laid.resolved, side.globs), bound.sizes)
        text, world = side.laid.program.text, self._board.world
        check_about(PublishedAbout(self.epoch, world, text, dict(bound.sizes), side.globs))
        tensors: list[PublishedTensor] = []
        starts: dict[str, int] = {}
        steps: list[CopyStep] = []
        at = 0
        for tensor, leaf, local in own_tensors(side, leaves, {""}):
            dtype = dtype_of(dtype_name(local.dtype, leaf.name), leaf.name)
            if leaf.name not in starts:  # tied tensors are copied once
                end = at + local.numel() * dtype.itemsize
                starts[leaf.name] = at
                if end > at:
                    steps.append(CopyStep(leaf.name, None, at, end))
                at = -(-end // _ALIGN) * _ALIGN
            tensors.append(
                PublishedTensor(tensor.name, dtype.name, starts[leaf.name], local.numel())
            )
        if self._budget_bytes is not None and at * self._slot_count > self._budget_bytes:
            raise UsageError(
                "this rank's tensors do not fit budget_bytes",
                wanted=f"{self._slot_count} slots of {at} bytes",
                found=f"{self._budget_bytes} bytes",
            )
        names = tuple(starts)
        return _Shape(side, names, tuple(tensors), steps, at, _looks(leaves, names))

    def _first(self, state: Mapping[str, Any], leaves: Leaves) -> _Shape:
        shape = self._agreement.on_every_rank(lambda: self._described(state, leaves))
        left = shape.nbytes // _DELTA_SHARE
        if self._budget_bytes is not None:
            left = min(left, self._budget_bytes - shape.nbytes * self._slot_count)
        self._client.send(SetTensors(shape.tensors, left))
        if self._board.rank == 0:
            side = shape.side
            text, sizes = side.laid.program.text, dict(side.form.bound.sizes)
            self._client.send(SetDirectory(text, sizes, side.globs, self._others))
            self._place.announce(self._entry)
        return shape

    # --- publishing -----------------------------------------------------------------------------

    @one_at_a_time
    def publish(self, step: int, state: Mapping[str, Any], *, wait_s: float = 0.0) -> Publication:
        """Begin to publish the weights of `state` as one version. Every rank calls it.

        Returns when everything is copied but what an optimizer in `state` changes: that is copied
        while training goes on, and its next step waits for that; before anything else changes the
        weights call `before_mutation`. Where workers hold so many versions that there is no slot,
        this version is `skipped`, on all ranks alike.

        Parameters
        ----------
        step
            What workers see as the version's step; below 2**63.
        state
            As for `ckptd.relayout`: parameters that the layout names are published. Put the
            optimizer into it, if it is to wait by itself.
        wait_s
            For a slot that workers still hold, in seconds; rank 0's counts.

        Raises
        ------
        CkptdError
            On the first call, on every rank: the layout does not fit. Later: the state has other
            tensors than at first, a rank failed, or a server is gone. The step is no such integer.
        """
        if self._closed:
            raise UsageError("the publisher is closed", kind="closed")
        not_at_exit("publish")
        begun_ns = events.now_ns()
        if is_capturing():
            raise captured("publish")
        problem: CkptdError | None = None
        leaves = Leaves()
        try:
            step = check_step(step, _MOST_STEP)
            self._gate.check()
            leaves = self._flattener.flatten(state)
            leaves.refuse_wrapped("published")
            if self._shape is not None and _looks(leaves, self._shape.names) != self._shape.looks:
                raise UsageError(
                    "the state's tensors differ from those of the first publish",
                    hint="create a new Publisher",
                )
        except CkptdError as error:
            problem = error
        if self._shape is None:
            self._agreement.no_errors(problem)
            self._shape = self._first(state, leaves)
        self._number += 1
        try:
            choice = self._choose(step, problem, wait_s)
            publication = Publication(step, choice.number, choice.reason)
            if choice.slot < 0:
                self._ends_share(choice.number)
            if problem is not None:
                raise problem
            if choice.slot < 0:
                self._emit(publication, begun_ns, 0)
                if self._board.rank == 0:
                    _log.info("step %d is not published: %s", step, choice.reason)
            else:
                self._copy(publication, choice, leaves, self._shape, begun_ns)
        except BaseException:
            with suppress(CkptdError):  # what was raised counts
                self._drop(self._number)
            self._gate.close_behind(self._copier)
            raise
        return publication

    def _emit(self, publication: Publication, begun_ns: int, nbytes: int) -> None:
        now = events.now_ns()
        events.emit(
            events.VersionPublished(
                step=publication.step,
                generation=0,
                rank=self._board.rank,
                at_ns=now,
                number=publication.number,
                bytes=nbytes,
                duration_ns=max(0, now - begun_ns),
                skipped=publication.skipped,
            )
        )

    def _drop(self, number: int) -> None:
        """Have the leader know that a version will not be whole.

        A rank whose own server is gone cannot, and never has a share in place again: then the next
        call fails on every rank.
        """
        if self._left or not self._ends_share(number):
            return
        try:
            self._add_up(number, _DROPPED + 1)
            self._client.send(VersionDropped(number))
        except ProcessError as error:
            self._far_board.set(_LOST, msgspec.json.encode(error.to_dict()))

    def _choose(self, step: int, problem: CkptdError | None, wait_s: float) -> SlotAnswer:
        """Return where the version goes; rank 0's server decides for all."""
        self._begin_share(self._number)

        def place() -> tuple[int, int, bool, str]:
            if problem is not None:
                raise problem
            found = self._placed(step, time.monotonic() + wait_s)
            return found.number, found.slot, found.fresh, found.reason

        try:
            choice = SlotAnswer(*self._agreement.on_rank_zero("publish", place, wait_s))
        except CkptdError:
            if problem is not None:
                raise problem from None
            raise
        self._begin_share(choice.number)
        return choice

    def _placed(self, step: int, end: float) -> SlotAnswer:
        """Ask the own server for a slot until there is one."""
        while True:
            self._not_lost()
            found = self._client.place(self._number, step)
            if found.slot >= 0 or not time.monotonic() < end:  # also if that is not a number
                return found
            if self._client.silent:
                self._begin_share(self._number + 1)  # the one before was given up
            time.sleep(_PLACE_S)

    def _slot(self, choice: SlotAnswer, nbytes: int) -> Slot:
        slot = self._slots.get(choice.slot)
        if slot is None or choice.fresh:
            with self._reading:
                if slot is not None:
                    # A worker may read it still: what it has mapped stays as it is.
                    self._end_slot(self._slots.pop(choice.slot))
                slot = Slot(choice.slot, nbytes)
                # First: a server must know the memory of each slot that there is.
                self._client.send(SlotMemory(choice.slot, nbytes), slot)
                self._slots[choice.slot] = slot
                if self._carrier is not None:
                    self._carrier.expose(slot)
        return slot

    def _end_slot(self, slot: Slot) -> None:
        if self._carrier is not None:
            self._carrier.withdraw(slot)
        slot.close()

    def _copy(
        self,
        publication: Publication,
        choice: SlotAnswer,
        leaves: Leaves,
        shape: _Shape,
        begun_ns: int,
    ) -> None:
        slot = self._slot(choice, shape.nbytes)
        slot.begin(choice.number)
        carried = None
        if self._carrier is not None:
            # First: what waits for the copies of the snapshot then waits for these as well.
            tensors = [(x.start, leaves.tensors[x.name].local) for x in shape.steps]
            carried = self._carrier.fill(slot, tensors)
        snapshot = Snapshot(
            self._sources_of(leaves, shape),
            slot,
            copies=self._device_copies,
            timeout_s=self._timeout_s,
        )
        snapshot.copy_now()
        publication._whole = lambda timeout_s: self._await_whole(choice.number, timeout_s)

        def give_up(reason: object) -> None:
            self._drop(choice.number)
            _log.warning("step %d is not published: %s", publication.step, reason)

        def finish() -> None:
            try:
                snapshot.copy_rest()
                if carried is not None:
                    carried()
                with self._reading:
                    if self._left:
                        raise SaveError("the publisher was left while it copied", kind="aborted")
                    slot.staged = shape.nbytes
                    slot.seal()
                self._client.send(VersionSealed(choice.number, choice.slot))
                self._count(choice.number)
                self._emit(publication, begun_ns, shape.nbytes)
                slot.warm_up()
            except CkptdError as error:
                give_up(error.message)
                raise
            except BaseException as error:
                give_up(repr(error))
                raise

        copy = self._copier.submit(finish)
        publication._copied = copy
        self._gate.close(copy, give_up, snapshot if snapshot.devices else None)

    def _sources_of(self, leaves: Leaves, shape: _Shape) -> CopySources:
        held = self._gate.guard(leaves.optimizers)  # each time: hooks may have been lost
        mine: dict[str, TensorLeaf] = {n: leaves.tensors[n] for n in shape.names}
        if self._form is None or leaves.known is None or self._form[0] is not leaves.known:
            self._form = leaves.known, CopyForm(shape.steps, mine, held)
        return CopySources(self._form[1], mine)

    def _count(self, number: int) -> None:
        """Count this rank's share; the last rank tells that the version is whole."""
        if self._ends_share(number) and self._add_up(number, 1):
            self._client.send(VersionWhole(number))

    def _begin_share(self, number: int) -> None:
        self._number = number
        with self._sharing:
            self._shares.add(number)

    def _ends_share(self, number: int) -> bool:
        """Whether this rank has not told yet how its share of a version ended."""
        with self._sharing:
            known = number in self._shares
            self._shares.discard(number)
            return known

    def _add_up(self, number: int, amount: int) -> bool:
        """Count a share that has ended; whether it is the last one and none was dropped."""
        board, key = self._far_board, f"publish/sealed/{number}"
        if board.world == 1:
            return amount < _DROPPED
        found = board.add(key, amount)
        if found % _DROPPED < board.world:
            return False
        board.delete(key)  # every rank has counted
        return found < _DROPPED

    def _lose(self, number: int, error: CkptdError | None) -> None:
        """Have all ranks know that no version will be whole any more."""
        lost = error or ProcessError(
            "no answer from the publisher's server on rank 0 or on this rank",
            where=f"version {number}",
            hint="create a new Publisher",
        )
        self._post(_LOST, msgspec.json.encode(lost.to_dict()))

    def _settle(self, number: int, whole: bool) -> None:
        """Have all ranks know that workers get a version, or never will (rank 0)."""
        self._settled[0 if whole else 1].append(number)
        self._post(_SETTLED, msgspec.msgpack.encode([*map(tuple, self._settled)]))

    def _post(self, key: str, value: bytes) -> None:
        with suppress(CkptdError):  # the job's store is gone, and the job with it
            self._known_board.set(key, value)

    def _is_whole(self, number: int) -> bool:
        """Whether workers get a version; raises where they never will."""
        raw = self._board.peek(_SETTLED)
        whole, dropped = ((), ()) if raw is None else posted(_settled, raw)
        if number in dropped:
            raise SaveError(
                "publishing failed on another rank",
                kind="aborted",
                where=f"version {number}",
                hint="the log of that rank says why",
            )
        return number in whole or (len(whole) == _KNOWN and number < min(whole))

    def _await_whole(self, number: int, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._is_whole(number):
            self._not_lost()
            if time.monotonic() >= end:
                raise DeadlineError(
                    "not every rank has finished copying a version",
                    kind="board",
                    wanted=f"version {number} within {timeout_s:.0f} s",
                )
            time.sleep(_POLL_S)

    def _not_lost(self) -> None:
        """Raise what a rank lost its server with."""
        lost = self._board.peek(_LOST)
        if lost is not None:
            raise CkptdError.from_dict(posted(error_fields, lost))

    def _read(
        self, number: int, tensors: Sequence[PublishedTensor], blocks: Sequence[BlockRead]
    ) -> NDArray[np.uint8]:
        """Return parts of a version that a worker holds, for a carrier."""
        gone = NotFoundError(
            "version not available from the publisher", kind="no-version", where=f"{number}"
        )
        data = np.empty(read_bytes(tensors, blocks), np.uint8)
        with self._reading:
            slot = next((s for s in self._slots.values() if s.sealed == number), None)
            if slot is None:
                raise gone
            gather_blocks(slot, tensors, blocks, data)
            if slot.sealed != number:
                raise gone
        return data

    def before_mutation(self) -> None:
        """Return when the weights may change; for changes that are not an optimizer's step."""
        not_within(self, "publish", "before_mutation")
        self._gate.wait()

    @one_at_a_time
    def close(self) -> None:
        """Complete the copying and end; a worker that pulls still gets the rest. Idempotent."""
        try:
            if not self._closed:
                self._closed = True
                self._gate.release()
                self._copier.shutdown(wait=True)
                self._end()
        finally:
            self._abandon()  # what an interrupt left out

    @one_at_a_time
    def abandon(self) -> None:
        """Release everything without a wait for other ranks, as a process that dies does.

        Its servers give the last version to workers as after `close`. A session calls it when it
        leaves a generation. Idempotent.
        """
        self._abandon()

    @uninterrupted
    def _abandon(self) -> None:
        if self._ended:
            return
        self._closed = self._left = True
        self._gate.leave(_LEAVE_S)
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        self._device_copies.close()
        self._client.close()
        with self._reading:
            while self._slots:
                self._end_slot(self._slots.popitem()[1])
        let_be(self)
        self._ended = True


def _new_epoch() -> str:
    """Return what tells a publisher from all others, the ones before it included."""
    return secrets.token_hex(16)


def _looks(leaves: Leaves, names: tuple[str, ...]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return name, local shape and type of what is published."""
    out = []
    for name in names:
        leaf = leaves.tensors.get(name)
        if leaf is not None:
            out.append((name, tuple(leaf.local.shape), str(leaf.local.dtype)))
    return tuple(out)
