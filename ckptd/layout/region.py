"""Regions: where a box of a tensor lies in a buffer.

A region is the one thing the planner understands on either side. A chunk on disk, a live local
tensor, a slice of a flat optimizer bucket: each is a short list of regions of one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.layout.grid import Piece, strides_of
from ckptd.types import Box

__all__ = ["Region", "box_region", "flat_regions", "piece_regions"]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor and its place in a buffer.

    Attributes
    ----------
    box
        The box, in tensor coordinates.
    start
        Position of the box's first element in its buffer, in elements.
    strides
        Distance in the buffer between neighbours along each dimension, in elements.
    """

    box: Box
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    @property
    def span(self) -> tuple[int, int]:
        """First element of the buffer that the region touches, and one past the last."""
        if not self.box.numel:
            return self.start, self.start
        reach = sum((n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True))
        return self.start, self.start + reach + 1


def box_region(box: Box, strides: tuple[int, ...] | None = None, start: int = 0) -> Region:
    """Return the region of a local tensor that holds `box`.

    Parameters
    ----------
    box
        What the local tensor holds, in tensor coordinates.
    strides
        The local tensor's strides in elements; row-major when left out.
    start
        Position of its first element in the buffer, in elements.

    Raises
    ------
    ValueError
        There is not one stride per dimension, or one of them or `start` is negative.
    """
    if strides is None:
        strides = strides_of(box.shape)
    if len(strides) != len(box.shape) or start < 0 or any(s < 0 for s in strides):
        raise ValueError(f"start {start} and strides {strides} do not fit a box of {box.shape}")
    return Region(box, start, strides)


def flat_regions(cell: Box, lo: int, hi: int) -> list[Region]:
    """Return the regions of a buffer that holds row-major elements ``[lo, hi)`` of `cell`.

    At most ``2 * ndim - 1`` of them, in buffer order: a ragged head, whole slices, a ragged tail.

    Raises
    ------
    ValueError
        The range does not lie in the cell.
    """
    if not 0 <= lo <= hi <= cell.numel:
        raise ValueError(f"elements [{lo}, {hi}) of a cell of {cell.numel}")
    strides = strides_of(cell.shape)
    regions = []
    at = lo
    while at < hi:
        box = _longest_box(cell.shape, strides, at, hi)
        offset = tuple(o + c for o, c in zip(box.offset, cell.offset, strict=True))
        regions.append(Region(Box(offset, box.shape), at - lo, strides))
        at += box.numel
    return regions


def _longest_box(shape: tuple[int, ...], strides: tuple[int, ...], at: int, hi: int) -> Box:
    """Return the largest box of whole slices that starts at flat element `at` and ends by `hi`."""
    offset = []
    rest = at
    level = len(shape)
    for dim, stride in enumerate(strides):
        coordinate, rest = divmod(rest, stride)
        offset.append(coordinate)
        if rest == 0 and stride <= hi - at:
            level = dim
            break
    if level == len(shape):  # 0-d: the one element
        return Box((), ())
    count = min((hi - at) // strides[level], shape[level] - offset[level])
    inner = len(shape) - level - 1
    box_shape = (*(1,) * level, count, *shape[level + 1 :])
    return Box((*offset, *(0,) * inner), box_shape)


def piece_regions(piece: Piece) -> list[Region]:
    """Return the regions of the buffer that holds exactly this piece.

    One for a whole cell, at most ``2 * ndim - 1`` for a flat range, none for an empty piece.
    """
    if piece.flat is None:
        return [box_region(piece.box)] if piece.box.numel else []
    return flat_regions(piece.box, *piece.flat)
