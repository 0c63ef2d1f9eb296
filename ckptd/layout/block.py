"""Blocks: one affine strided copy between two buffers, and how it falls into byte runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ckptd.layout.region import Region

__all__ = ["Block", "intersect"]


@dataclass(frozen=True, slots=True)
class Block:
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

    def source_runs(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield ``(offset, length)`` in bytes of each contiguous run of the source.

        In rising order, and as long as they get for a row-major source. There may be as many as
        elements, so ask `source_run_count` first where that matters.
        """
        dims, run = self._source_dims()
        length = run * itemsize
        base = self.source_start
        ranges = [range(0, n * stride, stride) for n, stride in dims]
        for steps in product(*ranges):
            yield (base + sum(steps)) * itemsize, length

    @property
    def source_run_count(self) -> int:
        """Number of runs that `source_runs` yields."""
        count = 1
        for n, _ in self._source_dims()[0]:
            count *= n
        return count

    def _source_dims(self) -> tuple[list[tuple[int, int]], int]:
        """``(size, stride)`` outermost first, as the source alone sees them, and the run length."""
        dims: list[tuple[int, int]] = []
        run = 1
        for stride, n in sorted(zip(self.source_strides, self.shape, strict=True)):
            if not dims and stride == run:
                run *= n
            else:
                dims.append((n, stride))
        return dims[::-1], run


def _span(shape: tuple[int, ...], start: int, strides: tuple[int, ...]) -> tuple[int, int]:
    return start, start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


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
