"""Ranks of this node that have no ring yet: their processes are there, and import what they need.

A rank that is stopped while it imports has nothing to show, and the others wait for it in the
making of the first group. Its process is found by what its launcher has told it, its environment;
that is looked for only while somebody waits so.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptd.agent.processes import Process
from ckptd.monitor.gather import RankNote
from ckptd.monitor.ring.ring import process_birth
from ckptd.monitor.view import Phase, RankView

__all__ = ["Unborn"]

RINGS_VARIABLE = "CKPTD_RINGS"
_WAITS_S = 1.0
_AGAIN_S = 2.0
_MOST_BYTES = 1 << 20
_MOST_WORLD = 1 << 24


class Unborn:
    """Finds such ranks of one folder of rings.

    Parameters
    ----------
    folder
        Where they will put their rings.
    node
        Name of this node.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = os.path.realpath(folder)
        self._node = node
        self._scanned = float("-inf")
        self._found: dict[tuple[int, int], tuple[int, int, int, float]] = {}

    def views(
        self, now: float, born: Sequence[RankView], generation: int
    ) -> Iterator[tuple[RankView, RankNote]]:
        """Yield what is to be seen of ranks that others wait for and that have no ring.

        Parameters
        ----------
        now
            Monotonic seconds.
        born
            What the ranks with rings show.
        generation
            Of those: others are another life of the job.
        """
        here = {view.rank for view in born if view.alive}
        most = max((view.world for view in born), default=0)
        if len(here) >= most or not any(_waits(view, now) for view in born):
            self._found.clear()
            return
        if now - self._scanned >= _AGAIN_S:
            self._scanned = now
            self._scan(now, here, most)
        for (pid, birth), (rank, world, life, seen) in self._found.items():
            state = _state(pid, birth)
            if rank not in here and life == generation and state:
                view = RankView(
                    rank=rank,
                    world=world,
                    node=self._node,
                    pid=pid,
                    at=now,
                    moved=seen,
                    process_state=state,
                    phase=Phase.INIT,
                )
                yield view, RankNote(generation=life)

    def _scan(self, now: float, here: Collection[int], most: int) -> None:
        """Look through all processes; of those that say to be one rank the oldest is it."""
        before, self._found = self._found, {}
        oldest: dict[int, tuple[int, int]] = {}
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            said = _environment(pid)
            if os.path.realpath(said.get(RINGS_VARIABLE, "/")) != self._folder:
                continue
            rank, world = _number(said, "RANK"), _number(said, "WORLD_SIZE")
            if not 0 <= rank < world == most or rank in here:
                continue
            birth = process_birth(pid)
            if birth and (birth, pid) < oldest.get(rank, (birth + 1, 0)):
                oldest[rank] = (birth, pid)
                key, name = (pid, birth), "CKPTD_GENERATION"
                life = _number(said, name if name in said else "TORCHELASTIC_RESTART_COUNT")
                seen = before[key][3] if key in before else now
                self._found[key] = (rank, world, max(life, 0), seen)
        kept = {(pid, birth) for birth, pid in oldest.values()}
        self._found = {key: value for key, value in self._found.items() if key in kept}


def _waits(view: RankView, now: float) -> bool:
    inside = view.alive and view.phase is Phase.INIT and view.pending_group != 0
    return inside and now - view.pending_since > _WAITS_S


def _state(pid: int, birth: int) -> str:
    process = Process.find(pid, birth)
    if process is None:
        return ""
    try:
        return process.state() if process.runs() else ""
    finally:
        process.close()


def _environment(pid: int) -> Mapping[str, str]:
    """Return the environment with which a process was started; empty if that is not ours to see."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(_MOST_BYTES).decode(errors="replace").split("\0")
        return {name: value for name, _, value in (word.partition("=") for word in words)}
    return {}


def _number(said: Mapping[str, str], name: str) -> int:
    text = said.get(name, "")
    return int(text) if text.isdecimal() and int(text) < _MOST_WORLD else -1
