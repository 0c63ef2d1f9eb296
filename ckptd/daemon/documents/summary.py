"""The job in a few figures: what GET /job tells, and what its time went into."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from ckptd.daemon.documents.columns import phase_name
from ckptd.daemon.rounds import Board
from ckptd.monitor.verdict import Kind

__all__ = ["Goodput", "summary"]

_STOPS = frozenset(
    {Kind.CRASH, Kind.MISMATCH, Kind.DESYNC, Kind.HANG, Kind.DEADLOCK, Kind.COMM_HANG}
)
_LONGEST_S = 5.0


class Goodput:
    """What the time since the daemon's start went into, in seconds.

    A moment counts as ``stuck`` while an incident is open that stops the job, as ``waiting`` while
    no rank reports, and otherwise as the phase that most ranks are in. Steps that are made again
    after a restart count like others.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last: float | None = None

    def add(self, board: Board) -> None:
        """Count the time since the round before."""
        before, self._last = self._last, board.now
        if before is None:
            return
        self._seconds[_kind_of(board)] += min(board.now - before, _LONGEST_S)

    def document(self) -> dict[str, Any] | None:
        """Return seconds by what they went into, and the share of training; None at first."""
        total = sum(self._seconds.values()) - self._seconds["waiting"]
        if total <= 0:
            return None
        return {
            "seconds": {name: round(s, 3) for name, s in sorted(self._seconds.items())},
            "share": round(self._seconds["TRAIN"] / total, 4),
        }


def _kind_of(board: Board) -> str:
    if any(i.kind in _STOPS for i in board.open):
        return "stuck"
    phases = board.job.ranks["phase"]
    if not len(phases):
        return "waiting"
    return phase_name(int(np.bincount(np.clip(phases, 0, None)).argmax()))


def summary(
    board: Board,
    *,
    name: str,
    version: str,
    up_since: float,
    generation: int,
    goodput: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what GET /job tells."""
    ranks = board.job.ranks
    steps = ranks["step"][ranks["step"] >= 0]
    alive = ranks["alive"] != 0
    codes, counts = np.unique(ranks["phase"], return_counts=True)
    silent = sum(a.silent for a in board.agents)
    return {
        "job": name,
        "version": version,
        "world": board.job.world,
        "ranks_reporting": len(ranks),
        "ranks_alive": int(alive.sum()),
        "nodes": len(board.job.nodes),
        "generation": generation,
        "now": board.at,
        "up_since": up_since,
        "step": {"min": int(steps.min()), "max": int(steps.max())} if len(steps) else None,
        "phases": {phase_name(int(c)): int(n) for c, n in zip(codes, counts, strict=True)},
        "state": "incident" if board.open else ("ok" if len(ranks) else "waiting"),
        "open_incidents": [i.id for i in board.open],
        "agents": {"up": len(board.agents) - silent, "silent": silent},
        "round": {
            "number": board.rounds,
            "cpu_ms": round(board.round_ms, 3),
            "period_s": board.period_s,
        },
        "goodput": goodput,
        "revision": board.revision,
    }
