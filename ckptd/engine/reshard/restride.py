"""A copy out of a cell, as a copy out of the larger tensor that the cell is a box of."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.engine.reshard.clip import clip
from ckptd.layout.block import Block
from ckptd.layout.grid import coordinates_of, strides_of

__all__ = ["restride"]


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
