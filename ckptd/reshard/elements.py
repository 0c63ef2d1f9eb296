"""Independent check: where an element of a stored tensor goes, by arithmetic on two rules alone.

The planner works with boxes, lattices, grids and blocks. This module follows single elements: a
position in a source tensor is one entry of each of its dimensions; an entry says a way through the
sums and an index for some axes; the tags name a logical tensor, the indexes an element of it; and
the target's rule for that logical tensor says at which position it has the element. What a
dimension means is in ``docs/design/lay.md``; nothing here is shared with `boxes` and the like,
so that a mistake there does not excuse itself here. Arrays are int64 and of one length.

The same is done for the tensors of a rank: with its coordinates, a split leaves a part of its
dimension, and positions count within that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import UsageError
from ckptd.lay.resolve import MAX_DEPTH, Equation, Tags, ValueScope, evaluate, part
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.syntax.tree import Assigned, Atom, Dim, NameIndex, One, Pad, Product, Split, Sum

I64 = NDArray[np.int64]
At = Mapping[str, int] | None
"""Coordinates of a rank; None for stored tensors."""


class FoundElements(NamedTuple):
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


class Positioned(NamedTuple):
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


def extent(dim: Dim, scope: ValueScope, at: At = None, depth: int = 0) -> int:
    """Return the number of entries of a dimension, in stored form or on a rank."""
    if depth > MAX_DEPTH:
        raise UsageError("a dimension is nested too deeply", kind="lay-rule")
    match dim:
        case Atom():
            inner = scope.refined.get(dim.name)
            return scope.size(dim.name) if inner is None else extent(inner, scope, at, depth + 1)
        case One():
            return 1
        case Product():
            return math.prod(extent(p, scope, at, depth + 1) for p in dim.parts)
        case Sum():
            return sum(extent(b.dim, scope, at, depth + 1) for b in dim.branches)
        case Split():
            n = extent(dim.inner, scope, at, depth + 1)
            return n if at is None else len(_kept(dim, n, scope, at))
        case Pad():
            n, multiple = extent(dim.inner, scope, at, depth + 1), evaluate(dim.multiple, scope)
            return -(-n // multiple) * multiple
    raise UsageError("_ and ... only stand in a default", kind="lay-rule")


def _kept(dim: Split, n: int, scope: ValueScope, at: Mapping[str, int]) -> Sequence[int]:
    """Return which of the `n` entries of what is split there are."""
    if isinstance(dim.how, Assigned):
        return [k for k, c in enumerate(dim.how.coordinates) if c == at[dim.axis]]
    return range(*part(n, dim.how, scope.extent(dim.axis), at[dim.axis], scope))


def entries(dim: Dim, numbers: I64, scope: ValueScope, at: At = None) -> list[_Entry]:
    """Return what entries number `numbers` of a dimension are, by the way through its sums."""
    which = np.arange(len(numbers), dtype=np.int64)
    return list(_entries(dim, numbers, which, scope, at))


def _entries(dim: Dim, numbers: I64, which: I64, scope: ValueScope, at: At) -> Iterator[_Entry]:
    if not len(which):
        return
    match dim:
        case Atom() if dim.name in scope.refined:
            yield from _entries(scope.refined[dim.name], numbers, which, scope, at)
        case Atom():
            yield _Entry(which, (), {dim.name: numbers})
        case One():
            yield _Entry(which, (), {})
        case Split():
            if at is not None:
                kept = _kept(dim, extent(dim.inner, scope, at), scope, at)
                if isinstance(kept, range):
                    numbers = numbers + kept.start
                else:
                    numbers = np.array(kept, dtype=np.int64)[numbers]
            yield from _entries(dim.inner, numbers, which, scope, at)
        case Pad():
            real = numbers < extent(dim.inner, scope, at)
            yield from _entries(dim.inner, numbers[real], which[real], scope, at)
        case Sum():
            start = 0
            for branch in dim.branches:
                end = start + extent(branch.dim, scope, at)
                here = (numbers >= start) & (numbers < end)
                inner = numbers[here] - start
                for found in _entries(branch.dim, inner, which[here], scope, at):
                    yield _Entry(found.which, (branch.tag, *found.tags), found.axes)
                start = end
        case Product():
            yield from _product(dim.parts, numbers, which, scope, at)


def _product(
    parts: Sequence[Dim], numbers: I64, which: I64, scope: ValueScope, at: At
) -> Iterator[_Entry]:
    if not parts:
        yield _Entry(which, (), {})
        return
    inner = math.prod(extent(p, scope, at) for p in parts[1:])
    outer, rest = np.divmod(numbers, max(1, inner))
    place = {w: i for i, w in enumerate(which.tolist())}
    for first in _entries(parts[0], outer, which, scope, at):
        rows = np.array([place[w] for w in first.which.tolist()], dtype=np.int64)
        for last in _product(parts[1:], rest[rows], first.which, scope, at):
            yield _joined(first, last)


def _joined(a: _Entry, b: _Entry) -> _Entry:
    """Return what is in both: the tags of `a`, then those of `b`."""
    _, i, j = np.intersect1d(a.which, b.which, assume_unique=True, return_indices=True)
    axes = {n: v[i] for n, v in a.axes.items()} | {n: v[j] for n, v in b.axes.items()}
    return _Entry(a.which[i], a.tags + b.tags, axes)


def find(
    equation: Equation,
    numbers: Mapping[str, int],
    positions: I64,
    scope: ValueScope,
    at: At = None,
) -> list[FoundElements]:
    """Return which logical elements lie at positions of a tensor; fills are left out.

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
    at
        Coordinates of the rank that holds it; None for a stored tensor.
    """
    found = [_Entry(np.arange(len(positions), dtype=np.int64), (), {})]
    rest = positions
    columns = []
    for dim in reversed(equation.dims):
        rest, column = np.divmod(rest, max(1, extent(dim, scope, at)))
        columns.append(column)
    for dim, column in zip(equation.dims, reversed(columns), strict=True):
        parts = entries(dim, column, scope, at)
        found = [_joined(a, b) for a in found for b in parts]
    out = []
    for entry in found:
        if not len(entry.which):
            continue
        family = equation.families[entry.tags]
        said = {**numbers, **equation.pinned}
        fixed = {a: np.full(len(entry.which), n, dtype=np.int64) for a, n in said.items()}
        out.append(FoundElements(entry.which, family.name, {**fixed, **entry.axes}))
    return out


def place(
    equation: Equation, tags: Tags, axes: Mapping[str, I64], scope: ValueScope, at: At = None
) -> Positioned:
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
    at
        Coordinates of the rank whose tensors are meant; None for stored tensors. Elements that
        its splits do not leave to it are left out; which indexes it has is not looked at.
    """
    count = len(next(iter(axes.values()))) if axes else 1
    inside = np.ones(count, dtype=np.bool_)
    for axis, number in equation.pinned.items():
        inside &= axes[axis] == number
    for axis, numbers in equation.only.items():
        if axis in axes:
            inside &= numbers.mask(axes[axis])
    which = np.flatnonzero(inside).astype(np.int64)
    mine = {a: v[which] for a, v in axes.items()}
    positions = np.zeros(len(which), dtype=np.int64)
    left = list(tags)
    for dim in equation.dims:
        column = _position(dim, left, mine, scope, at, len(which))
        positions = _inner(positions, column, extent(dim, scope, at))
    here = positions >= 0
    names = [p.axis for p in equation.name.parts if isinstance(p, NameIndex) and p.axis in mine]
    return Positioned(which[here], {a: mine[a][here] for a in names}, positions[here])


