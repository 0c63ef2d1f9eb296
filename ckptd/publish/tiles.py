"""Tiles: the parts of a tensor that have one scale each: maxima and quantization on the server.

A server knows no layout. A part that it is asked for says itself where its dimensions enter the
next tile, and so the server finds the largest magnitude of each tile's share, and quantizes the
part with the scales that the worker has made of the shares of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.grids.grid import strides_of
from ckptd.publish.messages import TileSteps
from ckptd.reshard.changes import scale_down

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_Dim = tuple[int, int, int]
"""Positions, and how far two of them lie apart in the source and in the target."""


def _axis(stride: int, rows: Sequence[int]) -> int:
    """Return the axis along which a dimension of this stride runs; -1: along several at once."""
    axis = next(c for c, row in enumerate(rows) if row <= stride)
    return axis if stride % rows[axis] == 0 else -1


def along_axes(block: Block, shape: tuple[int, ...]) -> Iterator[Block]:
    """Cut a copy so that each dimension runs along one axis of the target, each along another.

    A single element has one dimension.

    Parameters
    ----------
    block
        The copy.
    shape
        Of the target.
    """
    rows = strides_of(shape)
    dims = tuple(zip(block.shape, block.source_strides, block.target_strides, strict=True))
    waiting = [(block.source_start, block.target_start, dims)]
    while waiting:
        source, target, dims = waiting.pop()
        dims = tuple(sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]))
        parts = _parted(target, dims, shape, rows)
        if parts is None:
            dims = dims or ((1, 1, 1),)
            yield Block(
                tuple(n for n, _, _ in dims),
                source,
                tuple(s for _, s, _ in dims),
                target,
                tuple(t for _, _, t in dims),
            )
            continue
        waiting += [(source + s, target + t, found) for s, t, found in reversed(parts)]


def _parted(
    target: int, dims: tuple[_Dim, ...], shape: tuple[int, ...], rows: tuple[int, ...]
) -> list[tuple[int, int, tuple[_Dim, ...]]] | None:
    """Return the parts of a copy that is not yet as it has to be: how far they start, and dims."""
    seen: dict[int, int] = {}
    for i, (n, s, t) in enumerate(dims):
        axis = _axis(t, rows)
        others = dims[:i] + dims[i + 1 :]
        if axis < 0:
            return [(j * s, j * t, others) for j in range(n)]
        if axis in seen:
            k = seen[axis]
            outer_n, outer_s, outer_t = dims[k]
            rest = dims[:k] + dims[k + 1 :]
            if (outer_s, outer_t) == (n * s, n * t):
                return [(0, 0, tuple((outer_n * n, s, t) if d == dims[i] else d for d in rest))]
            return [(j * outer_s, j * outer_t, rest) for j in range(outer_n)]
        seen[axis] = i
        parts = _carried(target, (n, s, t), shape[axis], rows[axis])
        if parts is not None:
            return [(at * s, at * t, others + new) for at, new in parts]
    return None


def _carried(
    target: int, dim: _Dim, extent: int, row: int
) -> list[tuple[int, tuple[_Dim, ...]]] | None:
    """Return the parts of a dimension that runs over the end of its axis, and where they begin."""
    n, s, t = dim
    step, first = t // row, target // row % extent
    if first + step * (n - 1) < extent:
        return None
    here = -(-(extent - first) // step)
    if extent % step:
        return [(0, ((here, s, t),)), (here, ((n - here, s, t),))]
    period = extent // step
    head = 0 if here == period else here
    count, tail = divmod(n - head, period)
    whole = ((count, s * period, row * extent), (period, s, t))
    parts = [(0, head, ((head, s, t),)), (head, count, whole), (n - tail, tail, ((tail, s, t),))]
    return [(at, new) for at, size, new in parts if size]


def tiles_of(
    block: Block, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[TileSteps, ...], tuple[int, ...]]:
    """Return how a copy runs through the tiles of its target, and along which axes.

    Parameters
    ----------
    block
        The copy, or a part of one, that `along_axes` gave.
    shape, sizes
        Of the target, and of a tile.
    """
    rows = strides_of(shape)
    axes = tuple(_axis(t, rows) for t in block.target_strides)
    steps = tuple(
        TileSteps(block.target_start // rows[c] % shape[c], t // rows[c], min(sizes[c], shape[c]))
        for c, t in zip(axes, block.target_strides, strict=True)
    )
    return steps, axes


def tile_cuts(count: int, tile: TileSteps) -> tuple[I64, I64]:
    """Return where a dimension of so many positions enters a tile, and which one it is."""
    numbers = (np.arange(count, dtype=np.int64) * tile.step + tile.first) // tile.size
    cuts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return cuts, numbers[cuts]


def tile_maxima(values: NDArray[Any], tiles: Sequence[TileSteps]) -> F32:
    """Return the largest magnitude in each tile's share of a part; not finite if a value is not."""
    found: F32 = np.abs(values.astype(np.float32))
    for d, tile in enumerate(tiles):
        found = np.maximum.reduceat(found, tile_cuts(values.shape[d], tile)[0], axis=d)
    return found


def quantize_tiles(
    values: NDArray[Any],
    tiles: Sequence[TileSteps],
    scales: F32,
    limit: float,
    out: NDArray[Any],
) -> None:
    """Quantize a part with the scale of each tile.

    Parameters
    ----------
    values, tiles
        The part, and how its dimensions run through tiles.
    scales
        Of the tiles' shares in it, in their order.
    limit
        See `ckptd.reshard.changes.largest`.
    out
        What is written, row-major.
    """
    cuts = [tile_cuts(n, t)[0] for n, t in zip(values.shape, tiles, strict=True)]
    factors = scales.reshape(tuple(len(c) for c in cuts))
    for d, at in enumerate(cuts):
        factors = np.repeat(factors, np.diff(at, append=values.shape[d]), axis=d)
    # Scales come from outside, too: what is made of a 0 is not our values.
    with np.errstate(all="ignore"):
        scale_down(values.astype(np.float32), factors, limit, out.reshape(values.shape))


def tile_counts(shape: Sequence[int], tiles: Sequence[TileSteps]) -> int:
    """Return how many tiles a part has a share in."""
    return math.prod(len(tile_cuts(n, t)[0]) for n, t in zip(shape, tiles, strict=True))
