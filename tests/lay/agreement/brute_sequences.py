"""The sequence of a dimension, entry by entry: part of the judge in `brute`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias, TypeVar

from ckptd.lay.resolve import Bound, MeshShape, Tags
from ckptd.lay.syntax.tree import (
    Assigned,
    Atom,
    Dim,
    How,
    Number,
    One,
    Pad,
    Product,
    Size,
    Split,
    Sum,
    Value,
    Widths,
)

__all__ = ["Entry", "Place", "Sequences", "Wrong", "dealt", "split_axes"]

Place: TypeAlias = Mapping[str, int]
"""Coordinates by mesh axis."""


_T = TypeVar("_T")


class Wrong(Exception):
    """The layout means nothing, or the tensors are not those of one state."""


@dataclass(frozen=True)
class Entry:
    """An entry of a dimension's sequence: a tag path and an index for some axes, or a fill."""

    tags: Tags = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    fill: float | None = None


class Sequences:
    """What the dimensions of a layout run through.

    Parameters
    ----------
    bound
        The layout.
    """

    def __init__(self, bound: Bound) -> None:
        self.layout = bound.layout
        self.sizes = bound.sizes
        self.mesh = bound.layout.mesh or MeshShape(1, {}, {})
        self._found: dict[object, list[Entry]] = {}

    def seq(self, dim: Dim, place: Place | None) -> list[Entry]:
        """Return all entries of a dimension; without a place, those of the stored form."""
        mine = None if place is None else tuple((a, place[a]) for a in sorted(split_axes(dim)))
        key = (dim, mine)
        if key not in self._found:
            self._found[key] = list(self._seq(dim, place))
        return self._found[key]

    def _seq(self, dim: Dim, place: Place | None) -> Iterator[Entry]:
        match dim:
            case Atom() if dim.name in self.layout.refined:
                yield from self.seq(self.layout.refined[dim.name], place)
            case Atom():
                for i in range(self.sizes[dim.name]):
                    yield Entry((), {dim.name: i})
            case One():
                yield Entry()
            case Product():
                for entries in product(*(self.seq(p, place) for p in dim.parts)):
                    yield _union(entries)
            case Sum():
                for branch in dim.branches:
                    for e in self.seq(branch.dim, place):
                        yield e if e.fill is not None else Entry((branch.tag, *e.tags), e.axes)
            case Split():
                whole = self.seq(dim.inner, place)
                if place is None:
                    yield from whole
                else:
                    extent = self.mesh.extents[dim.axis]
                    mine = self.deal(len(whole), dim.how, extent)[place[dim.axis]]
                    yield from (whole[i] for i in mine)
            case Pad():
                inner = self.seq(dim.inner, place)
                yield from inner
                for _ in range(-len(inner) % self.number(dim.multiple)):
                    yield Entry(fill=dim.fill)
            case _:
                raise Wrong(f"{dim} is left")

    def deal(self, n: int, how: How, extent: int) -> list[list[int]]:
        """Deal n positions to the coordinates of a mesh axis."""
        if isinstance(how, Widths):
            if len(how.widths) != extent or sum(how.widths) != n:
                raise Wrong(f"{how} does not fit {n} over {extent}")
            return dealt(list(range(n)), list(how.widths))
        if isinstance(how, Assigned):
            if len(how.coordinates) != n or max(how.coordinates, default=0) >= extent:
                raise Wrong(f"{how} does not fit {n} over {extent}")
            return [[k for k in range(n) if how.coordinates[k] == c] for c in range(extent)]
        grain = self.number(how.grain)
        units = [list(range(i, min(i + grain, n))) for i in range(0, n, grain)]
        counts = [0] * extent
        if how.rule == "bal":
            for i in range(len(units)):
                counts[i % extent] += 1
        else:
            if how.rule == "even" and len(units) % extent:
                raise Wrong(f"{n} in units of {grain} does not divide over {extent}")
            most = math.ceil(len(units) / extent)
            for i in range(len(units)):
                counts[i // most] += 1
        return [[p for u in mine for p in u] for mine in dealt(units, counts)]

    def number(self, value: Value) -> int:
        """Compute a value."""
        if isinstance(value, Number):
            return value.value
        if isinstance(value, Size):
            return self.mesh.extents.get(value.name) or self.sizes[value.name]
        left, right = self.number(value.left), self.number(value.right)
        by_operator = {
            "*": lambda: left * right,
            "+": lambda: left + right,
            "-": lambda: left - right,
            "//": lambda: left // right,
            "lcm": lambda: math.lcm(left, right),
            "min": lambda: min(left, right),
            "max": lambda: max(left, right),
        }
        return by_operator[value.operator]()


def _union(entries: Sequence[Entry]) -> Entry:
    fill = next((e for e in entries if e.fill is not None), None)
    if fill is not None:
        return fill
    tags = tuple(t for e in entries for t in e.tags)
    axes: dict[str, int] = {}
    for e in entries:
        if axes.keys() & e.axes.keys():
            raise Wrong(f"an axis comes twice: {axes.keys() & e.axes.keys()}")
        axes |= e.axes
    return Entry(tags, axes)


def dealt(items: Sequence[_T], counts: Sequence[int]) -> list[list[_T]]:
    """Return the first so many items, the next so many, and so on."""
    left = list(items)
    out: list[list[_T]] = []
    for n in counts:
        out.append(left[:n])
        left = left[n:]
    return out


def split_axes(dim: Dim) -> set[str]:
    """Return the mesh axes that a dimension is split over."""
    match dim:
        case Split():
            return {dim.axis} | split_axes(dim.inner)
        case Product():
            return {a for p in dim.parts for a in split_axes(p)}
        case Sum():
            return {a for b in dim.branches for a in split_axes(b.dim)}
        case Pad():
            return split_axes(dim.inner)
    return set()
