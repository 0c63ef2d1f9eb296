"""Flat buffers: packs tensors, closes buckets, alignment; which elements lie where.

A buffer packs the rank-local tensors of a group, or single ones, one after the other; the ranks
along the flat's mesh axis hold a part of it each. Everything here is linear in the tensors of one
buffer, and knows nothing but their numbers of elements.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckptd.base.grids.grid import MAX_EXTENT, Axis
from ckptd.errors import UsageError
from ckptd.lay.resolve import Ints
from ckptd.types import Box


class FlatSlot(NamedTuple):
    """Where a rank-local tensor lies.

    Attributes
    ----------
    buffer
        Number of the buffer among those of its ``flat`` on this rank.
    offset, numel
        Its elements in the buffer, in row-major order.
    length
        Number of elements of the whole buffer, over all ranks of the flat's axis.
    """

    buffer: int
    offset: int
    numel: int
    length: int


class Packed(NamedTuple):
    """Tensors in buffers."""

    slots: tuple[FlatSlot, ...]
    lengths: tuple[int, ...]


@lru_cache(maxsize=4096)
def pack(numels: tuple[int, ...], limit: int | None, start: int, end: int) -> Packed:
    """Pack tensors into buffers, in order.

    Parameters
    ----------
    numels
        Number of elements of each.
    limit
        A buffer is closed once it holds that many elements, those left out between tensors
        counted; 0: each tensor has its own; None: there is one buffer.
    start, end
        Each tensor starts at a multiple of `start`; a buffer's length is one of `end`.

    Raises
    ------
    UsageError
        `start` or `end` is below one, or a buffer is too large.
    """
    if start < 1 or end < 1:
        raise UsageError(
            "the alignment of a flat is missing", kind="lay-rule", found=f"start {start}, end {end}"
        )
    groups: list[list[int]] = []
    ends: list[int] = []
    is_open = False
    for numel in numels:
        if not is_open:
            groups.append([])
            ends.append(0)
        at = -(-ends[-1] // start) * start
        groups[-1].append(at)
        ends[-1] = at + numel
        is_open = limit is None or (limit > 0 and ends[-1] < limit)
    lengths = tuple(-(-n // end) * end for n in ends)
    if max(lengths, default=0) > MAX_EXTENT:
        raise UsageError("a buffer of a flat is too large", kind="lay-rule")
    places = [(b, at) for b, found in enumerate(groups) for at in found]
    slots = tuple(
        FlatSlot(b, at, numel, lengths[b]) for (b, at), numel in zip(places, numels, strict=True)
    )
    return Packed(slots, lengths)


def cell_cuts(cell: Box, shape: tuple[int, ...], positions: Ints) -> Ints:
    """Return how many elements of a box of a tensor come before some row-major positions.

    Parameters
    ----------
    cell
        The box, in elements of the tensor.
    shape
        The tensor's shape.
    positions
        In row-major elements of the tensor, up to and including its number of elements.
    """
    count = np.zeros_like(positions)
    # Up to which dimension a position runs inside of the box.
    inside = np.ones(len(positions), dtype=bool)
    left = positions
    stride, inner = math.prod(shape), cell.numel
    if not inner:
        return count
    for n, lo, size in zip(shape, cell.offset, cell.shape, strict=True):
        stride //= n
        inner //= size
        at, left = np.divmod(left, stride)
        count += np.where(inside, np.clip(at - lo, 0, size) * inner, 0)
        inside &= (at >= lo) & (at < lo + size)
    # What is left is a tensor without dimensions: before its one element, or behind it.
    return np.where(inside & (left > 0), count + 1, count) if not shape else count


def flat_axis(cuts: Ints) -> tuple[Axis, Ints]:
    """Return the flat cut of a cell, and for each of its ranges whose it is.

    Parameters
    ----------
    cuts
        Rising positions in the cell: where the range of each coordinate begins, and the end.
    """
    sizes = np.diff(cuts)
    whose = np.flatnonzero(sizes)
    if not len(whose):
        return Axis(((0, 1),)), np.zeros(1, dtype=np.int64)
    return Axis.from_sizes(sizes[whose].tolist()), whose.astype(np.int64)


def shares(numel: int, offset: int, starts: Ints) -> Ints:
    """Return where the parts of a buffer begin in a tensor that lies in it, and its end.

    Parameters
    ----------
    numel, offset
        The tensor's place in the buffer.
    starts
        Where the parts of the buffer begin, and where the last one ends.
    """
    return np.clip(starts - offset, 0, numel)
