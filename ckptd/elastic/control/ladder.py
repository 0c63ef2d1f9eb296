"""Levels of a restart: in the process, workers, launchers, the job; after how many it gives up."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.elastic.control.states import ControllerSettings
from ckptd.elastic.membership import Record

RELAUNCH = 2
"""From this level on launchers are restarted."""
DEEPEST = 3
"""At this level the job is submitted again."""


@dataclass
class Ladder:
    """Counts faults, and goes one level deeper for each generation that committed nothing new.

    Attributes
    ----------
    settings
        `ControllerSettings.levels`, `cycles` and `max_restarts`.
    failures
        Faults of the job so far.
    fruitless
        Generations in a row that failed without a new committed step.
    stepped
        The last committed step when the last fault was counted.
    """

    settings: ControllerSettings
    failures: int = 0
    fruitless: int = 0
    stepped: int = 0

    @classmethod
    def after(cls, record: Record | None, settings: ControllerSettings) -> Ladder:
        """Return the ladder of a controller that goes on from the log's last record."""
        if record is None:
            return cls(settings)
        return cls(settings, record.failures, record.fruitless, record.step)

    def failed(self, step: int, *, known: bool = True, mended: bool = False) -> None:
        """Count a fault.

        Parameters
        ----------
        step
            The last committed step.
        known
            Whether it is known what the generation committed: a controller that was away does not
            know, and takes it for progress.
        mended
            Whether a node is left out from now on because of it: the next generation is without a
            likely cause, so that this one says nothing against it.
        """
        self.failures += 1
        if known and not (mended and step <= self.stepped):
            self.fruitless = self.fruitless + 1 if step <= self.stepped else 0
        self.stepped = step

    def credit(self) -> None:
        """Take the generation for one that made progress, whatever it has told."""
        self.stepped = -1

    def submitted(self) -> None:
        """Note that the whole job was restarted, by a scheduler or a person."""
        if self.settings.levels < DEEPEST:
            self.failures = self.fruitless = 0
        else:
            self.fruitless += 1

    def in_vain(self, step: int) -> int:
        """Return `fruitless`, or 0 if a step was committed since the last fault."""
        return self.fruitless if step <= self.stepped else 0

    def level(self, cheapest: int, step: int) -> int:
        """Return the level of the next restart; `cheapest` is the least that can be."""
        return min(cheapest + self.in_vain(step), self.settings.levels)

    def verdict(self, cheapest: int) -> str:
        """Return why the job is given up: the kind of an `Abort`, or nothing."""
        s = self.settings
        if cheapest + self.fruitless - s.levels >= s.cycles:
            return "no-progress"
        if s.max_restarts is not None and self.failures > s.max_restarts:
            return "max-restarts"
        return ""
