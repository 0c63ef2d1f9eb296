"""A box of a tensor, or a range of a buffer, as parts of its families and fills.

A tensor is stored, or local to a rank; either way its dimensions are sequences. A box of it falls
into *parts*, each a box over the axes of one family, and into fills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ckptd.base.grids.block import Fill, Region, flat_regions
from ckptd.base.grids.grid import strides_of
from ckptd.lay.boxes import DimFill, Found, Run, restrict
from ckptd.lay.boxes import Sequence as Line
from ckptd.lay.resolve import Axes, Tags
from ckptd.types import Box


class BoxPart(NamedTuple):
    """A box over axes, and its place in a buffer.

    Attributes
    ----------
    tags
        Which family.
    runs
        First index and count of each axis that the dimensions run through, and the distance of
        neighbours in the buffer, in elements. Axes in the tensor's name are not here.
    start
        Position of the first element in the buffer.
    """

    tags: Tags
    runs: tuple[Run, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(r.size for r in self.runs)


class BufferParts(NamedTuple):
    """Contents of a buffer: parts of families, and fills."""

    parts: tuple[BoxPart, ...]
    fills: tuple[Fill, ...]


def box_parts(
    dims: Sequence[Line], box: Box, strides: tuple[int, ...] | None = None, start: int = 0
) -> BufferParts:
    """Return the contents of a buffer that holds a box of a tensor.

    Parameters
    ----------
    dims
        The tensor's dimensions.
    box
        In elements of the tensor.
    strides
        Of the buffer, in elements; row-major when left out.
    start
        Position of the box's first element in the buffer.
    """
    if strides is None:
        strides = strides_of(box.shape)
    parts: list[BoxPart] = []
    fills: list[Fill] = []
    found = [
        [_placed(f, lo, stride) for f in restrict(dim, lo, lo + n)]
        for dim, lo, n, stride in zip(dims, box.offset, box.shape, strides, strict=True)
    ]
    for combination in product(*found):
        at = start + sum(f.start for f in combination)
        blank = next((f for f in combination if isinstance(f, Fill)), None)
        if blank is not None:
            steps = tuple(s for f in combination for s in _steps(f))
            fills.append(Fill(steps, at, blank.value))
        else:
            whole = [f for f in combination if isinstance(f, BoxPart)]
            tags = tuple(t for f in whole for t in f.tags)
            parts.append(BoxPart(tags, tuple(r for f in whole for r in f.runs), at))
    return BufferParts(tuple(parts), tuple(fills))


def _placed(found: Found, lo: int, stride: int) -> BoxPart | Fill:
    """Move what was found in one dimension to its place in the buffer."""
    if isinstance(found, DimFill):
        steps = tuple((n, s * stride) for n, s in found.steps)
        return Fill(steps, (found.start - lo) * stride, found.value)
    moved = tuple(Run(a, i, n, s * stride) for a, i, n, s in found.runs)
    return BoxPart(found.tags, moved, (found.start - lo) * stride)


def _steps(found: BoxPart | Fill) -> tuple[tuple[int, int], ...]:
    if isinstance(found, Fill):
        return found.steps
    return tuple((r.size, r.stride) for r in found.runs if r.size > 1)


def flat_parts(dims: Sequence[Line], cell: Box, lo: int, hi: int, start: int = 0) -> BufferParts:
    """Return what a buffer holds that holds row-major elements ``[lo, hi)`` of a box.

    Parameters
    ----------
    dims
        The tensor's dimensions.
    cell
        The box, in elements of the tensor.
    lo, hi
        In row-major elements of the box.
    start
        Position of element `lo` in the buffer.

    Raises
    ------
    ValueError
        The range does not lie in the box.
    """
    found = [box_parts(dims, r.box, r.strides, start + r.start) for r in flat_regions(cell, lo, hi)]
    return BufferParts(
        tuple(p for f in found for p in f.parts), tuple(b for f in found for b in f.fills)
    )


def region(part: BoxPart, axes: Axes, indexes: Mapping[str, int]) -> Region:
    """Return a part as a region of its family.

    Parameters
    ----------
    part
        The part.
    axes
        The family's axes: those in its name, then those of its dimensions.
    indexes
        The index on each axis that the tensor's name, or the rule, says.

    Raises
    ------
    KeyError
        Nothing speaks of one of the axes.
    """
    runs = {r.axis: r for r in part.runs}
    for axis in axes:
        runs.setdefault(axis, Run(axis, indexes[axis], 1, 0) if axis in indexes else runs[axis])
    found = [runs[a] for a in axes]
    box = Box(tuple(r.start for r in found), tuple(r.size for r in found))
    return Region(box, part.start, tuple(r.stride for r in found))
