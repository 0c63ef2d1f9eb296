"""Scales of tensors that a target quantizes: the largest magnitude of each block, by reading it.

The values are read once for this and once more when they are written: a block's scale must be known
before its first value is, and blocks lie across the files and rounds of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.blocks import BlockLine
from ckptd.engine.reshard.changes import change_of, quantized
from ckptd.engine.reshard.feed import Feed, Take
from ckptd.engine.reshard.moves import Planner
from ckptd.engine.reshard.reading import BlockCache, Reading
from ckptd.engine.reshard.rounds import cut_rounds
from ckptd.engine.reshard.scaled import block_maxima, largest, scale_shape
from ckptd.engine.reshard.target import Tables, Target
from ckptd.format.manifest import GridEntry, TensorEntry
from ckptd.layout.grid import whole
from ckptd.layout.owners import single_owner
from ckptd.types import dtype_of

if TYPE_CHECKING:
    from ckptd.engine.reshard.composed import Composed, Link

__all__ = ["measured_scales"]

_ROUND_BYTES = 32 << 20
_STALL_S = 900.0
_LOGICAL = "float32"


@dataclass(frozen=True, eq=False)
class _Logical:
    """Feeds of the logical values of one target tensor: a tensor for each of its pieces."""

    composed: Composed
    link: Link

    def feed(self, tensor: int, piece: int) -> Feed:
        """Return what fills piece number `tensor`."""
        plan = self.composed.composition.piece(self.link.key, tensor)
        takes = []
        for copy in plan.copies:
            source = self.composed.stock.by_name[copy.source.name]
            change = change_of(source.dtype, dtype_of(_LOGICAL), None, self.link.tensor.name)
            takes.append(Take(source.number, copy.piece, copy.blocks, change))
        return Feed(tuple(takes), plan.fills)


def measured_scales(composed: Composed, link: Link) -> NDArray[np.float32]:
    """Return the scales of a quantized target tensor.

    A block of zeros has scale 1. The result does not depend on how the tensor is cut.
    """
    source, grid = composed.stock.source, link.tensor.grid
    modifier = quantized(composed.composition.target.rules[link.key[0]].equation.modifiers)
    block = modifier.block if modifier else ()
    tables = Tables()
    entries = []
    for number in range(grid.npieces):
        flat = whole((grid.piece(number).numel,))
        at = tables.grid(GridEntry.of(flat)), tables.owner(single_owner(0).runs)
        entries.append(TensorEntry(f"piece.{number}", _LOGICAL, flat.shape, *at))
    feeds = _Logical(composed, link)
    target = Target(1, tuple(entries), tables.grids, tables.owners, feeds)
    line = BlockLine([f.data_bytes for f in source.files])
    planner = Planner(source, target, line)
    reading = Reading(
        source, line, threads=2, window_blocks=2, cache=BlockCache(0), stall_s=_STALL_S
    )
    maxima = np.zeros(scale_shape(grid.shape, block), dtype=np.float32)
    for stretches in cut_rounds(target.filemap, [0], _ROUND_BYTES):
        plan = planner.plan(stretches)
        lo, hi = stretches[0].lo, stretches[0].hi
        memory = np.zeros(hi - lo, dtype=np.uint8)
        reading.run(plan, [memory], target.filemap.dtypes, lambda: None)
        values = memory.view(np.float32)
        for chunk in planner.chunks(0):
            first, last = max(lo, chunk.start), min(hi, chunk.end)
            if first < last:
                piece = grid.piece(chunk.tensor)
                begin = (piece.flat[0] if piece.flat else 0) + (first - chunk.start) // 4
                found = values[(first - lo) // 4 : (last - lo) // 4]
                block_maxima(maxima, found, begin, piece.box, block)
    maxima[maxima == 0] = largest(link.dtype)
    return maxima / np.float32(largest(link.dtype))
