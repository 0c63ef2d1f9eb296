"""Cases of several tests that one world of ranks plays, one after the other.

A world costs each of its ranks a third of a second of CPU before it does anything, and PyTorch as
much again for what a process does for the first time.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptd.testing.ranks import rank_outcomes, result_of
from tests.processes import PATIENCE_S

__all__ = ["Played"]

DEADLINE_S = 2.5 * PATIENCE_S
"""For all cases; a test that has them played has a time-out above it."""

Cases = Mapping[str, tuple[Callable[..., object], tuple[object, ...]]]
"""By name: a function of a module, and its arguments."""


class Played:
    """What ranks returned in each case; a failure is that of its case, and ends the world.

    Parameters
    ----------
    nproc
        How many ranks.
    folder
        Gets what they return.
    cases
        What they play, in this order.
    """

    def __init__(self, nproc: int, folder: Path, cases: Cases) -> None:
        self._folder, self._nproc, self._names = folder, nproc, list(cases)
        folder.mkdir()
        self._outcomes = rank_outcomes(
            nproc, _play, str(folder), list(cases.values()), deadline_s=DEADLINE_S
        )

    def of(self, name: str) -> list[Any]:
        """Return what each rank returned in a case; raises what one of them raised there."""
        at, ended = self._names.index(name), self._ended()
        if at > ended:
            pytest.fail(f"{name} was not played, because {self._names[ended]} failed before it")
        if at == ended or ended == len(self._names):
            result_of(self._outcomes, DEADLINE_S)
        return [pickle.loads(path.read_bytes()) for path in self._files(at)]

    def _ended(self) -> int:
        """Return how many cases all ranks have ended."""
        return sum(all(p.exists() for p in self._files(n)) for n in range(len(self._names)))

    def _files(self, number: int) -> list[Path]:
        return [self._folder / f"{number}-{rank}" for rank in range(self._nproc)]


def _play(folder: str, cases: list[tuple[Callable[..., object], tuple[object, ...]]]) -> None:
    for number, (function, args) in enumerate(cases):
        raw = pickle.dumps(function(*args))
        Path(folder, f"{number}-{os.environ['RANK']}").write_bytes(raw)
