"""What is true in a simulated job: the line of committed steps, and what each one consumed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckptd.checkpoint.data.schedule import Schedule
from ckptd.elastic.membership import Record


class Violation(AssertionError):
    """Something that must never be."""


@dataclass
class Line:
    """The checkpoints of a job: steps 1 to ``len(by)``, each with the generation that made it."""

    schedule: Schedule
    by: list[int] = field(default_factory=list)
    refused: int = 0
    """Commits of generations that are not the newest."""
    began: dict[int, int] = field(default_factory=dict)
    """The step from which a generation went on."""
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def committed(self) -> int:
        """The last committed step."""
        return len(self.by)

    def begin(self, record: Record) -> int:
        """Let a generation load the newest step; return it."""
        if record.generation not in self.began:
            if record.step > self.committed:
                raise Violation(f"step {record.step} was promised, {self.committed} are committed")
            self.began[record.generation] = self.committed
            self.records[record.generation] = record
        return self.began[record.generation]

    def commit(self, generation: int, step: int, newest: int) -> bool:
        """Put a generation's steps on the line, unless a newer generation was begun."""
        if generation != newest:
            self.refused += 1
            return False
        # All that lies behind its own steps was there when it began.
        own = [k for k, g in enumerate(self.by) if g == generation]
        if self.committed != self.began[generation] + len(own) or step < self.committed:
            raise Violation(f"step {step} of generation {generation} does not go on from the line")
        self.by += [generation] * (step - self.committed)
        return True

    def check(self) -> None:
        """Look whether each sample was consumed exactly once."""
        seen = [
            ids
            for step, generation in enumerate(self.by)
            for ids in self._consumed(step, generation)
        ]
        wanted = self.schedule.samples(0, self.committed * self.schedule.batch)
        got = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        if not np.array_equal(np.sort(got), np.sort(wanted)):
            raise Violation("samples are missing or were consumed twice")
        # Whatever the world was, a step consumed what it consumes in an uninterrupted run.
        if not np.array_equal(got, wanted):
            raise Violation("samples were consumed in other steps")

    def _consumed(
        self, step: int, generation: int
    ) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        replicas = self.records[generation].shape.dp
        consumed = step * self.schedule.batch
        return [
            ids
            for replica in range(replicas)
            for ids in self.schedule.samples_of(consumed, self.schedule.mine(replica, replicas))
        ]
