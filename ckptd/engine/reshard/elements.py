"""Where an element of a stored tensor goes, by arithmetic on the two rules and nothing else.

The planner works with boxes, lattices, grids and blocks. This module follows single elements: a
position in a source tensor is one entry of each of its dimensions; an entry says a way through the
sums and an index for some axes; the tags name a logical tensor, the indexes an element of it; and
the target's rule for that logical tensor says at which position it has the element. What a
dimension means is in ``docs/design/005-lay.md``; nothing here is shared with `boxes` and the like,
so that a mistake there does not excuse itself here. Arrays are int64 and of one length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import UsageError
from ckptd.layout.lay.cut import MAX_DEPTH, Scope, evaluate
from ckptd.layout.lay.dims import Atom, Dim, One, Pad, Product, Split, Sum
from ckptd.layout.lay.equation import Equation, Tags
from ckptd.layout.lay.name import Index

__all__ = ["Found", "Placed", "entries", "extent", "find", "place"]

I64 = NDArray[np.int64]


class Found(NamedTuple):
    """Elements of one logical tensor.

    Attributes
    ----------
    which
        Which of the positions asked for these are.
    family
        Name of the logical tensor.
    axes
        Index on each of its axes.
    """

    which: I64
    family: str
    axes: Mapping[str, I64]


class Placed(NamedTuple):
    """Where elements of a logical tensor stand by a rule.

    Attributes
    ----------
    which
        Which of the elements asked for the rule has.
    indexes
        Numbers in the name of the stored tensor, by axis.
    positions
        Row-major, in the stored tensor.
    """

    which: I64
    indexes: Mapping[str, I64]
    positions: I64


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entries of a dimension with one way through its sums; fills are in none."""

    which: I64
    tags: Tags
    axes: Mapping[str, I64]


