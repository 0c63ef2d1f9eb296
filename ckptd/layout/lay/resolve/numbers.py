"""Sets of numbers in names: which layers a rule has, or a tensor of a space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import UsageError
from ckptd.layout.lay.syntax import For

__all__ = ["ALL", "NONE", "Numbers", "numbers_of"]

_MAX_LENGTH = 2**16


@dataclass(frozen=True, slots=True)
class Numbers:
    """Whole numbers from 0: some of the first ones, then a pattern that repeats for ever.

    How many numbers there are need not be known, so rules are compared without sizes.

    Attributes
    ----------
    first
        Whether each of the first numbers is one of them.
    cycle
        The same for those behind, again and again.
    """

    first: tuple[bool, ...]
    cycle: tuple[bool, ...]

    def has(self, number: int) -> bool:
        """Whether a number is one of them."""
        behind = number - len(self.first)
        return self.first[number] if behind < 0 else self.cycle[behind % len(self.cycle)]

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of some numbers is one of them."""
        first = np.array((*self.first, False))[np.minimum(numbers, len(self.first))]
        cycle = np.array(self.cycle)[(numbers - len(self.first)) % len(self.cycle)]
        return np.where(numbers < len(self.first), first, cycle)

    def below(self, size: int) -> list[int]:
        """Return all below a number."""
        return [n for n in range(size) if self.has(n)]

    def count(self, size: int) -> int:
        """Return how many are below a number, however large it is."""
        behind = max(0, size - len(self.first))
        rounds, rest = divmod(behind, len(self.cycle))
        return sum(self.first[:size]) + rounds * sum(self.cycle) + sum(self.cycle[:rest])

    def __and__(self, other: Numbers) -> Numbers:
        return self._with(other, lambda a, b: a and b)

    def __or__(self, other: Numbers) -> Numbers:
        return self._with(other, lambda a, b: a or b)

    def __sub__(self, other: Numbers) -> Numbers:
        return self._with(other, lambda a, b: a and not b)

    def covers(self, other: Numbers) -> bool:
        """Whether all of another set are of this one."""
        return not other - self

    def __bool__(self) -> bool:
        return any(self.first) or any(self.cycle)

    def _with(self, other: Numbers, both: Callable[[bool, bool], bool]) -> Numbers:
        start = max(len(self.first), len(other.first))
        period = math.lcm(len(self.cycle), len(other.cycle))
        if period > _MAX_LENGTH:
            message = "the steps of some numbers repeat too late"
            raise UsageError(message, kind="lay-rule", wanted=f"within {_MAX_LENGTH}", found=period)
        found = tuple(both(self.has(n), other.has(n)) for n in range(start + period))
        return Numbers(found[:start], found[start:])


ALL = Numbers((), (True,))
NONE = Numbers((), (False,))


def numbers_of(modifiers: Iterable[object]) -> dict[str, Numbers]:
    """Return the numbers that ``for`` leaves, by axis; of several all have to hold.

    Raises
    ------
    UsageError
        ``lay-rule``: a number or a step is absurdly high.
    """
    out: dict[str, Numbers] = {}
    for modifier in modifiers:
        if isinstance(modifier, For):
            out[modifier.axis] = out.get(modifier.axis, ALL) & _listed(modifier)
    return out


def _listed(modifier: For) -> Numbers:
    out = NONE
    for r in modifier.ranges:
        last = r.first if r.last is None else r.last
        if max(r.first, last, r.step) >= _MAX_LENGTH:
            raise UsageError(
                "a number of 'for' is too high",
                kind="lay-rule",
                wanted=f"numbers and steps below {_MAX_LENGTH}",
                found=max(r.first, last, r.step),
            )
        before = (False,) * r.first
        if r.last is None:
            out |= Numbers(before, tuple(k == 0 for k in range(r.step)))
        else:
            inside = tuple(k % r.step == 0 for k in range(last - r.first + 1))
            out |= Numbers(before + inside, (False,))
    return out
