"""Proof that a plan writes each element of its target exactly once, by counting.

Nothing of how the plan was made is used, only its blocks and fills. Every place is counted; where
all of them begin and step in multiples of some unit (a row, mostly), units are counted instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptd.base.grids.plan import Proof
from ckptd.errors import UsageError
from ckptd.lay.copies import TargetPlan

_MAX_MARKS = 2**28

_Steps = list[tuple[int, int]]


def prove(plan: TargetPlan) -> Proof:
    """Show that a plan writes each element of its target exactly once.

    Returns
    -------
    Proof
        Elements of the target, source pieces read, strided copies.

    Raises
    ------
    UsageError
        An element is written twice, never, or outside of the target; or the
        target is too large and too irregular to be counted.
    """
    pieces = list(_pieces(plan))
    for start, steps in pieces:
        last = start + sum((n - 1) * s for n, s in steps)
        if not 0 <= start <= last < plan.numel:
            raise _wrong(f"places below {plan.numel}", f"places {start} to {last}")
    unit = math.gcd(plan.numel, *(u for p in pieces for u in _units(*p)))
    size = plan.numel // unit if unit else 0
    if size > _MAX_MARKS:
        raise UsageError(
            "a target is too large to be counted element by element",
            found=f"{size} units of {unit} elements",
        )
    marks = np.zeros(size, dtype=np.uint8)
    for start, steps in pieces:
        shape, strides = _in_units(steps, unit)
        view = as_strided(marks[start // unit :], shape, strides)
        np.add(view, view < 255, out=view, casting="unsafe")
    wrong = np.flatnonzero(marks != 1)
    if len(wrong):
        at = int(wrong[0])
        raise _wrong("1 write", f"{int(marks[at])} at element {at * unit}")
    found = [blocks for s in plan.sources for _, blocks in s.pieces]
    return Proof(plan.numel, len(found), sum(len(b) for b in found))


def _pieces(plan: TargetPlan) -> Iterator[tuple[int, _Steps]]:
    """Yield start and steps of everything that is written."""
    for source in plan.sources:
        for b in (b for _, blocks in source.pieces for b in blocks):
            steps = zip(b.shape, b.target_strides, strict=True)
            yield b.target_start, [(n, s) for n, s in steps if n > 1]
    for f in plan.fills:
        yield f.start, [(n, s) for n, s in f.steps if n > 1]


def _units(start: int, steps: _Steps) -> Iterator[int]:
    """Yield what a unit must divide: where a piece starts, its run, and how it steps."""
    yield start
    yield next((n for n, s in steps if s == 1), 1)
    yield from (s for _, s in steps if s != 1)


def _in_units(steps: _Steps, unit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a piece over the units."""
    found = [(n // unit, 1) if s == 1 else (n, s // unit) for n, s in steps]
    return tuple(n for n, _ in found), tuple(s for _, s in found)


def _wrong(wanted: str, found: str) -> UsageError:
    return UsageError(
        "a plan does not write each target element exactly once", wanted=wanted, found=found
    )
