"""Which near tiers a save goes to, alike on every rank."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial

from ckptd.engine.board import Board
from ckptd.engine.policy import Every
from ckptd.engine.tiers import NEAR, Tier
from ckptd.train.announcing import Announcements
from ckptd.train.steptimes import StepTimes

__all__ = ["TierRules"]


class TierRules:
    """Evaluates the rules of near tiers.

    Rules by step are a function of the step. Those by clock are decided by rank 0, which announces
    for a coming call which tiers are due then.

    Parameters
    ----------
    tiers
        One of each kind at most.
    """

    def __init__(self, tiers: Sequence[Tier], board: Board) -> None:
        self._rules = {
            t.name: None if t.every is None else Every.of(t.every)
            for t in sorted(tiers, key=lambda t: NEAR.index(t.name))
        }
        self._board = board
        self._announcements = Announcements(board, "near-due")
        self._steps = StepTimes()
        self._last: dict[str, int] = {}
        self._since = dict.fromkeys(self._rules, time.monotonic())

    def due(self, step: int, root: bool, *, forced: bool) -> tuple[str, ...]:
        """Return the near tiers that the save of `step` goes to; every rank asks at each call.

        Parameters
        ----------
        root
            Whether the root's rule says that the save is due: tiers without a rule follow it.
        forced
            All are due.
        """
        by_clock = self._hear()
        return tuple(
            name
            for name, rule in self._rules.items()
            if forced
            or (root if rule is None else name in by_clock or rule.due(step, self._last.get(name)))
        )

    def saved(self, step: int, names: Collection[str]) -> None:
        """Note that a save began, or that `step` was loaded: time and steps begin anew."""
        for name in names:
            self._last[name] = step
            self._since[name] = time.monotonic()

    def loaded(self, step: int) -> None:
        """Note that the state is that of a checkpoint."""
        self.saved(step, tuple(self._rules))

    def _hear(self) -> set[str]:
        clocked = [n for n, rule in self._rules.items() if rule is not None and rule.by_clock]
        if not clocked:
            return set()
        now = time.monotonic()
        self._steps.call(now, False)
        decide = partial(self._decide, clocked)
        word = self._announcements.hear(decide, self._steps.usual_s)
        self._steps.leave(time.monotonic())
        return set(word.split("+")) - {""}

    def _decide(self, clocked: Sequence[str], said: Collection[str]) -> str:
        """On rank 0: what to announce; a tier that is announced already not again."""
        waiting = {name for word in said for name in word.split("+")}
        now = time.monotonic()
        late = [
            name
            for name in clocked
            if name not in waiting and self._is_late(name, now - self._since[name])
        ]
        return "+".join(late)

    def _is_late(self, name: str, elapsed_s: float) -> bool:
        rule = self._rules[name]
        return rule is not None and rule.minutes is not None and elapsed_s >= 60.0 * rule.minutes
