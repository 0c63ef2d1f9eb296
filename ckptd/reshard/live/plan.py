"""Plan of one process's transfers to all others: segments, windows, what each message holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.clip import clip
from ckptd.base.grouping import by_key
from ckptd.lay.live import LiveShare, Transfers
from ckptd.lay.local import BoundTensor, local_tensors
from ckptd.lay.values import Values
from ckptd.reshard.live.memory import TensorMemory

I64 = NDArray[np.int64]

_INDEXED = 1 << 15
"""Most elements that are listed one by one at a time."""
_SHORT = 64
"""Runs below this many elements are listed one by one."""


class PartBlock(NamedTuple):
    """A copy, and which part of the segment it belongs to."""

    part: int
    block: Block


class Picked(NamedTuple):
    """Single elements, rising in the target, and the part that each belongs to."""

    source: I64
    target: I64
    parts: I64


Chunk = PartBlock | Picked


@dataclass(frozen=True, eq=False)
class SegmentCopies:
    """The copies of a segment; the same object for segments that differ in names alone.

    Attributes
    ----------
    parts
        By what happens to the values on the way; the giver knows one part only.
    """

    parts: tuple[tuple[Block, ...], ...]

    @cached_property
    def pieces(self) -> tuple[PartBlock, ...]:
        """All copies, outermost dimension of the target first."""
        return tuple(PartBlock(i, rising(b)) for i, blocks in enumerate(self.parts) for b in blocks)

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(p.block.numel for p in self.pieces)

    @cached_property
    def span(self) -> tuple[int, int]:
        """First element of the target that is written, and one past the last."""
        spans = [p.block.target_span for p in self.pieces]
        return min(lo for lo, _ in spans), max(hi for _, hi in spans)


class StreamSegment(NamedTuple):
    """Copies from one tensor of the giver to one tensor of the taker.

    Attributes
    ----------
    source, target
        Their names.
    copies
        The copies.
    """

    source: str
    target: str
    copies: SegmentCopies

    @property
    def pieces(self) -> tuple[PartBlock, ...]:
        """All copies, outermost dimension of the target first."""
        return self.copies.pieces

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.copies.numel

    @property
    def span(self) -> tuple[int, int]:
        """First element of the target that is written, and one past the last."""
        return self.copies.span


class SegmentWindow(NamedTuple):
    """Elements of a segment whose place in the target is in ``[lo, hi)``."""

    segment: int
    lo: int
    hi: int
    numel: int


def rising(block: Block) -> Block:
    """Return a copy with its dimensions in the order of the target."""
    order = sorted(range(len(block.shape)), key=lambda d: -block.target_strides[d])
    return Block(
        tuple(block.shape[d] for d in order),
        block.source_start,
        tuple(block.source_strides[d] for d in order),
        block.target_start,
        tuple(block.target_strides[d] for d in order),
    )


def messages(
    segments: Sequence[StreamSegment], itemsizes: Sequence[int], limit: int
) -> Iterator[list[SegmentWindow]]:
    """Yield what each message of a stream holds; the same on both ends.

    Parameters
    ----------
    segments
        In the order of the stream.
    itemsizes
        Bytes of an element on the way, by segment; 0 for segments that are not sent.
    limit
        Most bytes of a message.
    """
    message: list[SegmentWindow] = []
    room = limit
    for number, (segment, size) in enumerate(zip(segments, itemsizes, strict=True)):
        if not size or not segment.numel:
            continue
        for window in _windows(segment, number, limit // size, room // size):
            if window.numel * size > room:
                yield message
                message, room = [], limit
            message.append(window)
            # Elements stay aligned, whatever came before them.
            room -= _aligned(window.numel * size)
    if message:
        yield message


def laid_out(
    message: Sequence[SegmentWindow], sizes: Sequence[int]
) -> list[tuple[SegmentWindow, int, int]]:
    """Return where each window lies in a message: its first byte and its length."""
    out = []
    at = 0
    for window in message:
        length = window.numel * sizes[window.segment]
        out.append((window, at, length))
        at = _aligned(at + length)
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _windows(segment: StreamSegment, number: int, most: int, room: int) -> Iterator[SegmentWindow]:
    lo, hi = segment.span
    if segment.numel <= max(room, 1) or segment.numel <= most // 4:
        yield SegmentWindow(number, lo, hi, segment.numel)
        return
    for at in range(lo, hi, most):
        end = min(hi, at + most)
        numel = sum(b.numel for p in segment.pieces for b in clip(p.block, "target", at, end))
        if numel:
            yield SegmentWindow(number, at, end, numel)


def ordered(segment: StreamSegment, lo: int, hi: int) -> Iterator[Chunk]:
    """Yield the elements of a window, rising in the target.

    Parameters
    ----------
    segment
        The segment.
    lo, hi
        The window, in elements of the target.
    """
    yield from _ordered([PartBlock(p, b) for p, b in segment.pieces], lo, hi)


def _ordered(pieces: list[PartBlock], lo: int, hi: int) -> Iterator[Chunk]:
    found = [PartBlock(p, rising(c)) for p, b in pieces for c in clip(b, "target", lo, hi)]
    found.sort(key=lambda p: p.block.target_start)
    if _apart(found):
        yield from found
        return
    widest = max(found, key=lambda p: p.block.target_span[1] - p.block.target_span[0]).block
    stride = max(widest.target_strides, default=1)
    if stride < _SHORT:
        yield from _picked(found, lo, hi)
        return
    first = widest.target_start
    yield from _ordered(found, lo, first) if lo < first else ()
    for at in range(first, min(hi, widest.target_span[1]), stride):
        yield from _ordered(found, at, min(hi, at + stride))
    end = first + -(-(widest.target_span[1] - first) // stride) * stride
    yield from _ordered(found, end, hi) if end < hi else ()


def _apart(pieces: Sequence[PartBlock]) -> bool:
    """Whether pieces follow each other, and each rises by itself."""
    end = 0
    for piece in pieces:
        lo, hi = piece.block.target_span
        if lo < end:
            return False
        end = hi
        reach = 0
        pairs = zip(piece.block.shape, piece.block.target_strides, strict=True)
        for n, stride in reversed(list(pairs)):
            if stride <= reach:
                return False
            reach += (n - 1) * stride
    return True


def _picked(pieces: list[PartBlock], lo: int, hi: int) -> Iterator[Picked]:
    """List elements one by one, a bounded number at a time."""
    for at in range(lo, hi, _INDEXED):
        end = min(hi, at + _INDEXED)
        listed = [_listed(part, c) for part, b in pieces for c in clip(b, "target", at, end)]
        if listed:
            source, target, parts = (np.concatenate(v) for v in zip(*listed, strict=True))
            order = np.argsort(target, kind="stable")
            yield Picked(source[order], target[order], parts[order])


def _listed(part: int, block: Block) -> tuple[I64, I64, I64]:
    source = np.full(1, block.source_start, dtype=np.int64)
    target = np.full(1, block.target_start, dtype=np.int64)
    for n, s, t in zip(block.shape, block.source_strides, block.target_strides, strict=True):
        steps = np.arange(n, dtype=np.int64)
        source = np.add.outer(source, steps * s).reshape(-1)
        target = np.add.outer(target, steps * t).reshape(-1)
    return source, target, np.full(len(source), part, dtype=np.int64)


@dataclass(frozen=True)
class Roles:
    """Which process is which rank of the two layouts.

    Attributes
    ----------
    source, target
        Process by rank of the layout.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]

    def source_rank(self, process: int) -> int | None:
        """Return the rank of a process in the source's layout, if it is in it."""
        return self.source.index(process) if process in self.source else None

    def target_rank(self, process: int) -> int | None:
        """Return the rank of a process in the target's layout, if it is in it."""
        return self.target.index(process) if process in self.target else None


