"""Tensors of a source that its layout calls copies of other ones: compared with what they copy.

A folder of somebody else, and the files of ranks, may hold a tied weight under each of its names.
Only one of them is carried over, so the others must be equal to it: a copy with other values is a
tensor of its own, which would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError
from ckptd.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.layout.grid import Grid
from ckptd.load.files import PieceLocations
from ckptd.load.plan import BlockLine
from ckptd.reshard.feed import ChunkFeed, Feeds, Recut
from ckptd.reshard.moves import RoundPlanner, Stretch, cut_rounds
from ckptd.reshard.reading import BlockCache, Reading
from ckptd.reshard.source import Stock, StockTensor
from ckptd.reshard.target import Target
from ckptd.types import DType

__all__ = ["Duplicate", "check_duplicates"]

_ROUND_BYTES = 32 << 20
_STALL_S = 900.0

U8 = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Duplicate:
    """A tensor of the source that is a copy of another one.

    Attributes
    ----------
    tensor
        The copy.
    original
        Name of what it copies.
    grid
        Its pieces, as `feeds` counts them.
    feeds
        What each piece would be, made of the original.
    """

    tensor: StockTensor
    original: str
    grid: Grid
    feeds: Feeds


@dataclass(frozen=True, eq=False)
class _Own:
    """The copy itself, cut as it is made of the original."""

    stock: Stock
    tensor: StockTensor
    grid: Grid

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        found = Recut(self.tensor.number, self.tensor.grid, self.grid).feed(tensor, piece)
        if self.stock.locate is None:
            return found
        name, dtype = self.tensor.name, self.tensor.dtype
        takes = [
            located
            for take in found.takes
            for located in self.stock.locate(name, take.piece, take.blocks, dtype)
        ]
        return ChunkFeed(tuple(takes))


@dataclass(frozen=True, eq=False)
class _Original:
    """What the copy should be. Fills are left out: they are no values of the original."""

    feeds: Feeds

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        return ChunkFeed(self.feeds.feed(tensor, piece).takes)


def check_duplicates(stock: Stock, found: Sequence[Duplicate]) -> None:
    """Compare copies with what they copy, in bounded memory.

    Raises
    ------
    CorruptError
        kind ``replicas-differ``: names the copy and the original.
    """
    for one in found:
        _check(stock, one)


def _check(stock: Stock, one: Duplicate) -> None:
    entry = one.tensor
    own = _Side(stock.source, one.grid, entry.dtype, _Own(stock, entry, one.grid))
    made = _Side(stock.source, one.grid, entry.dtype, _Original(one.feeds))
    at = 0
    for stretches in cut_rounds(own.target.filemap, [0], _ROUND_BYTES):
        size = stretches[0].hi - stretches[0].lo
        held: U8 = np.zeros(size, dtype=np.uint8)
        own.read(stretches, held)
        wanted = held.copy()
        made.read(stretches, wanted)
        if not np.array_equal(held, wanted):
            byte = int(np.flatnonzero(held != wanted)[0])
            raise CorruptError(
                "a copy of a tensor is not equal to it",
                kind="replicas-differ",
                where=entry.name,
                wanted=f"what {one.original} holds",
                found=f"another value at element {(at + byte) // entry.dtype.itemsize}",
                hint="if it is a tensor of its own, give it a rule of its own in the source's"
                " layout, in place of the alias",
            )
        at += size


class _Side:
    """One of the two, read round by round."""

    def __init__(self, source: PieceLocations, grid: Grid, dtype: DType, feeds: Feeds) -> None:
        tables = ManifestTables()
        at = tables.grid(GridEntry.of(grid)), tables.owner(((0, 0, grid.npieces),))
        entries = (TensorEntry("copy", dtype.name, grid.shape, *at),)
        self.target = Target(1, entries, tables.grids, tables.owners, feeds)
        line = BlockLine([f.data_bytes for f in source.files])
        self._planner = RoundPlanner(source, self.target, line)
        self._reading = Reading(
            source, line, threads=2, window_blocks=2, cache=BlockCache(0), stall_s=_STALL_S
        )

    def read(self, stretches: Sequence[Stretch], memory: U8) -> None:
        plan = self._planner.plan(stretches)
        self._reading.run(plan, [memory])
