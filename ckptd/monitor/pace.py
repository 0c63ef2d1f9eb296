"""How fast steps are made: who is slow, and whether all of them take longer than they did."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.roles import roles_of
from ckptd.monitor.sheet import GroupInfo
from ckptd.monitor.slow import Roles, SlowLimits
from ckptd.monitor.slowness import Slowness
from ckptd.monitor.stats import Array
from ckptd.monitor.steps import StepBook
from ckptd.monitor.verdict import Verdict

__all__ = ["Pace"]

LONGER = 1.3
"""Steps that take so many times what they took are looked into, if no rank's own time explains."""
NOW_STEPS, BEFORE_STEPS = 10, 40


class Pace:
    """What ranks told of their steps, and what follows from it; no clock.

    Attributes
    ----------
    longer
        Whether steps take longer than they did although nobody's own time does.
    roles
        Whom each rank of the last job is compared with.
    """

    def __init__(self, limits: SlowLimits) -> None:
        self.longer = False
        self.roles = Roles(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._book = StepBook()
        self._slowness = Slowness(limits)
        self._of: tuple[int, ...] = ()

    def add(self, rows: Array, ranks: Array) -> None:
        """Take the steps of a sheet, and its rows of ranks."""
        if not self._book.world:
            self._book.follow(ranks["step"], int(ranks["world"].max()))
        self._book.add(rows, ranks["rank"])

    def forget(self) -> None:
        """Begin anew."""
        self._book.forget(self._book.world)
        self._slowness.forget()
        self.longer = False

    def judge(self, job: Job, names: Mapping[int, GroupInfo]) -> None:
        """Judge what is new since the last time."""
        if not len(job.ranks):
            return
        self._book.follow(job.ranks["step"], job.world)
        self._find_roles(job, names)
        if self._slowness.judge(job, self._book, self.roles):
            self.longer = self._takes_longer(job)

    def _find_roles(self, job: Job, names: Mapping[int, GroupInfo]) -> None:
        """Read roles from groups when anything about them is new: they do not change in between."""
        ranks = job.ranks["rank"]
        of = (job.world, len(ranks), int(ranks.sum()), len(job.groups), len(names))
        if of != self._of:
            self.roles, self._of = roles_of(job, names), of

    def _takes_longer(self, job: Job) -> bool:
        _, own, wall = self._book.last(NOW_STEPS + BEFORE_STEPS, job.ranks["rank"])
        if len(wall) < NOW_STEPS + BEFORE_STEPS or self.verdicts:
            return False
        now, before = _middle(wall[-NOW_STEPS:]), _middle(wall[:-NOW_STEPS])
        mine, was = _middle(own[-NOW_STEPS:]), _middle(own[:-NOW_STEPS])
        return now > LONGER * before and mine - was < (now - before) / 2

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Who is slow."""
        return self._slowness.verdicts

    @property
    def ratio(self) -> Mapping[int, float]:
        """How many times its like's own time each rank takes, by rank."""
        return self._slowness.ratio

    @property
    def self_s(self) -> Mapping[int, float]:
        """Median own time of a step, in seconds, by rank."""
        return self._slowness.self_s


def _middle(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
