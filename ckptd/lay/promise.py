"""Promise of each rule about values: exact, exact up to fill, choice, lossy; which casts widen.

In it: table of types: bits of significand and exponent, integers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckptd.lay.resolve import Equation, Resolved
from ckptd.lay.syntax import tree

Promise: TypeAlias = Literal["exact", "exact up to fill", "choice", "lossy"]

PROMISES: tuple[Promise, ...] = ("exact", "exact up to fill", "choice", "lossy")
"""From the best to the worst."""


def promise(equation: Equation, dtype: str | None = None) -> Promise:
    """Return what a rule promises.

    ``exact``: the same bits come back. ``exact up to fill``: but for padding. ``choice``: one of
    several copies that may differ is taken. ``lossy``: values change.

    Parameters
    ----------
    equation
        The rule.
    dtype
        Type of the logical tensor, if it is known: a cast to the same or a wider type is exact.
    """
    found: list[Promise] = ["exact"]
    for modifier in equation.modifiers:
        match modifier:
            case tree.Average() | tree.Quantized() | tree.Drop():
                found.append("lossy")
            case tree.Affine(scale=scale, shift=shift) if (scale, shift) != (1.0, 0.0):
                found.append("lossy")
            case tree.Cast(dtype=to) if dtype is None or not _widens(dtype, to):
                found.append("lossy")
            case tree.Replicas(kind="any"):
                found.append("choice")
    if any(map(_pads, equation.dims)):
        found.append("exact up to fill")
    return max(found, key=PROMISES.index)


def promises(resolved: Resolved) -> tuple[Promise, ...]:
    """Return what each rule of a layout promises, in order."""
    return tuple(promise(e) for e in resolved.equations)


_EXACT_BITS: dict[str, tuple[int, int]] = {
    # Bits of the significand and of the exponent.
    "float64": (53, 11),
    "float32": (24, 8),
    "bfloat16": (8, 8),
    "float16": (11, 5),
    "float8_e4m3fn": (4, 4),
    "float8_e5m2": (3, 5),
}
_INTEGERS: dict[str, tuple[int, bool]] = {
    **{f"int{n}": (n - 1, True) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (n, False) for n in (8, 16, 32, 64)},
    "bool": (1, False),
}


def _widens(source: str, target: str) -> bool:
    """Whether each value of one type is a value of another."""
    if source == target:
        return True
    if source in _EXACT_BITS and target in _EXACT_BITS:
        return all(a <= b for a, b in zip(_EXACT_BITS[source], _EXACT_BITS[target], strict=True))
    if source in _INTEGERS and target in _INTEGERS:
        (bits, signed), (room, takes_sign) = _INTEGERS[source], _INTEGERS[target]
        return bits <= room and (takes_sign or not signed)
    if source in _INTEGERS and target in _EXACT_BITS:
        return _INTEGERS[source][0] <= _EXACT_BITS[target][0]
    return False


def _pads(dim: tree.Dim) -> bool:
    match dim:
        case tree.Pad():
            return True
        case tree.Split():
            return _pads(dim.inner)
        case tree.Product():
            return any(map(_pads, dim.parts))
        case tree.Sum():
            return any(_pads(b.dim) for b in dim.branches)
    return False
