"""Which intervals of a dimension each mesh coordinate holds, computed as arrays.

In it: the most segments.

The stored sequence is the one without splits. A split takes a contiguous part of what is left, so
what one coordinate holds is a rising list of intervals, the *segments*. They are computed for all
coordinates at once, as arrays: a mesh of 16,384 ranks costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from ckptd.base.grids.grid import Axis
from ckptd.errors import UsageError
from ckptd.lay.boxes import padded, sequence
from ckptd.lay.resolve import Ints, ValueScope, assigned_runs, parts
from ckptd.lay.syntax.tree import Assigned, Dim, Pad, Product, Split, Sum

_MAX_SEGMENTS = 2**24


@dataclass(frozen=True, eq=False)
class Held:
    """Parts of a dimension that a list of coordinates holds.

    Attributes
    ----------
    extent
        Length of the stored sequence.
    lengths
        Length of the local sequence of each coordinate. Fills inside of a split have no place in
        the stored sequence and no segment, so segments may leave out local positions.
    who, local, stored, size
        The segments: index of the coordinate, first position in its local and in the stored
        sequence, number of entries. By coordinate, then by position.
    """

    extent: int
    lengths: Ints
    who: Ints
    local: Ints
    stored: Ints
    size: Ints

    @cached_property
    def cuts(self) -> Ints:
        """Positions of the stored sequence where any segment begins or ends."""
        ends = np.array([0, self.extent], dtype=np.int64)
        return np.unique(np.concatenate((ends, self.stored, self.stored + self.size)))

    @cached_property
    def axis(self) -> Axis:
        """The cells between the cuts."""
        sizes = np.diff(self.cuts)
        if not len(sizes):
            return Axis(((0, 1),))
        firsts = np.concatenate(([0], np.flatnonzero(np.diff(sizes)) + 1))
        counts = np.diff(np.append(firsts, len(sizes)))
        return Axis(tuple(zip(sizes[firsts].tolist(), counts.tolist(), strict=True)))

    @cached_property
    def cells(self) -> tuple[Ints, Ints, Ints]:
        """Coordinate, cell and local position for each cell that a coordinate holds."""
        first = np.searchsorted(self.cuts, self.stored)
        count = np.searchsorted(self.cuts, self.stored + self.size) - first
        segment = np.repeat(np.arange(len(first)), count)
        cell = first[segment] + _within(count)
        local = self.local[segment] + self.cuts[cell] - self.stored[segment]
        return self.who[segment], cell.astype(np.int64), local

    @cached_property
    def _first_cells(self) -> Ints:
        numbers = np.arange(len(self.lengths) + 1)
        return np.searchsorted(self.cells[0], numbers).astype(np.int64)

    def cells_of(self, who: int) -> tuple[Ints, Ints]:
        """Return the cells of one coordinate and their local positions, in order."""
        rows = slice(int(self._first_cells[who]), int(self._first_cells[who + 1]))
        return self.cells[1][rows], self.cells[2][rows]

    @cached_property
    def _holders(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.cells[1], kind="stable")
        numbers = np.arange(self.axis.ncells + 1)
        return self.cells[0][order], np.searchsorted(self.cells[1][order], numbers)

    def holders(self, cell: int) -> Ints:
        """Return the coordinates that hold a cell; none for a cell of fills."""
        who, first = self._holders
        return who[first[cell] : first[cell + 1]]


def split_axes(dim: Dim) -> tuple[str, ...]:
    """Return the mesh axes that a dimension is split over, in textual order."""
    match dim:
        case Split():
            return (*split_axes(dim.inner), dim.axis)
        case Product():
            found = [a for p in dim.parts for a in split_axes(p)]
        case Sum():
            found = [a for b in dim.branches for a in split_axes(b.dim)]
        case Pad():
            return split_axes(dim.inner)
        case _:
            return ()
    return tuple(dict.fromkeys(found))


def held(dim: Dim, scope: ValueScope, coordinates: Mapping[str, Ints], count: int) -> Held:
    """Return what each of `count` coordinates holds of a dimension.

    Parameters
    ----------
    dim
        The dimension.
    scope
        Sizes.
    coordinates
        For each mesh axis that the dimension is split over, `count` coordinates.

    Raises
    ------
    UsageError
        As `ckptd.lay.boxes.sequence`, or there would be absurdly many segments.
    MismatchError
        A split does not fit the length.
    """
    if not split_axes(dim):
        return _whole(sequence(dim, scope).length, count)
    match dim:
        case Split():
            return _split(held(dim.inner, scope, coordinates, count), dim, scope, coordinates)
        case Pad():
            return _pad(held(dim.inner, scope, coordinates, count), dim, scope)
        case Sum():
            return _sum([held(b.dim, scope, coordinates, count) for b in dim.branches])
        case Product():
            found = [held(p, scope, coordinates, count) for p in dim.parts]
            return reduce(lambda inner, outer: _product(outer, inner), reversed(found))
    raise UsageError("_ and ... only stand in a default", kind="lay-rule")


def _whole(n: int, count: int) -> Held:
    who = np.arange(count if n else 0, dtype=np.int64)
    zero = np.zeros_like(who)
    return Held(n, np.full(count, n, dtype=np.int64), who, zero, zero, np.full_like(who, n))


def _split(inner: Held, dim: Split, scope: ValueScope, coordinates: Mapping[str, Ints]) -> Held:
    """Clip the segments to each coordinate's part of its local sequence."""
    extent = scope.extent(dim.axis)
    if isinstance(dim.how, Assigned):
        return _assigned(inner, dim.how, extent, coordinates[dim.axis])
    start, stop = parts(inner.lengths, dim.how, extent, coordinates[dim.axis], scope)
    lo = np.maximum(inner.local, start[inner.who])
    hi = np.minimum(inner.local + inner.size, stop[inner.who])
    keep = hi > lo
    who, lo, hi = inner.who[keep], lo[keep], hi[keep]
    stored = inner.stored[keep] + lo - inner.local[keep]
    return Held(inner.extent, stop - start, who, lo - start[who], stored, hi - lo)


