"""How mesh dimensions cut one tensor dimension, one after the other, as torch.chunk does.

In it: the most parts.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.grid import Axis

_MAX_PARTS = 2**26
"""Most parts a dimension is cut into; a mesh is real, so more is a mistake and not a model."""

_Ints = NDArray[np.int64]


class CutStep(NamedTuple):
    """One cut: over the `parts` ranks of mesh dimension `axis`, with torch's split factor."""

    axis: int
    parts: int
    factor: int


class DimSegment(NamedTuple):
    """Elements ``[start, start + size)`` of the dimension, at `local` in the local tensor."""

    start: int
    size: int
    local: int


class DimCut(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A tensor dimension after all its cuts.

    A *share* is what one combination of coordinates on the cutting mesh dimensions holds; shares
    are numbered row-major in the order of the cuts.

    Attributes
    ----------
    extent
        Length of the dimension.
    steps
        The cuts, in order.
    shares, starts, sizes
        The segments, share by share and in local order within a share.
    """

    extent: int
    steps: tuple[CutStep, ...]
    shares: _Ints
    starts: _Ints
    sizes: _Ints

    @cached_property
    def mesh_axes(self) -> tuple[int, ...]:
        """The mesh dimensions that cut, in rising order."""
        return tuple(sorted(s.axis for s in self.steps))

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        return np.argsort(self.starts, kind="stable")

    @cached_property
    def axis(self) -> Axis:
        """The cells: the segments of all shares, from left to right."""
        sizes = self.sizes[self._order]
        firsts = np.concatenate(([0], np.flatnonzero(np.diff(sizes)) + 1)).astype(np.int64)
        if not len(sizes):
            return Axis(((0, 1),))
        counts = np.diff(np.append(firsts, len(sizes)))
        return Axis(tuple(zip(sizes[firsts].tolist(), counts.tolist(), strict=True)))

    @cached_property
    def coordinates(self) -> _Ints:
        """One row per cell: its holder on `mesh_axes`. An empty dimension's cell: the first."""
        shares = self.shares[self._order] if len(self.shares) else np.zeros(1, dtype=np.int64)
        columns = np.empty((len(shares), len(self.steps)), dtype=np.int64)
        for step in reversed(self.steps):
            shares, columns[:, self.mesh_axes.index(step.axis)] = np.divmod(shares, step.parts)
        columns.flags.writeable = False
        return columns

    @cached_property
    def _first_segments(self) -> _Ints:
        count = math.prod(s.parts for s in self.steps)
        return np.searchsorted(self.shares, np.arange(count + 1)).astype(np.int64)

    def _rows(self, coordinate: tuple[int, ...]) -> slice:
        """Rows of the segment table that the rank at the mesh `coordinate` holds."""
        share = 0
        for step in self.steps:
            share = share * step.parts + coordinate[step.axis]
        return slice(int(self._first_segments[share]), int(self._first_segments[share + 1]))

    def length(self, coordinate: tuple[int, ...]) -> int:
        """Length of the dimension in the local tensor of the rank at `coordinate`."""
        return int(self.sizes[self._rows(coordinate)].sum())

    def segments(self, coordinate: tuple[int, ...]) -> list[DimSegment]:
        """Return what the rank at `coordinate` holds, in local order."""
        rows = self._rows(coordinate)
        out: list[DimSegment] = []
        local = 0
        for start, size in zip(self.starts[rows].tolist(), self.sizes[rows].tolist(), strict=True):
            out.append(DimSegment(start, size, local))
            local += size
        return out


@lru_cache(maxsize=4096)
def cut_dim(extent: int, steps: tuple[CutStep, ...]) -> DimCut:
    """Cut a dimension of length `extent` by `steps`, in order.

    Raises
    ------
    ValueError
        There would be absurdly many parts.
    """
    shares = np.zeros(1 if extent else 0, dtype=np.int64)
    starts = np.zeros_like(shares)
    sizes = np.full_like(shares, extent)
    lengths = np.array([extent], dtype=np.int64)
    for step in steps:
        shares, starts, sizes, lengths = _apply(step, starts, sizes, lengths)
    return DimCut(extent, steps, shares, starts, sizes)


def _apply(
    step: CutStep, starts: _Ints, sizes: _Ints, lengths: _Ints
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Cut every share into `step.parts` shares.

    All shares are laid on one line, one after the other. Their segments tile that line, and so do
    the parts to come, so both cut points merged are the new segments; sorting by share is all
    that is left to do.
    """
    parts = _part_sizes(step, lengths)
    part_sizes = parts.reshape(-1)
    part_shares = np.broadcast_to(
        np.arange(len(lengths) * step.parts).reshape(len(lengths), 1, step.parts), parts.shape
    ).reshape(-1)
    filled = np.flatnonzero(part_sizes)
    part_at = _starts(part_sizes[filled])
    segment_at = _starts(sizes)
    at = np.union1d(part_at, segment_at)
    segment = np.searchsorted(segment_at, at, side="right") - 1
    part = np.searchsorted(part_at, at, side="right") - 1
    new_shares = part_shares[filled[part]]
    order = np.argsort(new_shares, kind="stable")
    new_starts = starts[segment] + at - segment_at[segment]
    new_sizes = np.diff(np.append(at, int(sizes.sum())))
    lengths = parts.sum(axis=1).reshape(-1)
    return *_joined(new_shares[order], new_starts[order], new_sizes[order]), lengths


def _part_sizes(step: CutStep, lengths: _Ints) -> _Ints:
    """Part sizes, indexed by share, by one of `factor` chunks, and by rank: `torch.chunk` twice."""
    # More chunks than elements are empty ones: leave them out, the rest comes out the same.
    factor = min(step.factor, max(1, int(lengths.max())))
    if len(lengths) * factor * step.parts > _MAX_PARTS:
        raise ValueError(f"{len(lengths) * factor * step.parts} parts of one dimension")
    chunk = _chunk(lengths[:, None], factor)
    return _chunk(chunk[:, :, None], step.parts)


def _chunk(lengths: _Ints, count: int) -> _Ints:
    """Sizes of `count` chunks along a new last axis: ceil-sized, then one short, then empty."""
    size = -(-lengths // count)
    left = lengths - np.arange(count, dtype=np.int64) * size
    return np.clip(left, 0, size)


def _starts(sizes: _Ints) -> _Ints:
    """Where things of these sizes start, laid end to end."""
    return np.cumsum(sizes) - sizes


def _joined(shares: _Ints, starts: _Ints, sizes: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Join neighbours in one share that are neighbours in the dimension too."""
    if not len(shares):
        return shares, starts, sizes
    apart = (np.diff(shares) != 0) | (starts[1:] != starts[:-1] + sizes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return shares[first], starts[first], np.add.reduceat(sizes, first)
