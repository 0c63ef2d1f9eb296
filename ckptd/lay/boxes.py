"""An interval of a dimension's sequence as strided boxes over axes (products, sums, padding).

`sequence` looks a dimension up once (lengths, parts of splits) into a small tree of `Sequence`
nodes; `boxes` walks it with an interval. What a dimension means is in ``docs/design/lay.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptd.base.grids.grid import MAX_EXTENT
from ckptd.errors import UsageError
from ckptd.lay.resolve import MAX_DEPTH, Tags, ValueScope, assigned_runs, evaluate, part
from ckptd.lay.syntax.tree import Assigned, Atom, Dim, One, Pad, Product, Split, Sum

_MAX_WAYS = 4096
"""Most combinations of tags of one dimension: products of sums multiply them."""


class Run(NamedTuple):
    """Indexes ``start, start + 1, ...`` of an axis, `stride` apart in the sequence."""

    axis: str
    start: int
    size: int
    stride: int


class DimBox(NamedTuple):
    """A box over axes.

    Attributes
    ----------
    tags
        The way through the sums, outermost and leftmost first.
    runs
        The axes, largest stride first.
    start
        Position of the first element in the sequence.
    """

    tags: Tags
    runs: tuple[Run, ...]
    start: int


class DimFill(NamedTuple):
    """Positions that hold a fill: a lattice behind `start`."""

    steps: tuple[tuple[int, int], ...]
    start: int
    value: float


Found: TypeAlias = DimBox | DimFill


@dataclass(frozen=True, slots=True)
class Line:
    """All indexes of an axis; of none if `axis` is empty."""

    axis: str
    length: int


@dataclass(frozen=True, slots=True)
class Cross:
    """All combinations; `inner` has for each part the number of combinations behind it."""

    parts: tuple[Sequence, ...]
    inner: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Branches ``(tag, start, sequence)``, one after the other."""

    branches: tuple[tuple[str, int, Sequence], ...]
    length: int


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a sequence, from `start` on."""

    whole: Sequence
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts of a sequence, ``(start, start in the whole, size)``, one after the other."""

    whole: Sequence
    parts: tuple[tuple[int, int, int], ...]
    length: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A sequence, then fills."""

    body: Sequence
    value: float
    length: int


Sequence: TypeAlias = Line | Cross | Chain | Window | Joined | Filled


def sequence(
    dim: Dim, scope: ValueScope, coordinates: Mapping[str, int] | None = None, depth: int = 0
) -> Sequence:
    """Look a dimension up.

    Parameters
    ----------
    dim
        The dimension.
    scope
        Sizes.
    coordinates
        Of the rank on all mesh axes that the dimension is split over; None for the stored form,
        which is without splits.

    Raises
    ------
    UsageError
        A size or a coordinate is not known, or something is too large or too deep.
    MismatchError
        A split does not fit the length.
    """
    if depth > MAX_DEPTH:
        raise _wrong("a dimension is nested too deeply")
    match dim:
        case Atom() if dim.name in scope.refined:
            return sequence(scope.refined[dim.name], scope, coordinates, depth + 1)
        case Atom():
            return Line(dim.name, scope.size(dim.name))
        case One():
            return Line("", 1)
        case Product():
            return _cross(tuple(sequence(p, scope, coordinates, depth + 1) for p in dim.parts))
        case Sum():
            found = [(b.tag, sequence(b.dim, scope, coordinates, depth + 1)) for b in dim.branches]
            return _chain(found)
        case Split():
            inner = sequence(dim.inner, scope, coordinates, depth + 1)
            return inner if coordinates is None else _window(inner, dim, scope, coordinates)
        case Pad():
            inner = sequence(dim.inner, scope, coordinates, depth + 1)
            return Filled(inner, dim.fill, padded(inner.length, dim, scope))
    raise _wrong("_ and ... only stand in a default")


def padded(n: int, dim: Pad, scope: ValueScope) -> int:
    """Return the length of a sequence of `n` after padding.

    Raises
    ------
    UsageError
        The multiple is zero, or the result too large.
    """
    multiple = evaluate(dim.multiple, scope)
    if multiple < 1:
        raise _wrong("a multiple to pad to is zero")
    return _bounded(-(-n // multiple) * multiple)


def _cross(parts: tuple[Sequence, ...]) -> Sequence:
    inner: list[int] = []
    total = 1
    for p in reversed(parts):
        inner.append(total)
        total = _bounded(total * p.length)
    found = Cross(parts, tuple(reversed(inner)), total)
    if _ways(found) > _MAX_WAYS:
        raise _wrong(f"more than {_MAX_WAYS} ways through the sums of a dimension")
    return found


def _chain(found: list[tuple[str, Sequence]]) -> Sequence:
    branches = []
    at = 0
    for tag, branch in found:
        branches.append((tag, at, branch))
        at = _bounded(at + branch.length)
    return Chain(tuple(branches), at)


def _window(
    inner: Sequence, dim: Split, scope: ValueScope, coordinates: Mapping[str, int]
) -> Sequence:
    if dim.axis not in coordinates:
        raise _wrong(f"no coordinate on mesh axis {dim.axis}")
    extent = scope.extent(dim.axis)
    if isinstance(dim.how, Assigned):
        whose, *runs, local = assigned_runs(inner.length, dim.how, extent)
        mine = np.stack((local, *runs), axis=1)[whose == coordinates[dim.axis]].tolist()
        return Joined(inner, tuple((at, lo, n) for at, lo, n in mine), sum(n for *_, n in mine))
    start, stop = part(inner.length, dim.how, extent, coordinates[dim.axis], scope)
    return Window(inner, start, stop - start)


def length(dim: Dim, coordinates: Mapping[str, int] | None, scope: ValueScope) -> int:
    """Return the number of entries of a dimension on a rank.

    Raises
    ------
    UsageError, MismatchError
        As `sequence`.
    """
    return sequence(dim, scope, coordinates).length


def boxes(
    dim: Dim, coordinates: Mapping[str, int] | None, lo: int, hi: int, scope: ValueScope
) -> list[Found]:
    """Return entries ``[lo, hi)`` of a dimension's sequence as boxes over axes, and fills.

    In a row-major sequence of d axes at most 2d - 1 boxes for each branch of a sum.

    Raises
    ------
    IndexError
        The interval does not lie in the sequence.
    UsageError, MismatchError
        As `sequence`.
    """
    found = sequence(dim, scope, coordinates)
    if not 0 <= lo <= hi <= found.length:
        raise IndexError(f"entries [{lo}, {hi}) of {found.length}")
    return restrict(found, lo, hi)


def restrict(found: Sequence, lo: int, hi: int) -> list[Found]:
    """Return `boxes` of a sequence that is looked up already; the interval must lie in it."""
    if lo >= hi:
        return []
    match found:
        case Line():
            runs = (Run(found.axis, lo, hi - lo, 1),) if found.axis else ()
            return [DimBox((), runs, lo)]
        case Window():
            inner = restrict(found.whole, lo + found.start, hi + found.start)
            return [b._replace(start=b.start - found.start) for b in inner]
        case Joined():
            return [
                b._replace(start=b.start + at - start)
                for at, start, n in found.parts
                for b in restrict(
                    found.whole, max(lo, at) + start - at, min(hi, at + n) + start - at
                )
            ]
        case Filled():
            n = found.body.length
            out = restrict(found.body, lo, min(hi, n))
            if hi > n:
                at = max(lo, n)
                out.append(DimFill(_steps([(hi - at, 1)]), at, found.value))
            return out
        case Chain():
            return [
                b._replace(start=b.start + start, tags=(tag, *b.tags))
                if isinstance(b, DimBox)
                else b._replace(start=b.start + start)
                for tag, start, branch in found.branches
                for b in restrict(branch, max(0, lo - start), min(branch.length, hi - start))
            ]
        case Cross():
            return _rows(found, 0, lo, hi)


def _rows(found: Cross, level: int, lo: int, hi: int) -> list[Found]:
    """Boxes of an interval of the combinations from part `level` on."""
    if level == len(found.parts):
        return [DimBox((), (), 0)]
    if lo >= hi:
        return []
    inner = found.inner[level]
    (first, skip), (last, more) = divmod(lo, inner), divmod(hi, inner)
    if first == last:
        return _block(found, level, first, first + 1, skip, more)
    out = _block(found, level, first, first + 1, skip, inner) if skip else []
    out += _block(found, level, first + bool(skip), last, 0, inner)
    return out + _block(found, level, last, last + 1, 0, more)


def _block(found: Cross, level: int, first: int, last: int, lo: int, hi: int) -> list[Found]:
    """Rows ``[first, last)`` of a part, with the same interval of what is behind it in each."""
    if first >= last or lo >= hi:
        return []
    inner = found.inner[level]
    behind = _rows(found, level + 1, lo, hi)
    out: list[Found] = []
    for row in restrict(found.parts[level], first, last):
        if isinstance(row, DimFill):
            steps = [(n, s * inner) for n, s in row.steps] + [(hi - lo, 1)]
            out.append(DimFill(_steps(steps), row.start * inner + lo, row.value))
        else:
            out += [_joined(row, b, inner) for b in behind]
    return out


def _joined(row: DimBox, inner: Found, size: int) -> Found:
    """Combine a box of an outer part with something of what is behind it."""
    start = row.start * size + inner.start
    if isinstance(inner, DimFill):
        steps = [(r.size, r.stride * size) for r in row.runs] + list(inner.steps)
        return DimFill(_steps(steps), start, inner.value)
    runs = tuple(Run(a, i, n, s * size) for a, i, n, s in row.runs)
    return DimBox(row.tags + inner.tags, runs + inner.runs, start)


def _steps(steps: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Leave out dimensions of one, and join those that step on alike."""
    out: list[tuple[int, int]] = []
    for n, stride in steps:
        if n == 1:
            continue
        if out and out[-1][1] == n * stride:
            out[-1] = (out[-1][0] * n, stride)
        else:
            out.append((n, stride))
    return tuple(out)


def _ways(found: Sequence) -> int:
    """Number of ways through the sums of a sequence."""
    match found:
        case Line():
            return 1
        case Window() | Joined():
            return _ways(found.whole)
        case Filled():
            return _ways(found.body)
        case Chain():
            return sum(_ways(b) for _, _, b in found.branches)
        case Cross():
            return math.prod(_ways(p) for p in found.parts)


def _bounded(number: int) -> int:
    if number > MAX_EXTENT:
        raise _wrong("a dimension is longer than 2^63 - 1")
    return number


def _wrong(message: str) -> UsageError:
    return UsageError(message, kind="lay-rule")