def extent(dim: Dim, scope: Scope, depth: int = 0) -> int:
    """Return the number of entries of a dimension in stored form."""
    if depth > MAX_DEPTH:
        raise UsageError("a dimension is nested too deeply", kind="lay-value")
    match dim:
        case Atom():
            inner = scope.refined.get(dim.name)
            return scope.size(dim.name) if inner is None else extent(inner, scope, depth + 1)
        case One():
            return 1
        case Product():
            return math.prod(extent(p, scope, depth + 1) for p in dim.parts)
        case Sum():
            return sum(extent(b.dim, scope, depth + 1) for b in dim.branches)
        case Split():
            return extent(dim.inner, scope, depth + 1)
        case Pad():
            n, multiple = extent(dim.inner, scope, depth + 1), evaluate(dim.multiple, scope)
            return -(-n // multiple) * multiple
    raise UsageError("_ and ... only stand in a default", kind="lay-value")


def entries(dim: Dim, at: I64, scope: Scope) -> list[_Entry]:
    """Return what entries number `at` of a dimension are, by the way through its sums."""
    return list(_entries(dim, at, np.arange(len(at), dtype=np.int64), scope))


def _entries(dim: Dim, at: I64, which: I64, scope: Scope) -> Iterator[_Entry]:
    if not len(which):
        return
    match dim:
        case Atom() if dim.name in scope.refined:
            yield from _entries(scope.refined[dim.name], at, which, scope)
        case Atom():
            yield _Entry(which, (), {dim.name: at})
        case One():
            yield _Entry(which, (), {})
        case Split():
            yield from _entries(dim.inner, at, which, scope)
        case Pad():
            real = at < extent(dim.inner, scope)
            yield from _entries(dim.inner, at[real], which[real], scope)
        case Sum():
            start = 0
            for branch in dim.branches:
                end = start + extent(branch.dim, scope)
                here = (at >= start) & (at < end)
                for found in _entries(branch.dim, at[here] - start, which[here], scope):
                    yield _Entry(found.which, (branch.tag, *found.tags), found.axes)
                start = end
        case Product():
            yield from _product(dim.parts, at, which, scope)


def _product(parts: Sequence[Dim], at: I64, which: I64, scope: Scope) -> Iterator[_Entry]:
    if not parts:
        yield _Entry(which, (), {})
        return
    inner = math.prod(extent(p, scope) for p in parts[1:])
    outer, rest = np.divmod(at, max(1, inner))
    place = {w: i for i, w in enumerate(which.tolist())}
    for first in _entries(parts[0], outer, which, scope):
        rows = np.array([place[w] for w in first.which.tolist()], dtype=np.int64)
        for last in _product(parts[1:], rest[rows], first.which, scope):
            yield _joined(first, last)


def _joined(a: _Entry, b: _Entry) -> _Entry:
    """Return what is in both: the tags of `a`, then those of `b`."""
    _, i, j = np.intersect1d(a.which, b.which, assume_unique=True, return_indices=True)
    axes = {n: v[i] for n, v in a.axes.items()} | {n: v[j] for n, v in b.axes.items()}
    return _Entry(a.which[i], a.tags + b.tags, axes)


def find(
    equation: Equation, numbers: Mapping[str, int], positions: I64, scope: Scope
) -> list[Found]:
    """Return which logical elements lie at positions of a stored tensor; fills are left out.

    Parameters
    ----------
    equation
        The rule of the tensor.
    numbers
        Its indexes, by axis.
    positions
        Row-major.
    scope
        Sizes.
    """
    found = [_Entry(np.arange(len(positions), dtype=np.int64), (), {})]
    rest = positions
    columns = []
    for dim in reversed(equation.dims):
        rest, at = np.divmod(rest, max(1, extent(dim, scope)))
        columns.append(at)
    for dim, at in zip(equation.dims, reversed(columns), strict=True):
        parts = entries(dim, at, scope)
        found = [_joined(a, b) for a in found for b in parts]
    out = []
    for entry in found:
        if not len(entry.which):
            continue
        family = equation.families[entry.tags]
        said = {**numbers, **equation.pinned}
        fixed = {a: np.full(len(entry.which), n, dtype=np.int64) for a, n in said.items()}
        out.append(Found(entry.which, family.name, {**fixed, **entry.axes}))
    return out


def place(equation: Equation, tags: Tags, axes: Mapping[str, I64], scope: Scope) -> Placed:
    """Return where logical elements stand in the tensors of a rule.

    Parameters
    ----------
    equation
        The rule.
    tags
        The way to the logical tensor.
    axes
        Index of each element on each axis.
    scope
        Sizes.
    """
    count = len(next(iter(axes.values()))) if axes else 1
    inside = np.ones(count, dtype=np.bool_)
    for axis, number in equation.pinned.items():
        inside &= axes[axis] == number
    which = np.flatnonzero(inside).astype(np.int64)
    mine = {a: v[which] for a, v in axes.items()}
    positions = np.zeros(len(which), dtype=np.int64)
    left = list(tags)
    for dim in equation.dims:
        at = _position(dim, left, mine, scope, len(which))
        positions = positions * extent(dim, scope) + at
    names = [p.axis for p in equation.name.parts if isinstance(p, Index) and p.axis in mine]
    return Placed(which, {a: mine[a] for a in names}, positions)


def _position(dim: Dim, tags: list[str], axes: Mapping[str, I64], scope: Scope, count: int) -> I64:
    """Return the entry of a dimension that has given indexes; tags are used up from the left."""
    match dim:
        case Atom() if dim.name in scope.refined:
            return _position(scope.refined[dim.name], tags, axes, scope, count)
        case Atom():
            return axes[dim.name]
        case Split() | Pad():
            return _position(dim.inner, tags, axes, scope, count)
        case Product():
            at = np.zeros(count, dtype=np.int64)
            for part in dim.parts:
                inner = _position(part, tags, axes, scope, count)
                at = at * extent(part, scope) + inner
            return at
        case Sum():
            tag = tags.pop(0)
            start = 0
            for branch in dim.branches:
                if branch.tag == tag:
                    return start + _position(branch.dim, tags, axes, scope, count)
                start += extent(branch.dim, scope)
    return np.zeros(count, dtype=np.int64)