def _assigned(inner: Held, how: Assigned, extent: int, coordinates: Ints) -> Held:
    """Cut the segments where the coordinate changes, and keep each one's own pieces."""
    wanted = len(how.coordinates)
    # A sequence of another length is refused there.
    length = next((n for n in inner.lengths.tolist() if n != wanted), wanted)
    whose, start, size, number = assigned_runs(length, how, extent)
    lengths = np.zeros(extent, dtype=np.int64)
    np.add.at(lengths, whose, size)
    lengths = lengths[coordinates]
    if len(inner.who) == len(coordinates) and bool((inner.size == inner.lengths).all()):
        # Each has all of it: no segment has to be cut.
        order = np.argsort(whose, kind="stable")
        first = np.searchsorted(whose[order], coordinates)
        count = np.searchsorted(whose[order], coordinates, side="right") - first
        who = np.repeat(np.arange(len(coordinates)), _bounded(count))
        run = order[first[who] + _within(count)]
        stored = inner.stored[who] + start[run]
        return _merged(inner.extent, lengths, who, number[run], stored, size[run])
    stop = start + size
    first = np.searchsorted(start, inner.local, side="right") - 1
    count = np.searchsorted(start, inner.local + inner.size) - first
    segment = np.repeat(np.arange(len(first)), _bounded(count))
    run = first[segment] + _within(count)
    keep = whose[run] == coordinates[inner.who[segment]]
    segment, run = segment[keep], run[keep]
    lo = np.maximum(inner.local[segment], start[run])
    hi = np.minimum(inner.local[segment] + inner.size[segment], stop[run])
    return _merged(
        inner.extent,
        lengths,
        inner.who[segment],
        number[run] + lo - start[run],
        inner.stored[segment] + lo - inner.local[segment],
        hi - lo,
    )


def _pad(inner: Held, dim: Pad, scope: ValueScope) -> Held:
    """Fills that all coordinates share have a place in the stored sequence; others have none."""
    longer = np.array([padded(n, dim, scope) for n in inner.lengths.tolist()], dtype=np.int64)
    extent = padded(inner.extent, dim, scope)
    return Held(extent, longer, inner.who, inner.local, inner.stored, inner.size)


def _sum(found: list[Held]) -> Held:
    """One after the other."""
    local = np.cumsum([h.lengths for h in found], axis=0) - [h.lengths for h in found]
    stored = np.cumsum([h.extent for h in found]) - [h.extent for h in found]
    who = np.concatenate([h.who for h in found])
    order = np.argsort(who, kind="stable")
    return _merged(
        int(sum(h.extent for h in found)),
        np.sum([h.lengths for h in found], axis=0),
        who[order],
        np.concatenate([h.local + at[h.who] for h, at in zip(found, local, strict=True)])[order],
        np.concatenate([h.stored + at for h, at in zip(found, stored, strict=True)])[order],
        np.concatenate([h.size for h in found])[order],
    )


def _product(outer: Held, inner: Held) -> Held:
    """All combinations: whole rows stay in one segment, others are segments for each row."""
    extent, lengths = outer.extent * inner.extent, outer.lengths * inner.lengths
    n = inner.extent
    same = len(inner.who) == len(inner.lengths) and bool((inner.size == n).all())
    if same and bool((inner.lengths == n).all()):
        scaled = (v * n for v in (outer.local, outer.stored, outer.size))
        return Held(extent, lengths, outer.who, *scaled)
    segment = np.repeat(np.arange(len(outer.who)), _bounded(outer.size))
    step = _within(outer.size)
    who = outer.who[segment]
    row_local, row_stored = outer.local[segment] + step, outer.stored[segment] + step
    first = np.searchsorted(inner.who, np.arange(len(inner.lengths) + 1))
    count = np.diff(first)[who]
    row = np.repeat(np.arange(len(who)), _bounded(count))
    at = first[who][row] + _within(count)
    return _merged(
        extent,
        lengths,
        who[row],
        row_local[row] * inner.lengths[who[row]] + inner.local[at],
        row_stored[row] * n + inner.stored[at],
        inner.size[at],
    )


def _merged(extent: int, lengths: Ints, who: Ints, local: Ints, stored: Ints, size: Ints) -> Held:
    """Join segments that go on in both sequences."""
    if not len(who):
        return Held(extent, lengths, who, local, stored, size)
    apart = np.diff(who) != 0
    apart |= (local[1:] != local[:-1] + size[:-1]) | (stored[1:] != stored[:-1] + size[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    total = np.add.reduceat(size, first)
    return Held(extent, lengths, who[first], local[first], stored[first], total)


def _within(counts: Ints) -> Ints:
    """Return 0 to n - 1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def _bounded(counts: Ints) -> Ints:
    total = int(counts.sum())
    if total > _MAX_SEGMENTS:
        raise UsageError("a dimension is cut into too many segments", kind="lay-rule", found=total)
    return counts
