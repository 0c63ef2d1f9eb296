"""Deciding whether a save is due, alike on every rank."""

from __future__ import annotations

import time

from ckptd.engine.board import Board
from ckptd.engine.policy import Every

__all__ = ["Cadence"]

AHEAD = 2
"""Rank 0 decides this many calls ahead, so that the others find the answer and do not wait."""


class Cadence:
    """Evaluates an `Every` rule.

    Rules by step are a function of the step. Rules by clock are decided by rank 0, which announces
    each decision `AHEAD` calls before it takes effect: in synchronous training the answer is then
    there when the other ranks ask, and where it is not they wait for it.
    """

    def __init__(self, every: Every | None, board: Board) -> None:
        self._every = every
        self._board = board
        self._calls = 0
        self._since = time.monotonic()
        self._announced: dict[int, bool] = {}

    def saved(self) -> None:
        """Begin the time anew."""
        self._since = time.monotonic()

    def due(self, step: int, last_step: int | None) -> bool:
        """Tell whether `step` is due; every rank asks once a call of ``save``."""
        if self._every is None:
            return True
        if not self._every.by_clock:
            return self._every.due(step, last_step)
        self._calls += 1
        if self._board.world == 1:
            return self._every.due(step, last_step, time.monotonic() - self._since)
        by_step = Every(self._every.steps).due(step, last_step) if self._every.steps else False
        return self._by_clock(step) or by_step

    def _by_clock(self, step: int) -> bool:
        call = self._calls
        if self._board.rank == 0:
            late = Every(minutes=self._every.minutes).due(  # type: ignore[union-attr]
                step + 1, None, time.monotonic() - self._since
            )
            # One announcement is enough until it has taken effect.
            late = late and not any(self._announced.values())
            for target in range(1 if call == 1 else call + AHEAD, call + AHEAD + 1):
                self._announced[target] = late and target == call + AHEAD
                self._board.set(f"due/{target}", b"1" if self._announced[target] else b"0")
            self._board.delete(f"due/{call - 64}")
            return self._announced.pop(call, False)
        return self._board.get(f"due/{call}", 600.0) == b"1"
