"""How long the loop's steps take, and how much longer while a save drains."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["StepTimes"]

_WINDOW = 64


class StepTimes:
    """Seconds between the calls of ``save``, without what those calls take."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=_WINDOW)
        self._draining: deque[float] = deque(maxlen=_WINDOW)
        self._drained = 0
        self._left: float | None = None

    def call(self, now: float, draining: bool) -> None:
        """A call begins; `draining` tells whether a save was under way since the last one."""
        if self._left is None:
            return
        (self._draining if draining else self._calm).append(now - self._left)
        self._drained += draining

    def leave(self, now: float) -> None:
        """The call returns."""
        self._left = now

    @property
    def usual_s(self) -> float | None:
        """Median of the last steps; None before there are two calls."""
        steps = self._calm or self._draining
        return statistics.median(steps) if steps else None

    def inflation_s(self) -> float:
        """Return what the steps since the last answer lost to draining, in seconds.

        Medians, because an evaluation between two steps is no fault of a save. 0 while no step
        without a save is known.
        """
        lost = 0.0
        if self._calm and self._draining:
            slower = statistics.median(self._draining) - statistics.median(self._calm)
            lost = max(0.0, slower) * self._drained
        self._draining.clear()
        self._drained = 0
        return lost
