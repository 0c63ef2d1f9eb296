"""`Mover`: sends and receives tensors between live ranks: order, message sizes, buffers, budget.

In it: what is done when another rank fails; sums and averages of replicas; fills; figures of the
move.

Every process knows its own part from the two layouts; none gathers or coordinates. Process p
sends to p+1, p+2, ... and receives from p-1, p-2, ...: in each step every process has one to send
to and one to receive from, so what is staged does not grow with their number, and no circle of
waits can close: the process that is furthest behind always finds its partner waiting. One thread
sends while another receives, each with two buffers, so packing and moving overlap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Fill
from ckptd.base.grids.clip import clip_fill
from ckptd.base.grids.lattice import reach
from ckptd.base.runtime.ranks import Board, Peers, error_fields, posted
from ckptd.errors import (
    CkptdError,
    CorruptError,
    DeadlineError,
    MismatchError,
    UsageError,
    first_few,
)
from ckptd.lay.live import Transfers
from ckptd.lay.syntax.tree import Average
from ckptd.lay.values import Values
from ckptd.reshard.changes import Linear, change_of, changed_dtype
from ckptd.reshard.live.check import Sampler
from ckptd.reshard.live.header import PREFIX_BYTES, StreamTable, check_prefix, prefix, table_bytes
from ckptd.reshard.live.memory import TensorMemory
from ckptd.reshard.live.plan import (
    Chunk,
    Incoming,
    MovePlan,
    Outgoing,
    PartBlock,
    Roles,
    SegmentWindow,
    StreamSegment,
    TensorFills,
    laid_out,
    messages,
    ordered,
)
from ckptd.reshard.live.transport import PendingMessage, Transport, gone
from ckptd.types import DType

_LOOK_S = 0.2
_ROOT_CAUSE_S = 1.0


class MoveWatch:
    """The waits of one move.

    Parameters
    ----------
    board
        Of the processes that take part.
    key
        Unique to the move, the same on all of them.
    timeout_s
        Longest wait for one message, and for the others at the end, in seconds.
    """

    def __init__(self, board: Board, key: str, timeout_s: float) -> None:
        self.board = board
        self._key = key
        self._timeout_s = timeout_s
        self._peers = Peers(board, key)

    def through(self, pending: PendingMessage, peer: int, what: str) -> None:
        """Return when a message is through.

        Raises
        ------
        CkptdError
            kind ``rank-died`` names a rank that is gone; or what another rank failed with.
        DeadlineError
            Nothing happened for too long.
        """

        def is_through(timeout_s: float) -> bool:
            try:
                return pending.wait(timeout_s)
            except CkptdError as error:
                raise self._cause(error, peer) from None

        self._until(is_through, peer, what)

    def _until(self, test: Callable[[float], bool], peer: int, what: str) -> None:
        end = time.monotonic() + self._timeout_s
        while not test(_LOOK_S):
            self.look(peer)
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"rank {peer} made no progress",
                    kind="board",
                    where=f"rank {peer}, {what}",
                    wanted=f"a message within {self._timeout_s:.0f} s",
                    hint="every rank must make the same call; see what that rank is doing",
                )

    def look(self, peer: int | None = None) -> None:
        """Raise what another rank posted, or that `peer` is gone."""
        if (raw := self.board.peek(f"{self._key}/failed")) is not None:
            raise CkptdError.from_dict(posted(error_fields, raw))
        if peer is not None and not self._peers.runs(peer):
            raise gone(peer, "its process has ended")

    def _cause(self, error: CkptdError, peer: int) -> CkptdError:
        """Return what broke a link: mostly a rank that failed itself, and posted why."""
        end = time.monotonic() + _ROOT_CAUSE_S
        while time.monotonic() < end:
            try:
                self.look(peer)
            except CkptdError as first:
                return first
            time.sleep(_LOOK_S / 4)
        return error

    def fail(self, error: CkptdError) -> CkptdError:
        """Tell all others why this rank fails; return the first failure of all."""
        if self.board.world == 1:
            return error
        if (raw := self.board.peek(f"{self._key}/failed")) is not None:
            return CkptdError.from_dict(posted(error_fields, raw))
        self.board.set(f"{self._key}/failed", msgspec.json.encode(error.to_dict()))
        return error

    def all_done(self) -> None:
        """Return when every rank is done.

        Raises
        ------
        CkptdError, DeadlineError
            As `through`.
        """
        if self.board.world == 1:
            return
        if self.board.rank:
            self.board.set(f"{self._key}/done/{self.board.rank}", b"yes")
            # Rank 0 may itself wait for a straggler as long as it may.
            self._until(self._answer, 0, "waiting for all ranks")
            return
        for rank in range(1, self.board.world):
            key = f"{self._key}/done/{rank}"
            self._until(partial(self._there, key), rank, "waiting for its end")
            self.board.delete(key)
        self.board.set(f"{self._key}/all", b"yes")

    def _answer(self, timeout_s: float) -> bool:
        return self._there(f"{self._key}/all", timeout_s)

    def _there(self, key: str, timeout_s: float) -> bool:
        try:
            self.board.get(key, timeout_s)
        except DeadlineError:
            return False
        return True


U8 = NDArray[np.uint8]

BUFFERS = 4
"""Buffers of both lanes."""

Planned = tuple[list[SegmentWindow], list[tuple[SegmentWindow, int, int]]]
"""A message, and where each of its windows lies."""


class SendLane:
    """Two buffers that are sent from, one after the other."""

    def __init__(
        self, transport: Transport, limit: int, watch: MoveWatch, stop: threading.Event
    ) -> None:
        self._transport = transport
        self._watch = watch
        self._stop = stop
        self._buffers = [np.empty(limit, dtype=np.uint8) for _ in range(2)]
        self._pending: list[tuple[PendingMessage, int] | None] = [None, None]
        self._turn = 0

    def buffer(self) -> U8:
        """Return the next buffer, as soon as it is free."""
        self._wait(self._turn)
        return self._buffers[self._turn]

    def send(self, peer: int, nbytes: int) -> None:
        """Begin to send the buffer that `buffer` gave."""
        data = self._buffers[self._turn][:nbytes]
        self._pending[self._turn] = (self._transport.send(peer, data), peer)
        self._turn = 1 - self._turn

    def send_bytes(self, peer: int, data: U8) -> None:
        """Send some bytes, in as many messages as it takes."""
        limit = len(self._buffers[0])
        for at in range(0, len(data), limit):
            part = data[at : at + limit]
            self.buffer()[: len(part)] = part
            self.send(peer, len(part))

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for turn in (self._turn, 1 - self._turn):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        if self._stop.is_set():
            raise CkptdError("the move has ended on this rank")
        pending = self._pending[turn]
        if pending is not None:
            self._watch.through(*pending, "sending")
            self._pending[turn] = None


class Intake:
    """Two buffers that are received into."""

    def __init__(self, transport: Transport, limit: int, watch: MoveWatch) -> None:
        self._transport = transport
        self._limit = limit
        self._watch = watch
        self._buffers = [np.empty(limit, dtype=np.uint8) for _ in range(2)]

    def receive_bytes(self, peer: int, nbytes: int) -> U8:
        """Return some bytes."""
        out = np.empty(nbytes, dtype=np.uint8)
        for at in range(0, nbytes, self._limit):
            part = out[at : at + self._limit]
            self._watch.through(self._transport.receive(peer, part), peer, "receiving")
        return out

    def receive(self, peer: int, planned: Iterator[Planned]) -> Iterator[tuple[Planned, U8]]:
        """Yield messages and their bytes; the next is on its way while one is looked at."""
        free = deque(self._buffers)
        waiting: deque[tuple[Planned, U8, U8, PendingMessage]] = deque()
        more = True
        while True:
            while more and free:
                plan = next(planned, None)
                if plan is None:
                    more = False
                    break
                _, at, length = plan[1][-1]
                buffer = free.popleft()
                data = buffer[: at + length]
                waiting.append((plan, buffer, data, self._transport.receive(peer, data)))
            if not waiting:
                return
            plan, buffer, data, pending = waiting.popleft()
            self._watch.through(pending, peer, "receiving")
            yield plan, data
            free.append(buffer)


F64 = NDArray[np.float64]


def chunk_numel(chunk: Chunk) -> int:
    """Return the number of elements of a chunk."""
    return chunk.block.numel if isinstance(chunk, PartBlock) else len(chunk.target)


def change_between(
    source: DType, memory: TensorMemory, values: Values | None, name: str
) -> Linear | None:
    """Return what happens to values on their way; None: they stay as they are.

    Raises
    ------
    MismatchError
        ``lay-fit``: the tensor is of another type, and no rule casts.
    """
    wanted = changed_dtype(source, values, name)
    if wanted != memory.dtype:
        raise MismatchError(
            "a tensor's dtype differs from that of its incoming values",
            kind="lay-fit",
            where=name,
            wanted=memory.dtype.name,
            found=wanted.name,
            hint=f"cast({memory.dtype.name}) in the target's rule",
        )
    change = change_of(source, memory.dtype, values, name)
    if not isinstance(change, Linear | None):
        raise UsageError("quantized tensors cannot be moved live", kind="lay-use", where=name)
    return change


def place_of(incoming: Incoming) -> TensorMemory:
    """Return the memory that something arrives for.

    Raises
    ------
    UsageError
        The state has none.
    """
    if incoming.memory is None:
        raise no_place(incoming.tensor.name)
    return incoming.memory


def no_place(name: str) -> UsageError:
    """Return the error for a tensor that something arrives for and that the state has not."""
    return UsageError(
        "the state lacks a tensor that arrives",
        kind="lay-use",
        where=name,
        hint="exclude states on every rank: states=False",
    )


@dataclass(eq=False)
class _Sum:
    """Values of several ranks that become one."""

    incoming: Incoming
    source: DType
    total: F64
    values: Values | None
    divisor: int
    where: NDArray[np.bool_]


@dataclass(eq=False)
class Arrivals:
    """Puts values into the tensors of one process. One thread.

    Parameters
    ----------
    room
        Most bytes for values that are combined from several ranks.
    """

    room: int = 1 << 62
    _sums: dict[tuple[str, Values | None], _Sum] = field(default_factory=dict)

    def put(self, incoming: Incoming, source: DType, chunk: Chunk, data: U8) -> None:
        """Put the values of a chunk, in the giver's type, into their places."""
        memory = place_of(incoming)
        if isinstance(chunk, PartBlock):
            self._part(incoming, memory, source, chunk.part, chunk, data)
            return
        for part in np.unique(chunk.parts).tolist():
            rows = np.flatnonzero(chunk.parts == part)
            picked = chunk._replace(
                source=chunk.source[rows], target=chunk.target[rows], parts=chunk.parts[rows]
            )
            own = data.reshape(-1, source.itemsize)[rows].reshape(-1)
            self._part(incoming, memory, source, part, picked, own)

    def _part(
        self,
        incoming: Incoming,
        memory: TensorMemory,
        source: DType,
        part: int,
        chunk: Chunk,
        data: U8,
    ) -> None:
        values, of = incoming.parts[part]
        if of > 1:
            self._add(incoming, memory, source, values, of, chunk, data)
            return
        change = change_between(source, memory, values, incoming.tensor.name)
        if change is not None:
            new = np.empty(chunk_numel(chunk), dtype=memory.dtype.numpy)
            change.apply(new, data.view(source.numpy))
            data = new.view(np.uint8)
        if isinstance(chunk, PartBlock):
            block = chunk.block
            memory.put(block.target_start, block.shape, block.target_strides, data)
        else:
            memory.put_at(chunk.target, data)

    def _add(
        self,
        incoming: Incoming,
        memory: TensorMemory,
        source: DType,
        values: Values | None,
        of: int,
        chunk: Chunk,
        data: U8,
    ) -> None:
        key = (incoming.tensor.name, values)
        found = self._sums.get(key)
        if found is None:
            self.room -= 9 * memory.numel
            if self.room < 0:
                raise UsageError(
                    "values of several ranks are combined in more memory than the budget allows",
                    where=incoming.tensor.name,
                    hint="give a larger budget_bytes, or write `any` to take one rank's",
                )
            total = np.zeros(memory.numel, dtype=np.float64)
            where = np.zeros(memory.numel, dtype=np.bool_)
            divisor = of if _is_average(values, incoming.tensor.name) else 1
            found = _Sum(incoming, source, total, values, divisor, where)
            self._sums[key] = found
        new = data.view(source.numpy).astype(np.float64)
        if isinstance(chunk, PartBlock):
            b = chunk.block
            steps = tuple(8 * s for s in b.target_strides)
            view: F64 = np.ndarray(b.shape, np.float64, found.total, 8 * b.target_start, steps)
            view += new.reshape(b.shape)
            marks: NDArray[Any] = np.ndarray(
                b.shape, np.bool_, found.where, b.target_start, b.target_strides
            )
            marks[...] = True
        else:
            found.total[chunk.target] += new
            found.where[chunk.target] = True

    def finish(self) -> None:
        """Write what was combined."""
        for found in self._sums.values():
            memory = found.incoming.memory
            if memory is None:
                continue
            at = np.flatnonzero(found.where).astype(np.int64)
            mean = found.total[at] / found.divisor
            name = found.incoming.tensor.name
            change = change_between(found.source, memory, found.values, name) or Linear(name)
            new = np.empty(len(at), dtype=memory.dtype.numpy)
            change.apply(new, mean)
            memory.put_at(at, new.view(np.uint8))
        self._sums.clear()


