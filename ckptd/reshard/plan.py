"""Plan of a reshard: what fills each chunk, rounds that fit the budget, shares of processes.

In it: how files are grouped so that blocks are read once.

Everything here follows from the source's manifest and the two layouts, so that processes which
never speak to each other agree on every byte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.block import Block, Fill, piece_regions
from ckptd.base.grids.clip import clip, clip_fill
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.base.grids.plan import plan_once
from ckptd.base.grids.runs import Runs, count, merge, no_runs
from ckptd.checkpoint.format.container import ChunkRef, FileMap
from ckptd.checkpoint.format.manifest import GridEntry, MeshEntry, ObjectEntry, Runs3, TensorEntry
from ckptd.checkpoint.format.witness import WitnessPlan
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.plan import BlockLine, Change, Conversion, PlannedCopy, needed_blocks
from ckptd.errors import MismatchError
from ckptd.lay.copies import TargetPlan
from ckptd.types import DType


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Copies out of one source piece.

    Attributes
    ----------
    tensor, piece
        Of the source.
    blocks
        Source positions are relative to the piece, target positions to the chunk that is filled.
    change
        None: bytes as they are.
    turn
        Takes of a later turn come when those of all earlier ones are done: what multiplies or
        adds to a value must come after it.
    """

    tensor: int
    piece: int
    blocks: tuple[Block, ...]
    change: Change | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFeed:
    """Everything that fills one chunk.

    Attributes
    ----------
    takes
        Copies; those of one turn never write one element twice.
    fills
        Elements that no source has: padding.
    literal
        Gives the chunk's bytes, where they are made again: objects, scales.
    """

    takes: tuple[Take, ...] = ()
    fills: tuple[Fill, ...] = ()
    literal: Callable[[], bytes] | None = None


Feed = Callable[[int], ChunkFeed]
"""Returns what fills a piece of a tensor, by the number of the piece."""


def recut(tensor: int, source: Grid, target: Grid) -> Feed:
    """Return the feed of a tensor that holds the values of source tensor `tensor`, cut again.

    Parameters
    ----------
    source, target
        Its grid there, and here.
    """

    def feed(piece: int) -> ChunkFeed:
        copies = plan_once(source, piece_regions(target.piece(piece)))
        return ChunkFeed(tuple(Take(tensor, c.piece, c.blocks) for c in copies))

    return feed


@dataclass(frozen=True, eq=False)
class Target:
    """The checkpoint to write.

    Attributes
    ----------
    world
        Number of ranks of the layout; one data file each.
    tensors, grids, owners, objects, meshes, metadata, lay, requires
        As in the manifest.
    feeds
        Source of the pieces of each tensor.
    links
        Number of the link that a tensor comes from, by number of the tensor; None: they are the
        same, and tensors beyond the last link come from elsewhere.
    plan
        How a piece is filled, by numbers of tensor and piece, where that is no piece of a link's.
    """

    world: int
    tensors: tuple[TensorEntry, ...]
    grids: tuple[GridEntry, ...]
    owners: tuple[Runs3, ...]
    feeds: Sequence[Feed]
    objects: tuple[ObjectEntry, ...] = ()
    meshes: tuple[MeshEntry, ...] = ()
    metadata: dict[str, Any] | None = None
    lay: str = ""
    links: Mapping[int, int] | None = None
    plan: Callable[[int, int], TargetPlan] | None = None
    requires: tuple[str, ...] = ()

    @cached_property
    def filemap(self) -> FileMap:
        """The byte ranges that follow from the tables."""
        per_rank = {o.tensor for o in self.objects if o.per_rank}
        ranked = frozenset(i for i, t in enumerate(self.tensors) if t.name in per_rank)
        grids = [g.grid for g in self.grids]
        return FileMap(self.tensors, grids, [Owners(r) for r in self.owners], ranked)

    @cached_property
    def sizes(self) -> list[int]:
        """Length of the data section of each file."""
        return [int(n) for n in self.filemap.all_data_bytes(self.world)]

    @cached_property
    def witness(self) -> WitnessPlan:
        """Where the witness looks."""
        return WitnessPlan.over(self.tensors, self.objects)


def share(sizes: Sequence[int], number: int, count: int) -> range:
    """Return the files of process `number` of `count`: neighbours, about as many bytes each.

    Neighbours, because they have most in common: the ranks of a tensor-parallel group read the
    same bytes.
    """
    ends = np.cumsum(np.array(sizes, dtype=np.float64) + 1.0)
    middles = ends - (np.array(sizes) + 1.0) / 2
    whose = np.minimum((middles / ends[-1] * count).astype(np.int64), count - 1)
    lo, hi = np.searchsorted(whose, (number, number + 1)).tolist()
    return range(lo, hi)


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

_Literal: TypeAlias = tuple[int, int, Callable[[], bytes], slice]


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
    literals: Sequence[_Literal]
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
        """Drop the tables of files that are done."""
        for file in files:
            self._chunks.pop(file, None)

    def plan(self, stretches: Sequence[Stretch]) -> RoundPlan:
        """Plan one round.

        Raises
        ------
        MismatchError
            The source leaves out what the target wants.
        """
        turns: dict[int, list[PlannedCopy]] = {}
        fills: list[tuple[int, DType, Fill]] = []
        literals: list[_Literal] = []
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
            found = self._feeds[key] = self._target.feeds[chunk.tensor](chunk.piece.index)
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
                PlannedCopy(file, start, source.itemsize, part.moved(0, at), number, conversion)
                for block in take.blocks
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
            "the source lacks parts of tensors that the target needs",
            where=f"{target.name}, from {source.name}",
            wanted="all parts in files of the source",
            hint="drop it in the target layout",
        )


def _literal(
    chunk: ChunkRef, stretch: Stretch, number: int, literal: Callable[[], bytes]
) -> _Literal:
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
