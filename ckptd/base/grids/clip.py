"""Cuts a block or a fill where one of its buffers ends: at a window of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.grid import coordinates_of, strides_of
from ckptd.base.grids.lattice import within

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


def restride(
    block: Block, shape: tuple[int, ...], strides: tuple[int, ...], base: int
) -> Iterator[Block]:
    """Yield the same copy with another source.

    Parameters
    ----------
    block
        Source positions are row-major in a cell.
    shape
        Of the cell.
    strides
        Of the larger tensor, in elements.
    base
        Position of the cell's first element in the larger tensor.
    """
    own = strides_of(shape)
    first = coordinates_of(block.source_start, own)
    steps = [coordinates_of(s, own) for s in block.source_strides]
    for d, n in enumerate(shape):
        reach = sum((m - 1) * step[d] for m, step in zip(block.shape, steps, strict=True))
        if first[d] + reach >= n:
            yield from _row_by_row(block, shape, strides, base, own[d - 1] if d else 0)
            return
    yield Block(
        block.shape,
        base + sum(c * s for c, s in zip(first, strides, strict=True)),
        tuple(sum(c * s for c, s in zip(step, strides, strict=True)) for step in steps),
        block.target_start,
        block.target_strides,
    )


def _row_by_row(
    block: Block, shape: tuple[int, ...], strides: tuple[int, ...], base: int, row: int
) -> Iterator[Block]:
    """Tell rows apart: first by splitting a dimension of whole rows, else one by one."""
    for k, (n, s) in enumerate(zip(block.shape, block.source_strides, strict=True)):
        count = row // s if s and row % s == 0 else 0
        if 1 < count < n and n % count == 0 and block.source_start // s % count == 0:
            outer, target = block.source_strides[:k], block.target_strides[k]
            split = Block(
                (*block.shape[:k], n // count, count, *block.shape[k + 1 :]),
                block.source_start,
                (*outer, row, s, *block.source_strides[k + 1 :]),
                block.target_start,
                (*block.target_strides[:k], target * count, *block.target_strides[k:]),
            )
            if split.shape != block.shape:
                yield from restride(split, shape, strides, base)
                return
    lo, hi = block.source_span
    for at in range(lo // row * row, hi, row):
        for part in clip(block, "source", at, at + row):
            yield from restride(part, shape, strides, base)
