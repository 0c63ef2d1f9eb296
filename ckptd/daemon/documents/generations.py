"""Lives of the job, one after another: when each began and ended, and why."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ckptd.daemon.history import History
from ckptd.daemon.rounds import Board
from ckptd.monitor.report import Sheet

__all__ = ["Generation", "Generations"]

_MOST = 1000


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of the job.

    Attributes
    ----------
    generation, world
        Its number, and its ranks.
    started, ended
        When its first sheet came, and the first of a later one; seconds since 1970.
    why
        Id of the incident before its end; empty if there was none.
    split
        Seconds from the first sign of that incident until it was told (``detect_s``), and until
        the next generation reported (``restart_s``).
    """

    generation: int
    world: int
    started: float
    ended: float | None = None
    why: str = ""
    split: dict[str, float] = msgspec.field(default_factory=dict)


class Generations:
    """Follows the generations that sheets name; the newest thousand are known.

    Parameters
    ----------
    history
        Where they are kept, and taken from at the start.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._known = {
            int(row[0]): Generation(
                generation=int(row[0]),
                world=int(row[1] or 0),
                started=float(row[2] or 0.0),
                ended=row[3],
                why=str(row[4] or ""),
            )
            for row in history.generations()
        }
        self._seen: dict[int, int] = {}
        self.newest = max(self._known, default=0)

    def see(self, sheet: Sheet) -> None:
        """Note which generation a sheet's ranks are of."""
        ranks = sheet.table("ranks")
        if len(ranks):
            newest = int(ranks["generation"].max())
            if newest >= self.newest:
                self._seen[newest] = int(ranks["world"].max())

    def judge(self, board: Board) -> None:
        """Note what sheets have shown since the round before."""
        seen, self._seen = self._seen, {}
        if not seen:
            return
        newest, world = max(seen.items())
        before = self._known.get(newest)
        if before is None:
            self._begin(newest, world, board)
        elif before.world != world:
            self._put(msgspec.structs.replace(before, world=world))

    def _begin(self, generation: int, world: int, board: Board) -> None:
        now = time.time()
        last = self._known.get(self.newest)
        if last is not None and last.ended is None:
            why = max(
                (i for i in board.incidents if i.opened_at >= last.started),
                key=lambda i: i.opened_at,
                default=None,
            )
            split = {"detect_s": why.latency_s, "restart_s": now - why.opened_at} if why else {}
            self._put(
                msgspec.structs.replace(last, ended=now, why=why.id if why else "", split=split)
            )
        self.newest = generation
        self._put(Generation(generation=generation, world=world, started=now))
        while len(self._known) > _MOST:
            del self._known[min(self._known)]

    def _put(self, one: Generation) -> None:
        self._known[one.generation] = one
        self._history.put_generation(one.generation, one.world, one.started, one.ended, one.why)

    def document(self) -> dict[str, Any]:
        """Return what GET /elastic tells."""
        known = sorted(self._known.copy().items())
        return {"generations": [msgspec.to_builtins(one) for _, one in known]}
