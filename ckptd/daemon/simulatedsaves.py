"""Saves of a simulated job: events as checkpointers record them, with times that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckptd.events.clock import now_ns
from ckptd.events.event import AnyEvent, SaveBegun, SaveDurable, SaveId, SaveStaged, Span
from ckptd.events.sink import JsonlSink

__all__ = ["SimulatedSaves"]

EVERY_STEPS = 50
"""Steps from one save to the next."""
RANKS = 64
"""Most ranks that record: more of them would show nothing else."""
_REMOTE_EVERY = 4
_BYTES = 1 << 30
_SECOND = 10**9
_SEED = 20
# Phase, tier, seconds after the begin of the save, and usual seconds.
_SPANS = (
    ("call", "", 0.0, 0.06),
    ("gate_wait", "", 0.35, 0.02),
    ("copy", "", 0.06, 0.3),
    ("write", "local", 0.4, 0.9),
    ("sync", "local", 1.3, 0.2),
    ("commit", "local", 1.5, 0.05),
)
_UPLOAD = (("upload", "remote", 1.6, 1.4), ("commit", "remote", 3.0, 0.1))


class SimulatedSaves:
    """Records a save every `EVERY_STEPS` steps; to be closed.

    Parameters
    ----------
    folder
        Where events go; it exists.
    ranks
        Of the job.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._sink = JsonlSink(folder)
        self._ranks = min(ranks, RANKS)
        self._rng = np.random.default_rng(_SEED)
        self._last = 0

    def reach(self, step: int, generation: int) -> None:
        """Take note of the step that the job has reached: the save that was due is recorded."""
        due = step // EVERY_STEPS * EVERY_STEPS
        if due == self._last:
            return
        self._last = due
        for event in self._events(due, generation):
            self._sink.write(event)

    def close(self) -> None:
        """Close the file."""
        self._sink.close()

    def _events(self, step: int, generation: int) -> Iterator[AnyEvent]:
        remote = step // EVERY_STEPS % _REMOTE_EVERY == 0
        spans = (*_SPANS, *_UPLOAD[: 2 * remote])
        begun = now_ns() - 4 * _SECOND  # it is told when all of it is over
        slowest = int(self._rng.integers(self._ranks))
        for rank in range(self._ranks):
            who = SaveId(step, generation, f"{generation}-{step}", rank).fields()
            yield SaveBegun(**who, at_ns=begun)
            for name, tier, after_s, usual_s in spans:
                times = float(np.exp(0.15 * self._rng.standard_normal())) * (1 + (rank == slowest))
                took = int(usual_s * times * _SECOND)
                yield Span(
                    **who,
                    name=name,
                    tier=tier,
                    start_ns=begun + int(after_s * _SECOND),
                    duration_ns=took,
                    busy_ns=took,
                    bytes=_BYTES if name in ("copy", "write", "upload") and tier != "remote" else 0,
                )
            yield SaveStaged(**who, at_ns=begun + _SECOND // 2, bytes=_BYTES)
            yield SaveDurable(**who, tier="local", at_ns=begun + 2 * _SECOND, bytes=_BYTES)
            if remote:
                yield SaveDurable(**who, tier="remote", at_ns=begun + 4 * _SECOND, bytes=_BYTES)