def _is_average(values: Values | None, name: str) -> bool:
    kinds = {m.kind for m in (values.source if values else ()) if isinstance(m, Average)}
    if len(kinds) > 1:
        raise UsageError("averages and sums of one tensor are mixed", kind="lay-use", where=name)
    return kinds == {"avg"}


_LEAST = 4096
_MOST = 64 << 20

Scalars = Mapping[str, Sequence[tuple[DType, bytes] | None]]
"""Numbers that follow a parameter, in the order of their names, by the parameter's tensor."""


@dataclass
class MoveReport:
    """One process's part in a move, in figures.

    Attributes
    ----------
    bytes_sent, bytes_received
        To and from other processes, data only.
    bytes_kept
        From this process to itself.
    messages
        Sent and received.
    samples
        Elements that were compared and found at their places.
    staged_bytes
        Buffers of this process, those of the transport included.
    seconds
        In all.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_kept: int = 0
    messages: int = 0
    samples: int = 0
    staged_bytes: int = 0
    seconds: float = 0.0


def message_bytes(budget_bytes: int, transport: Transport) -> int:
    """Return the size of a message, so that all buffers together are half the budget.

    Raises
    ------
    UsageError
        The budget is too small.
    """
    size = budget_bytes // 2 // (BUFFERS + transport.buffers) // _LEAST * _LEAST
    if size < _LEAST:
        raise UsageError(
            "the budget is too small to move anything",
            wanted=f"at least {2 * _LEAST * (BUFFERS + transport.buffers)} bytes",
            found=f"{budget_bytes} bytes",
        )
    return min(size, _MOST)


@dataclass(eq=False)
class Mover:
    """Moves the tensors of one process.

    Parameters
    ----------
    transport
        To the others; `begin` was called with `limit`.
    limit
        Bytes of a message.
    watch
        For waits.
    plan, transfers, roles
        What goes where.
    scalars
        Numbers of this process's source tensors.
    scalar_count
        How many numbers follow each parameter.
    finish
        Called when everything is there, before the others learn that this process is done.
    room
        Most bytes for values that are combined from several ranks.
    """

    transport: Transport
    limit: int
    watch: MoveWatch
    plan: MovePlan
    transfers: Transfers
    roles: Roles
    scalars: Scalars
    scalar_count: int = 0
    finish: Callable[[Mover], None] | None = None
    room: int = 1 << 62
    report: MoveReport = field(default_factory=MoveReport)
    taken_scalars: dict[str, list[Sequence[tuple[DType, bytes] | None]]] = field(
        default_factory=dict
    )
    """Numbers that arrived, by own tensor; one entry for each giver."""
    filled: set[str] = field(default_factory=set)
    """Own tensors that something arrived for."""

    def __post_init__(self) -> None:
        self._arrivals = Arrivals(self.room)
        self._samples: list[tuple[Incoming, DType, int, bytes]] = []
        self._failed: CkptdError | None = None
        self._stop = threading.Event()

    def run(self) -> MoveReport:
        """Move everything.

        Raises
        ------
        CkptdError
            The same on every process: the first failure of any. The target is incomplete then,
            on some processes at least (`state_corrupted`).
        """
        begun = time.monotonic()
        self.report.staged_bytes = (BUFFERS + self.transport.buffers) * self.limit
        sender = threading.Thread(target=self._send_guarded, name="ckptd-send", daemon=True)
        try:
            sender.start()
            self._keep()
            self._receive_all()
            while sender.is_alive():
                sender.join(0.1)
                self.watch.look()
            if self._failed is not None:
                raise self._failed
            self._arrivals.finish()
            self._fill()
            self._check_samples()
            if self.finish is not None:
                self.finish(self)
            self.watch.all_done()
        except CkptdError as error:
            self._stop.set()
            first = self.watch.fail(self._failed or error)
            first.state_corrupted = True
            raise first from None
        finally:
            self._stop.set()
        self.report.seconds = time.monotonic() - begun
        return self.report

    # --- sending --------------------------------------------------------------------------------

    def _send_guarded(self) -> None:
        try:
            lane = SendLane(self.transport, self.limit, self.watch, self._stop)
            for step in range(1, self.transport.world):
                peer = (self.transport.rank + step) % self.transport.world
                found = self.plan.outgoing.get(peer)
                if found:
                    self._send(lane, peer, found)
            lane.flush()
        except CkptdError as error:
            self._failed = error
            self.watch.fail(error)
        except BaseException as error:
            self._failed = CkptdError("sending crashed", kind="crashed", found=repr(error))
            self.watch.fail(self._failed)
            raise

    def _send(self, lane: SendLane, peer: int, found: Sequence[Outgoing]) -> None:
        segments = [o.segment for o in found]
        lane.send_bytes(peer, np.frombuffer(prefix(segments, self.limit), dtype=np.uint8))
        lane.send_bytes(peer, self._table(peer, found).encode(self.scalar_count))
        sizes = [0 if o.memory is None else o.memory.dtype.itemsize for o in found]
        for message in messages(segments, sizes, self.limit):
            buffer = lane.buffer()
            end = 0
            for window, at, length in laid_out(message, sizes):
                end = at + length
                self._pack(found[window.segment], window, buffer[at:end])
            lane.send(peer, end)
            self.report.bytes_sent += sum(w.numel * sizes[w.segment] for w in message)
            self.report.messages += 1

    def _table(self, peer: int, found: Sequence[Outgoing]) -> StreamTable:
        giver = self.roles.source_rank(self.transport.rank)
        taker = self.roles.target_rank(peer)
        samples = []
        if giver is not None and taker is not None:
            samples = Sampler(self.transfers, giver).pick(taker, found)
        values = []
        for sample in samples:
            memory = found[sample.segment].memory
            out = np.zeros(0 if memory is None else memory.dtype.itemsize, dtype=np.uint8)
            if memory is not None:
                memory.take_at(np.array([sample.source], dtype=np.int64), out)
            values.append(out.tobytes())
        return StreamTable(
            [None if o.memory is None else o.memory.dtype for o in found],
            [self.scalars.get(o.tensor.name, ()) for o in found],
            samples,
            values,
        )

    @staticmethod
    def _pack(outgoing: Outgoing, window: SegmentWindow, out: U8) -> None:
        if outgoing.memory is None:
            return
        _gather(outgoing.segment, window, outgoing.memory, out)

    # --- to itself ------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Move what stays in this process, through the same buffers."""
        me = self.transport.rank
        outgoing, incoming = self.plan.outgoing.get(me, []), self.plan.incoming.get(me, [])
        check_prefix(
            prefix([o.segment for o in outgoing], self.limit),
            [i.segment for i in incoming],
            self.limit,
            me,
        )
        if not incoming:
            return
        table = self._table(me, outgoing)
        self._note(incoming, table)
        sizes = [0 if o.memory is None else o.memory.dtype.itemsize for o in outgoing]
        buffer = np.empty(self.limit, dtype=np.uint8)
        for message in messages([i.segment for i in incoming], sizes, self.limit):
            for window, at, length in laid_out(message, sizes):
                self._pack(outgoing[window.segment], window, buffer[at : at + length])
                self._unpack(incoming, table, window, buffer[at : at + length])
                self.report.bytes_kept += length

    # --- receiving ------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        lane = Intake(self.transport, self.limit, self.watch)
        for step in range(1, self.transport.world):
            peer = (self.transport.rank - step) % self.transport.world
            found = self.plan.incoming.get(peer)
            if found:
                self._receive(lane, peer, found)
            if self._failed is not None:
                raise self._failed

    def _receive(self, lane: Intake, peer: int, found: Sequence[Incoming]) -> None:
        segments = [i.segment for i in found]
        head = lane.receive_bytes(peer, PREFIX_BYTES)
        check_prefix(head.tobytes(), segments, self.limit, peer)
        length = table_bytes(len(found), self.scalar_count)
        table = StreamTable.decode(lane.receive_bytes(peer, length), len(found), self.scalar_count)
        self._note(found, table)
        sizes = [0 if d is None else d.itemsize for d in table.dtypes]
        planned = ((m, laid_out(m, sizes)) for m in messages(segments, sizes, self.limit))
        for (message, places), data in lane.receive(peer, planned):
            for window, at, nbytes in places:
                self._unpack(found, table, window, data[at : at + nbytes])
            self.report.bytes_received += sum(w.numel * sizes[w.segment] for w in message)
            self.report.messages += 1

    def _note(self, found: Sequence[Incoming], table: StreamTable) -> None:
        """Keep what a table says until everything is there."""
        for incoming, dtype, scalars in zip(found, table.dtypes, table.scalars, strict=True):
            if dtype is not None:
                for values, _ in incoming.parts:
                    # What does not fit is known now, before any of it is written.
                    change_between(dtype, place_of(incoming), values, incoming.tensor.name)
                self.filled.add(incoming.tensor.name)
                self.taken_scalars.setdefault(incoming.tensor.name, []).append(scalars)
        for sample, value in zip(table.samples, table.values, strict=True):
            dtype = table.dtypes[sample.segment]
            if dtype is not None:
                self._samples.append((found[sample.segment], dtype, sample.target, value))

    def _unpack(
        self, found: Sequence[Incoming], table: StreamTable, window: SegmentWindow, data: U8
    ) -> None:
        incoming, dtype = found[window.segment], table.dtypes[window.segment]
        if dtype is None:
            return
        at = 0
        for chunk in ordered(incoming.segment, window.lo, window.hi):
            end = at + chunk_numel(chunk) * dtype.itemsize
            self._arrivals.put(incoming, dtype, chunk, data[at:end])
            at = end

    # --- the end --------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Write what no element of the source represents."""
        for found in self.plan.fills:
            if found.alone or found.name in self.filled:
                put_fills(found, self.limit)

    def _check_samples(self) -> None:
        """Look at single elements where the givers say that they must be.

        Raises
        ------
        CorruptError
            Names the tensors.
        """
        wrong: dict[str, int] = {}
        for incoming, dtype, at, value in self._samples:
            memory = incoming.memory
            if memory is None or len(set(incoming.parts)) > 1:
                continue
            name = incoming.tensor.name
            wanted = value[: dtype.itemsize]
            change = change_between(dtype, memory, incoming.parts[0][0], name)
            if change is not None:
                raw = np.frombuffer(wanted, dtype=np.uint8).view(dtype.numpy)
                new = np.empty(1, dtype=memory.dtype.numpy)
                change.apply(new, raw)
                wanted = new.tobytes()
            found = np.empty(memory.dtype.itemsize, dtype=np.uint8)
            memory.take_at(np.array([at], dtype=np.int64), found)
            if found.tobytes() != wanted:
                wrong[name] = wrong.get(name, 0) + 1
            self.report.samples += 1
        if wrong:
            shown = [f"{n} ({k} values)" for n, k in sorted(wrong.items())]
            raise CorruptError(
                "values arrived at the wrong places",
                where=first_few(shown),
                hint="the plan of the move is wrong, or a tensor changed during it",
            )