@dataclass(frozen=True, eq=False, slots=True)
class Outgoing:
    """Copies from one own tensor to one of another rank; without memory there is none here."""

    segment: StreamSegment
    tensor: BoundTensor
    memory: TensorMemory | None


class Incoming(NamedTuple):
    """Copies to one own tensor from one tensor of another rank.

    Attributes
    ----------
    segment
        The copies, by part.
    tensor
        The own tensor.
    memory
        Where it is; None when the state has no place for it.
    parts
        For each part of the segment what happens to its values, and how many ranks give theirs.
    """

    segment: StreamSegment
    tensor: BoundTensor
    memory: TensorMemory | None
    parts: tuple[tuple[Values | None, int], ...]


@dataclass(frozen=True, eq=False)
class TensorFills:
    """Fills of an own tensor; `alone`: it is nothing but fills."""

    name: str
    memory: TensorMemory
    fills: tuple[Fill, ...]
    alone: bool


@dataclass(eq=False)
class MovePlan:
    """Everything that one process does, by the other process.

    Attributes
    ----------
    outgoing, incoming
        In the order of the streams.
    fills
        Own tensors, and what no element of the source represents in each.
    """

    outgoing: dict[int, list[Outgoing]] = field(default_factory=dict)
    incoming: dict[int, list[Incoming]] = field(default_factory=dict)
    fills: list[TensorFills] = field(default_factory=list)


def make_plan(
    transfers: Transfers,
    roles: Roles,
    process: int,
    *,
    states: frozenset[str],
    sources: Mapping[str, TensorMemory],
    targets: Mapping[str, TensorMemory],
) -> MovePlan:
    """Plan the part of one process, without a word to any other.

    Parameters
    ----------
    transfers
        The two layouts.
    roles
        Who is who.
    process
        This one.
    states
        Short names of the states that are moved; parameters are the empty one.
    sources, targets
        Memory of this process's tensors, by the names that the layouts give them.

    Raises
    ------
    MismatchError
        The source does not hold all that the target wants.
    """
    plan = MovePlan()
    giver, taker = roles.source_rank(process), roles.target_rank(process)
    if giver is not None:
        _give(plan, transfers, roles, giver, states, sources)
    if taker is not None:
        takings = Takings(transfers, taker, states, targets)
        plan.fills = takings.fills
        plan.incoming = {roles.source[giver]: takings.of(giver) for giver in takings.givers}
    for outgoing in plan.outgoing.values():
        outgoing.sort(key=lambda o: (o.segment.target, o.segment.source))
    return plan


