"""Lengths of dimensions as polynomials over sizes; padding and uneven parts as unknowns.

What no polynomial says, an *unknown of its own* represents: the length after padding, and the part
of an uneven split. It is worked out once the length that it comes from is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from ckptd.errors import UsageError
from ckptd.lay.held import split_axes
from ckptd.lay.syntax import tree

Monomial: TypeAlias = tuple[str, ...]
Polynomial: TypeAlias = dict[Monomial, Fraction]
"""Coefficient by the sorted names that are multiplied; ``()`` for the constant."""

_MAX_TERMS = 512


@dataclass(frozen=True)
class Padded:
    """The length of `inner` after padding to a multiple."""

    inner: Polynomial
    multiple: tree.Value


@dataclass(frozen=True)
class LengthPart:
    """The length of the part of `inner` that a coordinate holds."""

    inner: Polynomial
    how: tree.Contiguous
    extent: int
    coordinate: int


Derived: TypeAlias = Padded | LengthPart


@dataclass
class Lengths:
    """Makes polynomials of dimensions.

    Attributes
    ----------
    extents
        Of mesh axes.
    derived
        Unknowns that represent what no polynomial says, by name.
    """

    extents: Mapping[str, int]
    derived: dict[str, Derived] = field(default_factory=dict)
    _names: dict[object, str] = field(default_factory=dict)

    def stored(self, dim: tree.Dim) -> Polynomial:
        """Return the length of the stored form: without splits."""
        return self._length(dim, None)

    def local(self, dim: tree.Dim, coordinates: Mapping[str, int]) -> Polynomial:
        """Return the length on one rank.

        Raises
        ------
        UsageError
            A mesh axis is not known.
        """
        return self._length(dim, coordinates)

    def summed(self, dim: tree.Dim, axes: frozenset[str]) -> Polynomial:
        """Return the sum of the lengths over all coordinates of some mesh axes.

        The parts of a split add up to the whole, however it cuts.
        """
        match dim:
            case tree.Split() if dim.axis in axes:
                return self.summed(dim.inner, axes - {dim.axis})
            case tree.Product():
                out = constant(1)
                left = axes
                for part in dim.parts:
                    mine = left & frozenset(split_axes(part))
                    left -= mine
                    out = times(out, self.summed(part, mine))
                return times(out, constant(self._count(left)))
            case tree.Sum():
                return _sum([self.summed(b.dim, axes) for b in dim.branches])
        return times(self.stored(dim), constant(self._count(axes)))

    def _count(self, axes: frozenset[str]) -> int:
        return math.prod(self.extents.get(a, 1) for a in axes)

    def _length(self, dim: tree.Dim, at: Mapping[str, int] | None) -> Polynomial:
        match dim:
            case tree.Atom():
                return {(dim.name,): Fraction(1)}
            case tree.Product():
                out = constant(1)
                for part in dim.parts:
                    out = times(out, self._length(part, at))
                return out
            case tree.Sum():
                return _sum([self._length(b.dim, at) for b in dim.branches])
            case tree.Pad():
                return self._unknown(Padded(self._length(dim.inner, at), dim.multiple))
            case tree.Split():
                inner = self._length(dim.inner, at)
                return inner if at is None else self._part(inner, dim, at)
            case tree.One():
                return constant(1)
        raise UsageError("'_' and '...' have no length", kind="lay-rule")

    def _part(self, inner: Polynomial, dim: tree.Split, at: Mapping[str, int]) -> Polynomial:
        extent = self.extents.get(dim.axis)
        if extent is None:
            raise UsageError(f"unknown mesh axis {dim.axis}", kind="lay-rule")
        if isinstance(dim.how, tree.Even) and dim.how.rule == "even" and dim.how.grain == tree.UNIT:
            return times(inner, {(): Fraction(1, extent)})
        coordinate = at.get(dim.axis, 0)
        if isinstance(dim.how, tree.Widths):
            widths = dim.how.widths
            return constant(widths[coordinate] if coordinate < len(widths) else 0)
        if isinstance(dim.how, tree.Assigned):
            return constant(dim.how.coordinates.count(coordinate))
        return self._unknown(LengthPart(inner, dim.how, extent, coordinate))

    def _unknown(self, derived: Derived) -> Polynomial:
        """Return the unknown that represents a derived length; alike lengths share one."""
        frozen: tuple[object, ...] = (tuple(sorted(derived.inner.items())), type(derived))
        if isinstance(derived, Padded):
            frozen += (derived.multiple,)
        else:
            frozen += (derived.how, derived.extent, derived.coordinate)
        name = self._names.setdefault(frozen, f"#{len(self._names)}")
        self.derived[name] = derived
        return {(name,): Fraction(1)}


def constant(number: int) -> Polynomial:
    """Return a number as polynomial."""
    return {(): Fraction(number)} if number else {}


def times(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return a product.

    Raises
    ------
    UsageError
        ``lay-rule``: it has absurdly many terms.
    """
    if len(left) * len(right) > _MAX_TERMS:
        raise UsageError(f"a dimension with more than {_MAX_TERMS} terms", kind="lay-rule")
    out: Polynomial = {}
    for a, x in left.items():
        for b, y in right.items():
            monomial = tuple(sorted(a + b))
            out[monomial] = out.get(monomial, Fraction(0)) + x * y
    return out


def substituted(polynomial: Polynomial, known: Mapping[str, int]) -> Polynomial:
    """Return a polynomial with known sizes put in."""
    out: Polynomial = {}
    for monomial, factor in polynomial.items():
        number = factor
        left = []
        for name in monomial:
            if name in known:
                number *= known[name]
            else:
                left.append(name)
        key = tuple(left)
        out[key] = out.get(key, Fraction(0)) + number
    return {m: f for m, f in out.items() if f}


def of_value(value: tree.Value, extents: Mapping[str, int]) -> Polynomial | None:
    """Return a value as polynomial; None if it is none (``//``, ``lcm``, ``min``, ``max``)."""
    match value:
        case tree.Number():
            return constant(value.value)
        case tree.Size():
            extent = extents.get(value.name)
            return {(value.name,): Fraction(1)} if extent is None else constant(extent)
        case tree.Arithmetic():
            left, right = of_value(value.left, extents), of_value(value.right, extents)
            if left is None or right is None or value.operator not in "*+-":
                return None
            if value.operator == "*":
                return times(left, right)
            return _sum([left, right if value.operator == "+" else times(right, constant(-1))])


def _sum(polynomials: list[Polynomial]) -> Polynomial:
    out: Polynomial = {}
    for polynomial in polynomials:
        for monomial, factor in polynomial.items():
            out[monomial] = out.get(monomial, Fraction(0)) + factor
    if len(out) > _MAX_TERMS:
        raise UsageError(f"a dimension with more than {_MAX_TERMS} terms", kind="lay-rule")
    return out


def summable(dim: tree.Dim) -> bool:
    """Whether `Lengths.summed` knows the sum: no padding has a split inside."""
    match dim:
        case tree.Split():
            return summable(dim.inner)
        case tree.Pad():
            return not split_axes(dim.inner)
        case tree.Product():
            return all(map(summable, dim.parts))
        case tree.Sum():
            return all(summable(b.dim) for b in dim.branches)
    return True
