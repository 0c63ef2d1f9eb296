"""The plan of one round: which bytes of the source go where in its staging memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import MismatchError
from ckptd.format.digest import BLOCK_BYTES
from ckptd.format.filemap import ChunkRef, FileMap
from ckptd.layout.block import Block, Fill
from ckptd.layout.clip import clip, clip_fill
from ckptd.layout.owners import ABSENT
from ckptd.load.files import PieceLocations
from ckptd.load.plan import (
    BlockLine,
    Conversion,
    PlannedCopy,
    Runs,
    count,
    merge,
    needed_blocks,
    no_runs,
)
from ckptd.reshard.feed import ChunkFeed
from ckptd.reshard.target import Target
from ckptd.types import DType

__all__ = ["RoundPlan", "RoundPlanner", "Stretch", "cut_rounds", "group_files"]


I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes ``[lo, hi)`` of the data section of file number `file`."""

    file: int
    lo: int
    hi: int


def cut_rounds(filemap: FileMap, files: Sequence[int], limit: int) -> Iterator[list[Stretch]]:
    """Yield what each round writes; empty files never appear.

    Parameters
    ----------
    filemap
        Of the target.
    files
        The files that grow in step.
    limit
        Most bytes of a round; one block a file is allowed in any case.
    """
    sizes = np.array([filemap.data_bytes(f) for f in files], dtype=np.int64)
    at = np.zeros_like(sizes)
    best = at
    for end in _ends(filemap, files, limit // 2):
        there = np.where(end == sizes, end, end // BLOCK_BYTES * BLOCK_BYTES)
        if int((there - at).sum()) > limit and (best > at).any():
            yield _stretches(files, at, best)
            at = best
        best = there
    if (best > at).any():
        yield _stretches(files, at, best)


def _stretches(files: Sequence[int], lo: I64, hi: I64) -> list[Stretch]:
    return [
        Stretch(f, a, b) for f, a, b in zip(files, lo.tolist(), hi.tolist(), strict=True) if b > a
    ]


def _ends(filemap: FileMap, files: Sequence[int], most: int) -> Iterator[I64]:
    """Yield where each file stands after each tensor, or after each part of a large one."""
    starts = np.stack([filemap.starts(f)[:-1][filemap.order] for f in files])
    sizes = np.array([filemap.data_bytes(f) for f in files], dtype=np.int64)
    ends = np.concatenate((starts[:, 1:], sizes[:, None]), axis=1)
    widths = (ends - starts).sum(axis=0)
    for j in np.flatnonzero(widths).tolist():
        count = max(1, -(-int(widths[j]) // max(1, most)))
        for i in range(1, count + 1):
            # Divided first: a product with the length of a part could leave int64.
            whole, rest = np.divmod(ends[:, j] - starts[:, j], count)
            yield starts[:, j] + whole * i + rest * i // count


_KEPT_FEEDS = 256

Literal: TypeAlias = tuple[int, int, Callable[[], bytes], slice]


@dataclass(frozen=True, slots=True, eq=False)
class RoundPlan:
    """Everything that one round does.

    Attributes
    ----------
    stretches
        What is written.
    turns
        Copies into the stretches, and the digest blocks of the source that they need, turn by turn.
    fills
        ``(stretch, type, fill)``, positions relative to the stretch.
    literals
        ``(stretch, first byte, bytes of a chunk, range of them)``.
    bytes_needed
        Bytes of the source that the copies take.
    """

    stretches: Sequence[Stretch]
    turns: Sequence[tuple[list[PlannedCopy], Runs]]
    fills: Sequence[tuple[int, DType, Fill]]
    literals: Sequence[Literal]
    bytes_needed: int


class RoundPlanner:
    """Plans rounds of one process.

    Parameters
    ----------
    source, target
        Both sides.
    line
        Positions of the source's blocks.
    """

    def __init__(self, source: PieceLocations, target: Target, line: BlockLine) -> None:
        self._source = source
        self._target = target
        self._line = line
        self._chunks: dict[int, tuple[list[ChunkRef], NDArray[np.int64]]] = {}
        self._feeds: OrderedDict[tuple[int, int], ChunkFeed] = OrderedDict()

    def chunks(self, file: int) -> list[ChunkRef]:
        """Return the chunks of a target file, in order."""
        return self._table(file)[0]

    def _table(self, file: int) -> tuple[list[ChunkRef], NDArray[np.int64]]:
        found = self._chunks.get(file)
        if found is None:
            chunks = self._target.filemap.chunks(file)
            ends = np.array([c.end for c in chunks], dtype=np.int64)
            found = self._chunks[file] = chunks, ends
        return found

    def forget(self, files: Sequence[int]) -> None:
        """Let go of what is known of files that are done."""
        for file in files:
            self._chunks.pop(file, None)

    def plan(self, stretches: Sequence[Stretch]) -> RoundPlan:
        """Plan one round.

        Raises
        ------
        MismatchError
            kind ``absent``: the source leaves out what the target wants.
        """
        turns: dict[int, list[PlannedCopy]] = {}
        fills: list[tuple[int, DType, Fill]] = []
        literals: list[Literal] = []
        for number, stretch in enumerate(stretches):
            for chunk in self._within(stretch):
                feed = self._feed(chunk)
                if feed.literal is not None:
                    literals.append(_literal(chunk, stretch, number, feed.literal))
                self._add_copies(turns, chunk, stretch, number, feed)
                fills += self._fills(chunk, stretch, number, feed)
        needed = sum(m.byte_count for moves in turns.values() for m in moves)
        runs = [(turns[n], needed_blocks(self._line, turns[n])) for n in sorted(turns)]
        return RoundPlan(stretches, runs, fills, literals, needed)

    def _within(self, stretch: Stretch) -> Iterator[ChunkRef]:
        chunks, ends = self._table(stretch.file)
        for i in range(int(np.searchsorted(ends, stretch.lo, side="right")), len(chunks)):
            if chunks[i].start >= stretch.hi:
                return
            if chunks[i].end > chunks[i].start:
                yield chunks[i]

    def _feed(self, chunk: ChunkRef) -> ChunkFeed:
        key = (chunk.tensor, chunk.piece.index)
        found = self._feeds.get(key)
        if found is None:
            found = self._feeds[key] = self._target.feeds.feed(*key)
            if len(self._feeds) > _KEPT_FEEDS:
                self._feeds.popitem(last=False)
        return found

    def _bounds(self, chunk: ChunkRef, stretch: Stretch) -> tuple[int, int, int]:
        """Return which elements of a chunk a stretch has, and where its first one would be."""
        size = self._target.filemap.dtypes[chunk.tensor].itemsize
        lo, hi = max(stretch.lo, chunk.start), min(stretch.hi, chunk.end)
        # Exact: stretches begin at blocks or chunks, chunks at multiples of their item size.
        at = (chunk.start - stretch.lo) // size
        return (lo - chunk.start) // size, (hi - chunk.start) // size, at

    def _add_copies(
        self,
        turns: dict[int, list[PlannedCopy]],
        chunk: ChunkRef,
        stretch: Stretch,
        number: int,
        feed: ChunkFeed,
    ) -> None:
        lo, hi, at = self._bounds(chunk, stretch)
        types = self._source.filemap.dtypes
        for take in feed.takes:
            file, start = self._source.of(take.tensor, take.piece)
            if file == ABSENT:
                raise self._absent(chunk, take.tensor)
            source = types[take.tensor]
            conversion = None
            if take.change is not None:
                target = self._target.filemap.dtypes[chunk.tensor]
                conversion = Conversion(take.change, source, target, at)
            turns.setdefault(take.turn, []).extend(
                PlannedCopy(file, start, source.itemsize, _moved(part, at), number, conversion)
                for block in self._source.blocks(take.tensor, take.piece, take.blocks)
                for part in clip(block, "target", lo, hi)
            )

    def _fills(
        self, chunk: ChunkRef, stretch: Stretch, number: int, feed: ChunkFeed
    ) -> Iterator[tuple[int, DType, Fill]]:
        lo, hi, at = self._bounds(chunk, stretch)
        dtype = self._target.filemap.dtypes[chunk.tensor]
        for fill in feed.fills:
            for part in clip_fill(fill, lo, hi):
                yield number, dtype, part._replace(start=part.start + at)

    def _absent(self, chunk: ChunkRef, tensor: int) -> MismatchError:
        source, target = self._source.manifest.tensors[tensor], self._target.tensors[chunk.tensor]
        return MismatchError(
            "the source leaves out what the target wants",
            kind="absent",
            where=f"{target.name}, from {source.name}",
            wanted="pieces that some file holds",
            hint="drop it in the target layout",
        )


def _moved(block: Block, at: int) -> Block:
    return Block(
        block.shape,
        block.source_start,
        block.source_strides,
        block.target_start + at,
        block.target_strides,
    )


def _literal(
    chunk: ChunkRef, stretch: Stretch, number: int, literal: Callable[[], bytes]
) -> Literal:
    lo, hi = max(stretch.lo, chunk.start), min(stretch.hi, chunk.end)
    return number, lo - stretch.lo, literal, slice(lo - chunk.start, hi - chunk.start)


_SHARED = 0.125
_SAMPLE = 512
"""Chunks of a file that are looked at."""
_MOST_FILES = 64


def group_files(planner: RoundPlanner, files: Sequence[int], most: int) -> list[list[int]]:
    """Return the files in groups of neighbours.

    Parameters
    ----------
    planner
        Tells what a chunk needs.
    files
        The files of this process, in order; none is empty.
    most
        Most files of a group.
    """
    groups: list[list[int]] = []
    union = no_runs()
    for file in files:
        runs = _wanted(planner, file)
        both = merge(np.concatenate((union, runs)))
        shared = count(union) + count(runs) - count(both)
        full = groups and len(groups[-1]) >= min(most, _MOST_FILES)
        if groups and not full and shared > _SHARED * count(runs):
            groups[-1].append(file)
            union = both
        else:
            groups.append([file])
            union = runs
    return groups


def _wanted(planner: RoundPlanner, file: int) -> Runs:
    """Return source blocks that a file wants: all of them, or those of a sample."""
    chunks = [c for c in planner.chunks(file) if c.end > c.start]
    step = max(1, len(chunks) // _SAMPLE)
    plan = planner.plan([Stretch(file, c.start, c.end) for c in chunks[::step]])
    runs = [r for _, r in plan.turns]
    return merge(np.concatenate(runs)) if runs else no_runs()
