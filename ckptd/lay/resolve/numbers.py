"""Sets of numbers in names (layers of a rule) that may repeat for ever."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import UsageError

MAX_NUMBERS = 2**16
"""Length of the longest pattern; numbers of ``for`` are below it."""


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
        return self._with(other, operator.and_)

    def __or__(self, other: Numbers) -> Numbers:
        return self._with(other, operator.or_)

    def __sub__(self, other: Numbers) -> Numbers:
        return self._with(other, operator.gt)

    def covers(self, other: Numbers) -> bool:
        """Whether all of another set are of this one."""
        return not other - self

    def __bool__(self) -> bool:
        return any(self.first) or any(self.cycle)

    def _spread(self, length: int) -> tuple[bool, ...]:
        """Return whether each of so many numbers is one of them."""
        rounds = -(-max(0, length - len(self.first)) // len(self.cycle))
        return (self.first + self.cycle * rounds)[:length]

    def _with(self, other: Numbers, both: Callable[[bool, bool], bool]) -> Numbers:
        start = max(len(self.first), len(other.first))
        period = math.lcm(len(self.cycle), len(other.cycle))
        if period > MAX_NUMBERS:
            message = "the steps of some numbers repeat too late"
            raise UsageError(message, kind="lay-rule", wanted=f"within {MAX_NUMBERS}", found=period)
        length = start + period
        found = tuple(map(both, self._spread(length), other._spread(length)))
        return Numbers(found[:start], found[start:])


ALL = Numbers((), (True,))
NONE = Numbers((), (False,))
