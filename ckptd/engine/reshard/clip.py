"""Cutting a block where one of its two buffers ends: at a window of a source or target file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ckptd.layout.block import Block
from ckptd.layout.lay.lattice import within
from ckptd.layout.lay.regions import Fill

__all__ = ["Side", "clip", "clip_fill"]

Side = Literal["source", "target"]


def clip(block: Block, side: Side, lo: int, hi: int) -> Iterator[Block]:
    """Yield the parts of a block that lie in elements ``[lo, hi)`` of one of its buffers.

    The parts keep the block's positions: they are relative to the same two buffers. At most
    ``2 * ndim - 1`` of them.
    """
    first, last = block.source_span if side == "source" else block.target_span
    if lo <= first and last <= hi:
        yield block
        return
    if last <= lo or hi <= first:
        return
    strides = block.source_strides if side == "source" else block.target_strides
    # Outermost first, as this side sees it: then positions rise with indexes.
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    steps = [(block.shape[d], strides[d]) for d in order]
    for _, ranges in within(steps, lo - first, hi - first):
        chosen = dict(zip(order, ranges, strict=True))
        yield _part(block, [chosen[d] for d in range(len(order))])


def _part(block: Block, ranges: list[tuple[int, int]]) -> Block:
    """Return the block of an index range of each dimension; dimensions of one are dropped."""
    source, target = block.source_start, block.target_start
    for (at, _), s, t in zip(ranges, block.source_strides, block.target_strides, strict=True):
        source += at * s
        target += at * t
    kept = [d for d, (_, n) in enumerate(ranges) if n > 1]
    return Block(
        tuple(ranges[d][1] for d in kept),
        source,
        tuple(block.source_strides[d] for d in kept),
        target,
        tuple(block.target_strides[d] for d in kept),
    )


def clip_fill(fill: Fill, lo: int, hi: int) -> Iterator[Fill]:
    """Yield the parts of a fill that lie in elements ``[lo, hi)`` of the buffer."""
    steps = tuple(sorted(fill.steps, key=lambda s: -s[1]))
    for at, ranges in within(steps, lo - fill.start, hi - fill.start):
        kept = tuple(
            (n, stride) for (_, n), (_, stride) in zip(ranges, steps, strict=True) if n > 1
        )
        yield Fill(kept, fill.start + at, fill.value)
