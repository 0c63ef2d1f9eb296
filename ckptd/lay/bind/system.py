"""Exact linear systems over products of sizes; limits of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from ckptd.lay.bind.lengths import Monomial, Polynomial

Members: TypeAlias = frozenset[int]

_MAX_WORK = 4_000_000
"""Cells of the systems that are solved; beyond, sizes have to be declared."""

_MAX_BITS = 4096


def linear(
    rows: Sequence[tuple[Polynomial, Fraction, Members]],
) -> tuple[dict[Monomial, tuple[Fraction, Members]], list[Members]]:
    """Solve equations ``polynomial = number`` for their products, as far as they are determined.

    Parameters
    ----------
    rows
        Polynomial, number, and the numbers of the equations that it comes from.

    Returns
    -------
    tuple
        Value of each determined product with the equations used, and groups of equations that
        contradict each other.
    """
    unknown = sorted({m for p, _, _ in rows for m in p if m})
    if len(rows) * len(unknown) * len(unknown) > _MAX_WORK:
        return {}, []
    work = [
        ({m: f for m, f in p.items() if m}, number - p.get((), Fraction(0)), members)
        for p, number, members in rows
    ]
    done: list[tuple[Monomial, tuple[Polynomial, Fraction, Members]]] = []
    for pivot in unknown:
        at = next((k for k, row in enumerate(work) if row[0].get(pivot)), None)
        if at is None:
            continue
        chosen = _scaled(work.pop(at), pivot)
        work = [_without(row, pivot, chosen) for row in work]
        done = [(m, _without(row, pivot, chosen)) for m, row in done]
        done.append((pivot, chosen))
    wrong = [members for p, number, members in work if not p and number]
    found = {m: (row[1], row[2]) for m, row in done if len(row[0]) == 1}
    return found, wrong


_Row: TypeAlias = tuple[Polynomial, Fraction, Members]


def _scaled(row: _Row, pivot: Monomial) -> _Row:
    factor = row[0][pivot]
    return {m: f / factor for m, f in row[0].items()}, row[1] / factor, row[2]


def _without(row: _Row, pivot: Monomial, chosen: _Row) -> _Row:
    """Return a row less a multiple of the pivot's row."""
    factor = row[0].get(pivot)
    if not factor:
        return row
    out = dict(row[0])
    for monomial, f in chosen[0].items():
        out[monomial] = out.get(monomial, Fraction(0)) - factor * f
    left = {m: f for m, f in out.items() if f}
    return left, row[1] - factor * chosen[1], row[2] | chosen[2]


def ratios(products: Mapping[Monomial, Fraction]) -> dict[str, Fraction]:
    """Return the sizes that follow from known products by multiplying and dividing them.

    ``kv*rep*hd = 4096`` and ``kv*hd = 1024`` give ``rep = 4``.
    """
    rows: list[tuple[dict[str, int], Fraction]] = []
    for monomial, value in products.items():
        if value > 0:
            powers: dict[str, int] = {}
            for name in monomial:
                powers[name] = powers.get(name, 0) + 1
            rows.append((powers, value))
    unknown = sorted({n for powers, _ in rows for n in powers})
    if len(rows) * len(unknown) * len(unknown) > _MAX_WORK:
        return {}
    done: list[tuple[dict[str, int], Fraction]] = []
    for pivot in unknown:
        at = next((k for k, row in enumerate(rows) if abs(row[0].get(pivot, 0)) == 1), None)
        if at is None:
            continue
        chosen = rows.pop(at)
        rows = [_divided(row, pivot, chosen) for row in rows]
        done = [_divided(row, pivot, chosen) for row in done]
        done.append(chosen)
    out: dict[str, Fraction] = {}
    for powers, value in done:
        if len(powers) == 1:
            ((name, power),) = powers.items()
            if abs(power) == 1:
                out[name] = value if power == 1 else 1 / value
    return out


def _divided(
    row: tuple[dict[str, int], Fraction], pivot: str, chosen: tuple[dict[str, int], Fraction]
) -> tuple[dict[str, int], Fraction]:
    """Return a row divided by a power of the pivot's row, so that the pivot is gone."""
    power = row[0].get(pivot, 0)
    if not power or chosen[1].numerator.bit_length() + chosen[1].denominator.bit_length() > (
        _MAX_BITS // max(1, abs(power))
    ):
        return row
    times = power * chosen[0][pivot]
    out = dict(row[0])
    for name, other in chosen[0].items():
        out[name] = out.get(name, 0) - times * other
    return {n: p for n, p in out.items() if p}, row[1] / chosen[1] ** times
