"""Live ranks to live ranks: tensors of one layout become those of another, without a disk.

Every process knows its own part from the two layouts; nobody gathers or coordinates. Process p
sends to p+1, p+2, ... and receives from p-1, p-2, ...: in each step every process has one to send
to and one to receive from, so what is staged does not grow with their number, and no circle of
waits can close: the process that is furthest behind always finds its partner waiting. One thread
sends while another receives, each with two buffers, so packing and moving overlap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.relayout_apply import Arrivals, change_between, chunk_numel, place_of
from ckptd.engine.relayout_check import Sampler
from ckptd.engine.relayout_lanes import BUFFERS, Intake, Lane
from ckptd.engine.relayout_memory import Memory
from ckptd.engine.relayout_plan import Incoming, MovePlan, Outgoing, Roles
from ckptd.engine.relayout_stream import (
    Chunk,
    Piece,
    Segment,
    Window,
    laid_out,
    messages,
    ordered,
)
from ckptd.engine.relayout_streams import (
    PREFIX_BYTES,
    Table,
    check_prefix,
    prefix,
    table_bytes,
)
from ckptd.engine.relayout_watch import Watch
from ckptd.engine.reshard.clip import clip_fill
from ckptd.engine.transport import Transport
from ckptd.errors import CkptdError, CorruptError, UsageError
from ckptd.layout.lay.lattice import reach
from ckptd.layout.lay.live import Transfers
from ckptd.layout.lay.regions import Fill
from ckptd.types import DType

__all__ = ["MoveReport", "Mover", "Scalars", "message_bytes"]

U8 = NDArray[np.uint8]

_LEAST = 4096
_MOST = 64 << 20

Scalars = Mapping[str, Sequence[tuple[DType, bytes] | None]]
"""Numbers that follow a parameter, in the order of their names, by the parameter's tensor."""


@dataclass
class MoveReport:
    """What one process did.

    Attributes
    ----------
    bytes_sent, bytes_received
        To and from other processes, data only.
    bytes_kept
        From this process to itself.
    messages
        Sent and received.
    samples
        Elements that were found where they must be.
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
        kind ``budget``: the budget is too small.
    """
    size = budget_bytes // 2 // (BUFFERS + transport.buffers) // _LEAST * _LEAST
    if size < _LEAST:
        raise UsageError(
            "the budget is too small to move anything",
            kind="budget",
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
        Called when everything is there, before the others are told that this process is done.
    room
        Most bytes for values that are combined from several ranks.
    """

    transport: Transport
    limit: int
    watch: Watch
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
            on some processes at least (`poisoned`).
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
            first.poisoned = True
            raise first from None
        finally:
            self._stop.set()
        self.report.seconds = time.monotonic() - begun
        return self.report

    # --- sending --------------------------------------------------------------------------------

    def _send_guarded(self) -> None:
        try:
            lane = Lane(self.transport, self.limit, self.watch, self._stop)
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

    def _send(self, lane: Lane, peer: int, found: Sequence[Outgoing]) -> None:
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

    def _table(self, peer: int, found: Sequence[Outgoing]) -> Table:
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
        return Table(
            [None if o.memory is None else o.memory.dtype for o in found],
            [self.scalars.get(o.tensor.name, ()) for o in found],
            samples,
            values,
        )

    @staticmethod
    def _pack(outgoing: Outgoing, window: Window, out: U8) -> None:
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
        table = Table.decode(lane.receive_bytes(peer, length), len(found), self.scalar_count)
        self._note(found, table)
        sizes = [0 if d is None else d.itemsize for d in table.dtypes]
        planned = ((m, laid_out(m, sizes)) for m in messages(segments, sizes, self.limit))
        for (message, places), data in lane.receive(peer, planned):
            for window, at, nbytes in places:
                self._unpack(found, table, window, data[at : at + nbytes])
            self.report.bytes_received += sum(w.numel * sizes[w.segment] for w in message)
            self.report.messages += 1

    def _note(self, found: Sequence[Incoming], table: Table) -> None:
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

    def _unpack(self, found: Sequence[Incoming], table: Table, window: Window, data: U8) -> None:
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
        """Write what no element of the source stands for."""
        for found in self.plan.fills:
            if not found.alone and found.name not in self.filled:
                continue
            for fill in found.fills:
                most = self.limit // found.memory.dtype.itemsize
                for at in range(fill.start, fill.start + reach(fill.steps) + 1, most):
                    for part in clip_fill(fill, at, at + most):
                        _put_fill(found.memory, part)

    def _check_samples(self) -> None:
        """Look at single elements where the givers say that they must be.

        Raises
        ------
        CorruptError
            kind ``witness``: names the tensors.
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
                kind="witness",
                where=", ".join(shown[:8]) + (" ..." if len(shown) > 8 else ""),
                hint="the plan of the move is wrong, or a tensor changed during it",
            )


def _put_fill(memory: Memory, fill: Fill) -> None:
    value = np.full(fill.numel, fill.value).astype(memory.dtype.numpy)
    shape, strides = tuple(n for n, _ in fill.steps), tuple(s for _, s in fill.steps)
    memory.put(fill.start, shape, strides, value.view(np.uint8))


def _gather(segment: Segment, window: Window, memory: Memory, out: U8) -> None:
    """Copy the elements of a window, rising in the target."""
    size, at = memory.dtype.itemsize, 0
    for chunk in ordered(segment, window.lo, window.hi):
        end = at + chunk_numel(chunk) * size
        _take(memory, chunk, out[at:end])
        at = end


def _take(memory: Memory, chunk: Chunk, out: U8) -> None:
    if isinstance(chunk, Piece):
        block = chunk.block
        memory.take(block.source_start, block.shape, block.source_strides, out)
    else:
        memory.take_at(chunk.source, out)