def _give(
    plan: MovePlan,
    transfers: Transfers,
    roles: Roles,
    rank: int,
    states: frozenset[str],
    sources: Mapping[str, TensorMemory],
) -> None:
    mine = {t.name: t for t in local_tensors(transfers.composition.source, rank)}
    alike: dict[object, SegmentCopies] = {}
    for sent in transfers.sent(rank):
        tensor = mine[sent.source]
        if tensor.state in states:
            copies = alike.get(sent.blocks)
            if copies is None:
                copies = alike[sent.blocks] = SegmentCopies((sent.blocks,))
            segment = StreamSegment(sent.source, sent.target, copies)
            found = Outgoing(segment, tensor, sources.get(sent.source))
            plan.outgoing.setdefault(roles.target[sent.rank], []).append(found)


_Parts = tuple[tuple[Values | None, int], ...]
"""For each part of a segment what happens to its values, and how many ranks give theirs."""


class _Taken(NamedTuple):
    """Copies from one giver to tensors that are alike, from one name of each."""

    name: int
    copies: SegmentCopies
    parts: _Parts


@dataclass(eq=False)
class _Alike:
    """Own tensors that get the same copies from all ranks, but for names.

    Attributes
    ----------
    tensors
        The tensors, the memory of each, and the names that it is copied from.
    givers
        Copies from each rank to each of them.
    """

    givers: dict[int, list[_Taken]]
    tensors: list[tuple[BoundTensor, TensorMemory | None, tuple[str, ...]]] = field(
        default_factory=list
    )


class Takings:
    """Copies to one rank of the target, by giver.

    Layers differ in names alone. So copies are planned once for all tensors that are alike,
    and listed for one giver at a time: a model on a thousand ranks has some thousand different
    copies and hundreds of thousands of segments.

    Parameters
    ----------
    transfers
        The two layouts.
    rank
        Of the target.
    states
        Short names of the states that are taken; parameters are the empty one.
    targets
        Memory of the rank's tensors, by the names that the layout gives them.

    Attributes
    ----------
    fills
        Own tensors, and the elements of each that the source lacks.
    homeless
        Own tensors that get copies and have no memory.

    Raises
    ------
    MismatchError
        The source does not hold all that the target wants.
    """

    def __init__(
        self,
        transfers: Transfers,
        rank: int,
        states: frozenset[str],
        targets: Mapping[str, TensorMemory],
    ) -> None:
        self.fills: list[TensorFills] = []
        self.homeless: list[str] = []
        self._copies: dict[object, SegmentCopies] = {}
        alike: dict[object, _Alike] = {}
        kept: list[tuple[LiveShare, ...]] = []
        for tensor in local_tensors(transfers.composition.target, rank):
            if tensor.state not in states:
                continue
            shares, fills = transfers.shares(rank, tensor)
            memory = targets.get(tensor.name)
            if fills and memory is not None:
                self.fills.append(TensorFills(tensor.name, memory, fills, not shares))
            if not shares:
                continue
            if memory is None:
                self.homeless.append(tensor.name)
            names = tuple(dict.fromkeys(s.name for s in shares))
            numbers = {name: i for i, name in enumerate(names)}
            # Compared by identity: what is equal and not the same is planned twice, and no worse.
            key = tuple([(numbers[s.name], s.values, s.of, id(s.givers)) for s in shares])
            found = alike.get(key)
            if found is None:
                kept.append(shares)
                found = alike[key] = _Alike(self._taken(shares, numbers))
            found.tensors.append((tensor, memory, names))
        self._by_giver = by_key((giver, a) for a in alike.values() for giver in a.givers)

    @property
    def givers(self) -> list[int]:
        """Ranks of the source that something is taken of."""
        return sorted(self._by_giver)

    def of(self, giver: int) -> list[Incoming]:
        """Return what is taken of a rank, in the order of the stream."""
        out = [
            Incoming(StreamSegment(names[name], tensor.name, copies), tensor, memory, parts)
            for alike in self._by_giver[giver]
            for tensor, memory, names in alike.tensors
            for name, copies, parts in alike.givers[giver]
        ]
        out.sort(key=lambda i: (i.segment.target, i.segment.source))
        return out

    def _taken(
        self, shares: tuple[LiveShare, ...], numbers: Mapping[str, int]
    ) -> dict[int, list[_Taken]]:
        found: dict[tuple[int, int], list[tuple[tuple[Block, ...], tuple[Values | None, int]]]] = {}
        for share in shares:
            number, change = numbers[share.name], (share.values, share.of)
            for giver, blocks in share.givers:
                found.setdefault((giver, number), []).append((blocks, change))
        out: dict[int, list[_Taken]] = {}
        for (giver, number), copied in found.items():
            every = tuple([b for b, _ in copied])
            copies = self._copies.get(every)
            if copies is None:
                copies = self._copies[every] = SegmentCopies(every)
            parts = tuple([c for _, c in copied])
            out.setdefault(giver, []).append(_Taken(number, copies, parts))
        return out
