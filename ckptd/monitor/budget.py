"""How much may be isolated without asking: so many an hour, and a share of the nodes."""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.monitor.watchsettings import Budget

__all__ = ["Ledger"]

HOUR_S = 3600.0


class Ledger:
    """What was isolated, and when; no clock.

    Parameters
    ----------
    budget
        What is allowed.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._times: list[float] = []
        self._nodes: set[str] = set()

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes isolated so far."""
        return frozenset(self._nodes)

    def take(self, nodes: Iterable[str], total: int, now: float) -> bool:
        """Take the isolation of `nodes` from the budget; return False, taking nothing, if too much.

        Parameters
        ----------
        nodes
            Names. Those isolated before cost nothing again.
        total
            Nodes of the job.
        now
            The moment, seconds.
        """
        new = set(nodes) - self._nodes
        self._times = [t for t in self._times if now - t < HOUR_S]
        share = max(int(self._budget.share * total), 1)
        if len(self._times) + len(new) > self._budget.per_hour:
            return False
        if len(self._nodes) + len(new) > share:
            return False
        self._times += [now] * len(new)
        self._nodes |= new
        return True