def put_fills(found: TensorFills, limit: int) -> None:
    """Write the fills of a tensor, at most `limit` bytes at a time."""
    most = limit // found.memory.dtype.itemsize
    for fill in found.fills:
        for at in range(fill.start, fill.start + reach(fill.steps) + 1, most):
            for part in clip_fill(fill, at, at + most):
                _put_fill(found.memory, part)


def _put_fill(memory: TensorMemory, fill: Fill) -> None:
    value = np.full(fill.numel, fill.value).astype(memory.dtype.numpy)
    shape, strides = tuple(n for n, _ in fill.steps), tuple(s for _, s in fill.steps)
    memory.put(fill.start, shape, strides, value.view(np.uint8))


def _gather(segment: StreamSegment, window: SegmentWindow, memory: TensorMemory, out: U8) -> None:
    """Copy the elements of a window, rising in the target."""
    size, at = memory.dtype.itemsize, 0
    for chunk in ordered(segment, window.lo, window.hi):
        end = at + chunk_numel(chunk) * size
        _take(memory, chunk, out[at:end])
        at = end


def _take(memory: TensorMemory, chunk: Chunk, out: U8) -> None:
    if isinstance(chunk, PartBlock):
        block = chunk.block
        memory.take(block.source_start, block.shape, block.source_strides, out)
    else:
        memory.take_at(chunk.source, out)
