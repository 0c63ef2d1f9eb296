"""Splits (even, ceil, bal, widths, at): the part of a coordinate; values computed (``evaluate``).

All positions are plain ints below 2^63; a program that leads beyond is refused, so that the array
forms cannot wrap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.grid import MAX_EXTENT
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.resolve.equation import Bound, MeshShape
from ckptd.lay.syntax.tree import Arithmetic, Assigned, Contiguous, Dim, Number, Size, Value, Widths

Ints = NDArray[np.int64]

MAX_DEPTH = 64
"""Deepest nesting of a value or a dimension."""


@dataclass(frozen=True)
class ValueScope:
    """Values of names: lengths of axes, extents of mesh axes, refined atoms."""

    sizes: Mapping[str, int]
    extents: Mapping[str, int] = field(default_factory=dict)
    refined: Mapping[str, Dim] = field(default_factory=dict)

    def size(self, name: str) -> int:
        """Return the length of an axis.

        Raises
        ------
        UsageError
            The length is not known.
        """
        found = self.sizes.get(name)
        if found is None:
            raise _wrong(f"the size of {name} is not known")
        return _bounded(found)

    def extent(self, axis: str) -> int:
        """Return the extent of a mesh axis.

        Raises
        ------
        UsageError
            There is no such axis.
        """
        found = self.extents.get(axis)
        if found is None:
            raise _wrong(f"unknown mesh axis {axis}")
        return found


def scope_of(bound: Bound) -> ValueScope:
    """Return what names represent in a layout."""
    mesh = bound.layout.mesh or MeshShape(1, {}, {})
    return ValueScope(bound.sizes, mesh.extents, bound.layout.refined)


def evaluate(value: Value, scope: ValueScope, depth: int = 0, *, least: int = 0) -> int:
    """Compute a value.

    Parameters
    ----------
    value
        The value.
    scope
        What its names represent.
    depth
        How deep it stands in another one.
    least
        The least that it, and what it is made of, may be.

    Raises
    ------
    UsageError
        A name is unknown, a divisor is zero, a result is too low or beyond 2^63 - 1.
    """
    if depth > MAX_DEPTH:
        raise _wrong("a value is nested too deeply")
    match value:
        case Number():
            return _bounded(value.value)
        case Size():
            if value.name in scope.extents:
                return scope.extent(value.name)
            return scope.size(value.name)
        case Arithmetic():
            left = evaluate(value.left, scope, depth + 1, least=least)
            right = evaluate(value.right, scope, depth + 1, least=least)
            return _bounded(_apply(value.operator, left, right), least)


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "//" and right == 0:
        raise _wrong("a value divides by zero")
    match operator:
        case "*":
            return left * right
        case "+":
            return left + right
        case "-":
            return left - right
        case "//":
            return left // right
        case "lcm":
            return math.lcm(left, right)
        case "min":
            return min(left, right)
    return max(left, right)


def part(
    n: int, how: Contiguous, extent: int, coordinate: int, scope: ValueScope
) -> tuple[int, int]:
    """Return the part ``[start, stop)`` of a sequence of `n` that a coordinate holds.

    Parameters
    ----------
    n
        Length of the sequence.
    how
        The rule of the split.
    extent, coordinate
        Of the mesh axis.
    scope
        What the grain may speak of.

    Raises
    ------
    MismatchError
        ``lay-fit``: an even split that does not divide, or recorded widths that do not add up.
    UsageError
        The grain is zero or cannot be computed.
    """
    # A single number of a handful of formulas: cheaper than an array of one.
    if isinstance(how, Widths):
        check_widths(n, how, extent)
        start = sum(how.widths[:coordinate])
        return start, start + how.widths[coordinate]
    grain = _grain(how.grain, scope)
    units = -(-n // grain)
    if how.rule == "bal":
        each, more = divmod(units, extent)
        start = coordinate * each + min(coordinate, more)
        stop = start + each + (coordinate < more)
    else:
        if how.rule == "even" and units % extent:
            raise _indivisible(n, grain, extent)
        each = -(-units // extent)
        start, stop = coordinate * each, (coordinate + 1) * each
    return min(n, start * grain), min(n, stop * grain)


def parts(
    n: Ints, how: Contiguous, extent: int, coordinates: Ints, scope: ValueScope
) -> tuple[Ints, Ints]:
    """Return `part` for many sequences and coordinates at once, as starts and stops.

    Raises
    ------
    MismatchError, UsageError
        As `part`.
    """
    if isinstance(how, Widths):
        for length in np.unique(n).tolist():
            check_widths(length, how, extent)
        ends = np.cumsum(np.array([0, *how.widths], dtype=np.int64))
        return ends[coordinates], ends[coordinates + 1]
    grain = _grain(how.grain, scope)
    units = -(-n // grain)
    if how.rule == "bal":
        each, more = np.divmod(units, extent)
        start = coordinates * each + np.minimum(coordinates, more)
        stop = start + each + (coordinates < more)
    else:
        if how.rule == "even" and (units % extent).any():
            raise _indivisible(int(n[units % extent != 0][0]), grain, extent)
        each = -(-units // extent)
        start, stop = coordinates * each, (coordinates + 1) * each
    # Clipped in units first: a grain may be larger than the sequence.
    start, stop = np.minimum(start, units), np.minimum(stop, units)
    return np.minimum(n, start * grain), np.minimum(n, stop * grain)


def check_widths(n: int, how: Widths, extent: int) -> None:
    """Refuse recorded widths that are not those of a sequence of `n` over a mesh axis."""
    if len(how.widths) != extent or any(w < 0 for w in how.widths) or sum(how.widths) != n:
        raise MismatchError(
            "the recorded widths of a split do not fit",
            kind="lay-fit",
            wanted=f"{extent} widths that add up to {n}",
            found=f"{len(how.widths)} that add up to {sum(how.widths)}",
        )


def assigned_runs(n: int, how: Assigned, extent: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return a sequence of `n` in runs that lie at one coordinate each.

    Parameters
    ----------
    n
        Length of the sequence.
    how
        The coordinate of each element.
    extent
        Of the mesh axis.

    Returns
    -------
    coordinate, start, size, local
        Of each run: where it lies, its first element in the sequence, its length, and its first
        position in what the coordinate holds.

    Raises
    ------
    MismatchError
        ``lay-fit``: there is not one coordinate of the axis for each element.
    """
    whose = np.array(how.coordinates, dtype=np.int64)
    wrong = np.flatnonzero(whose >= extent)
    if len(whose) != n or len(wrong):
        there = f"{len(whose)} coordinates"
        if len(wrong):
            there += f", {whose[wrong[0]]} of number {wrong[0]} among them"
        raise MismatchError(
            "the coordinates that a split assigns do not fit",
            kind="lay-fit",
            wanted=f"{n} coordinates below {extent}",
            found=there,
        )
    start = np.flatnonzero(np.diff(whose, prepend=-1))
    size = np.diff(start, append=n)
    order = np.argsort(whose, kind="stable")
    counts = np.bincount(whose, minlength=extent)
    number = np.empty(n, dtype=np.int64)
    number[order] = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    return whose[start], start.astype(np.int64), size.astype(np.int64), number[start]


def _grain(value: Value, scope: ValueScope) -> int:
    grain = evaluate(value, scope)
    if grain < 1:
        raise _wrong("the grain of a split is zero")
    # Larger grains than that cut nothing, and their products would leave int64.
    return min(grain, 2**40)


def _indivisible(n: int, grain: int, extent: int) -> MismatchError:
    unit = f" in units of {grain}" if grain > 1 else ""
    return MismatchError(
        "an even split does not divide",
        kind="lay-fit",
        wanted=f"a multiple of {extent}{unit}",
        found=n,
        hint="say how it is cut: @axis:ceil, :bal or :[widths]",
    )


def _bounded(number: int, least: int = 0) -> int:
    if not least <= number <= MAX_EXTENT:
        raise _wrong(f"a value is {'negative' if number < 0 else 'beyond 2^63 - 1'}")
    return number


def _wrong(message: str) -> UsageError:
    return UsageError(message, kind="lay-rule")