class FollowedElements(NamedTuple):
    """Elements of one tensor that are in one tensor of another layout.

    Attributes
    ----------
    rule, indexes
        Of that other tensor.
    which
        Which of the positions asked for these are.
    positions
        Where they are there, row-major.
    """

    rule: RuleForm
    indexes: tuple[int, ...]
    which: I64
    positions: I64


def follow(
    rule: RuleForm,
    indexes: tuple[int, ...],
    positions: I64,
    scope: ValueScope,
    takers: Mapping[str, Sequence[tuple[RuleForm, Tags]]],
    target: ValueScope,
    *,
    at: At = None,
    target_at: At = None,
) -> Iterator[FollowedElements]:
    """Yield where elements of a tensor are in the tensors of another layout.

    Parameters
    ----------
    rule, indexes
        The tensor.
    positions
        Row-major.
    scope, target
        Sizes of both layouts.
    takers
        The other layout's rules, by logical tensor.
    at, target_at
        Coordinates of ranks, whose tensors are meant on either side; None for stored tensors.
    """
    numbers = dict(zip(rule.indexes, indexes, strict=True))
    for found in find(rule.equation, numbers, positions, scope, at):
        for other, tags in takers.get(found.family, ()):
            placed = place(other.equation, tags, found.axes, target, target_at)
            which = found.which[placed.which]
            columns = [placed.indexes[a] for a in other.indexes]
            for key, rows in _by_indexes(columns, len(which)):
                yield FollowedElements(other, key, which[rows], placed.positions[rows])


def _by_indexes(columns: list[I64], count: int) -> Iterator[tuple[tuple[int, ...], I64]]:
    """Yield the rows of each combination of numbers in names."""
    if not count:
        return
    if not columns:
        yield (), np.arange(count, dtype=np.int64)
        return
    table = np.stack(columns, axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    for i, row in enumerate(unique.tolist()):
        yield tuple(row), np.flatnonzero(inverse.reshape(-1) == i).astype(np.int64)


def _inner(outer: I64, inner: I64, n: int) -> I64:
    """Return combined positions; -1 for what is not there."""
    return np.where((outer < 0) | (inner < 0), -1, outer * n + inner)


def _position(
    dim: Dim, tags: list[str], axes: Mapping[str, I64], scope: ValueScope, at: At, count: int
) -> I64:
    """Return the entry of a dimension that has given indexes; tags are used up from the left."""
    match dim:
        case Atom() if dim.name in scope.refined:
            return _position(scope.refined[dim.name], tags, axes, scope, at, count)
        case Atom():
            return axes[dim.name]
        case Split():
            found = _position(dim.inner, tags, axes, scope, at, count)
            if at is None:
                return found
            n = extent(dim.inner, scope, at)
            kept = _kept(dim, n, scope, at)
            local = np.full(n + 1, -1, dtype=np.int64)
            local[np.array(kept, dtype=np.int64)] = np.arange(len(kept))
            return local[found]
        case Pad():
            return _position(dim.inner, tags, axes, scope, at, count)
        case Product():
            found = np.zeros(count, dtype=np.int64)
            for inner in dim.parts:
                column = _position(inner, tags, axes, scope, at, count)
                found = _inner(found, column, extent(inner, scope, at))
            return found
        case Sum():
            tag = tags.pop(0)
            start = 0
            for branch in dim.branches:
                if branch.tag == tag:
                    found = _position(branch.dim, tags, axes, scope, at, count)
                    return np.where(found < 0, -1, found + start)
                start += extent(branch.dim, scope, at)
    return np.zeros(count, dtype=np.int64)
