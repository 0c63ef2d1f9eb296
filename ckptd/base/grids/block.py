"""Regions and blocks: where a box of a tensor lies in a buffer, one strided copy between two.

In it: `Templates`, the cache that keeps plans up to a weight.

A region is the one thing the planner understands on either side. A chunk on disk, a live local
tensor, a slice of a flat optimizer bucket: each is a short list of regions of one buffer. Where two
regions share elements, a block says which bytes go where. Plans of many blocks are kept as
`Templates`.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ckptd.base.grids.grid import Piece, reach_of, strides_of
from ckptd.types import Box


class Region(msgspec.Struct, frozen=True):
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
        return _span(self.box.shape, self.start, self.strides)


class Fill(NamedTuple):
    """Places of a buffer that hold a value: all ``start + i0*s0 + i1*s1 + ...``.

    Attributes
    ----------
    steps
        ``(count, stride)`` of each dimension, in elements.
    start
        Position of the first.
    value
        What they hold.
    """

    steps: tuple[tuple[int, int], ...]
    start: int
    value: float

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(n for n, _ in self.steps)


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


class Block(msgspec.Struct, frozen=True):
    """Copy ``source[source_start + i . source_strides]`` to ``target[target_start + i . ...]``.

    In lowest terms: dimensions of size one are dropped, and neighbours that step alike on both
    sides are one dimension. A single element has the shape ``()``. Everything is in elements.
    """

    shape: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def run_length(self) -> int:
        """Number of elements in one run that is contiguous on both sides."""
        if self.shape and self.source_strides[-1] == 1 == self.target_strides[-1]:
            return self.shape[-1]
        return 1

    @property
    def source_span(self) -> tuple[int, int]:
        """First source element touched, and one past the last."""
        return _span(self.shape, self.source_start, self.source_strides)

    @property
    def target_span(self) -> tuple[int, int]:
        """First target element touched, and one past the last."""
        return _span(self.shape, self.target_start, self.target_strides)

    def moved(self, source: int = 0, target: int = 0) -> Block:
        """Return the copy between places that are so many elements further on."""
        return Block(
            self.shape,
            self.source_start + source,
            self.source_strides,
            self.target_start + target,
            self.target_strides,
        )

    def turned(self) -> Block:
        """Return the copy the other way round."""
        return Block(
            self.shape,
            self.target_start,
            self.target_strides,
            self.source_start,
            self.source_strides,
        )


def _span(shape: tuple[int, ...], start: int, strides: tuple[int, ...]) -> tuple[int, int]:
    return start, start + reach_of(shape, strides)


def intersect(a: Region, b: Region) -> Block | None:
    """Return the copy from region `a`'s buffer to region `b`'s, or None where they do not meet.

    Raises
    ------
    ValueError
        The two have different numbers of dimensions.
    """
    if len(a.strides) != len(b.strides):
        raise ValueError(f"regions of {len(a.strides)} and {len(b.strides)} dimensions")
    # One pass from the innermost dimension out: the planner does this for every flat range.
    source, target = a.start, b.start
    shape: tuple[int, ...] = ()
    source_strides: tuple[int, ...] = ()
    target_strides: tuple[int, ...] = ()
    for d in range(len(a.strides) - 1, -1, -1):
        lo_a, lo_b, sa, sb = a.box.offset[d], b.box.offset[d], a.strides[d], b.strides[d]
        lo = max(lo_a, lo_b)
        n = min(lo_a + a.box.shape[d], lo_b + b.box.shape[d]) - lo
        if n <= 0:
            return None
        source += (lo - lo_a) * sa
        target += (lo - lo_b) * sb
        if n == 1:
            continue
        if shape and sa == source_strides[0] * shape[0] and sb == target_strides[0] * shape[0]:
            shape = (n * shape[0], *shape[1:])
        else:
            shape = (n, *shape)
            source_strides = (sa, *source_strides)
            target_strides = (sb, *target_strides)
    return Block(shape, source, source_strides, target, target_strides)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Templates(Generic[K, V]):
    """Least recently used values up to a total weight; safe to share between threads.

    A count would not bound memory: one plan may have one block, another sixteen thousand.

    Parameters
    ----------
    limit
        Largest total weight. A value heavier than a quarter of it is not kept at all, so that
        one giant does not push out everything else.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._weight = 0

    def get(self, key: K) -> V | None:
        """Return the value kept for `key`, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, *, weight: int) -> None:
        """Keep `value`, and forget the longest unused ones beyond the limit."""
        if weight > self._limit // 4:
            return
        with self._lock:
            _, old = self._kept.pop(key, (None, 0))
            self._kept[key] = (value, weight)
            self._weight += weight - old
            while self._weight > self._limit:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._weight -= dropped

    @property
    def weight(self) -> int:
        """Weight of everything kept."""
        with self._lock:
            return self._weight

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._weight = 0
