"""``for l=0..2``: which numbers of an axis a rule has, or a tensor of a space."""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.errors import UsageError
from ckptd.lay.resolve.cut import ValueScope, evaluate
from ckptd.lay.resolve.lets import Lets
from ckptd.lay.resolve.numbers import ALL, MAX_NUMBERS, NONE, Numbers
from ckptd.lay.syntax.tree import For, Value


def numbers_of(modifiers: Iterable[object], lets: Lets) -> dict[str, Numbers]:
    """Return the numbers that ``for`` leaves, by axis; of several all have to hold.

    Parameters
    ----------
    modifiers
        Those of a rule or of a tensor of a space.
    lets
        The sizes that an end may be made of.

    Raises
    ------
    UsageError
        ``lay-rule``: a number or a step is absurdly high, or no ``let`` says it.
    """
    out: dict[str, Numbers] = {}
    for modifier in modifiers:
        if isinstance(modifier, For):
            out[modifier.axis] = out.get(modifier.axis, ALL) & _listed(modifier, lets)
    return out


def _listed(modifier: For, lets: Lets) -> Numbers:
    out = NONE
    for r in modifier.ranges:
        first = _end(r.first, lets)
        last = first if r.last is None else _end(r.last, lets)
        # One less than none leaves nothing: ``0..(dense - 1)`` where no layer is dense.
        low = [n for n, least in ((first, 0), (last, -1)) if n < least]
        highest = max(first, last, r.step)
        if low or highest >= MAX_NUMBERS:
            raise UsageError(
                "a number of 'for' is too high, or below zero",
                kind="lay-rule",
                wanted=f"numbers and steps below {MAX_NUMBERS}",
                found=low[0] if low else highest,
            )
        before = (False,) * first
        if r.last is None:
            out |= Numbers(before, tuple(k == 0 for k in range(r.step)))
        else:
            # Ends that were computed may leave nothing between them.
            inside = tuple(k % r.step == 0 for k in range(last - first + 1))
            out |= Numbers(before + inside, (False,))
    return out


def _end(end: int | Value, lets: Lets) -> int:
    """Return an end as a number; the one of ``0..(n - 1)`` is below zero where n is zero."""
    return end if isinstance(end, int) else evaluate(lets.value(end), ValueScope({}, {}), least=-1)
