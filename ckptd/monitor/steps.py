"""What ranks told of their last steps: a bounded table, whoever tells what when."""

from __future__ import annotations

import numpy as np

from ckptd.monitor.stats import Array
from ckptd.monitor.view import Phase

__all__ = ["StepBook"]

AHEAD = 1 << 14
"""A step so far beyond those of most ranks is a lie or a damage."""

MOST_CELLS = 1 << 24
"""Cells of each table: what bounds its memory, whatever world a sheet claims."""


class StepBook:
    """Own time and whole time of the last steps of phase TRAIN, of each rank.

    Parameters
    ----------
    depth
        Steps that are kept.

    Attributes
    ----------
    newest
        Highest step told; -1 before the first.
    """

    def __init__(self, depth: int = 160) -> None:
        self._most = depth
        self.forget(0)

    def forget(self, world: int) -> None:
        """Begin anew, with a world of another size or other steps."""
        self.world = world if 8 * world <= MOST_CELLS else 0
        self._told = world
        self.newest = -1
        self._usual = -1
        self._depth = min(self._most, MOST_CELLS // max(self.world, 1))
        self._step = np.full(self._depth, -1)
        self._own = np.full((self._depth, self.world), np.nan, np.float32)
        self._wall = np.full((self._depth, self.world), np.nan, np.float32)

    def follow(self, steps: Array, world: int) -> None:
        """Take note of the steps that ranks are in; after a step back all begins anew."""
        known = steps[steps >= 0]
        self._usual = int(np.median(known)) if len(known) else -1
        back = 0 <= self._usual < self.newest - self._depth
        if world != self._told or back:
            usual = self._usual
            self.forget(world)
            self._usual = usual

    def add(self, rows: Array, ranks: Array) -> None:
        """Take rows of `ckptd.monitor.sheet.STEP`; `ranks` are the ranks of the sheet's rows."""
        rows = rows[rows["phase"] == Phase.TRAIN]
        if self._usual >= 0:
            rows = rows[rows["step"] <= self._usual + AHEAD]
        rank = ranks[rows["row"]]
        # Of a job that is not joined yet the size is what this sheet shows.
        kept = (rank < self.world) & (rows["step"] > self.newest - self._depth)
        rows, rank = rows[kept], rank[kept]
        if not len(rows):
            return
        for step in np.unique(rows["step"]):
            self._make(int(step))
        place = rows["step"] % self._depth
        mine = self._step[place] == rows["step"]
        self._own[place[mine], rank[mine]] = rows["self_s"][mine]
        self._wall[place[mine], rank[mine]] = rows["wall_s"][mine]

    def _make(self, step: int) -> None:
        place = step % self._depth
        if step > self._step[place]:
            self._step[place] = step
            self._own[place], self._wall[place] = np.nan, np.nan
            self.newest = max(self.newest, step)

    def last(self, count: int, ranks: Array, share: float = 0.8) -> tuple[Array, Array, Array]:
        """Return the last steps of which most of `ranks` told.

        Returns
        -------
        steps, own, wall
            Numbers rising, and seconds of shape (steps, ranks), NaN where not told.
        """
        order = np.argsort(self._step, kind="stable")
        order = order[self._step[order] >= 0]
        told = ranks < self.world
        if not len(order) or not told.any():
            empty = np.zeros((0, len(ranks)))
            return np.zeros(0, np.int64), empty, empty
        columns = ranks[told]
        some = np.isfinite(self._own[np.ix_(order, columns)]).mean(1) >= share
        order = order[some][-count:]
        own = np.full((len(order), len(ranks)), np.nan)
        wall = own.copy()
        own[:, told] = self._own[np.ix_(order, columns)]
        wall[:, told] = self._wall[np.ix_(order, columns)]
        return self._step[order], own, wall
