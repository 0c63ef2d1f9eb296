"""Checksums and gradient norms as ranks tell them, until a step can be judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from ckptd.monitor.corruption import norm_outliers, replica_differences
from ckptd.monitor.sheet import SUM
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Verdict

__all__ = ["SumBook"]

CHECKSUM, NORM = 0, 1
STEPS = 8
"""Steps that are waited for at a time, and steps of norms that are looked at together."""
NORM_STEPS = 3
"""A rank must be out of line in so many steps in a row: one hard batch is not a fault."""
NORMS_LATE = 64
"""Norms come of every step. No rank is so many steps late: then steps are made anew."""
LATE_S = 3.0
"""So long after the last word of a step, nobody else is waited for."""


class SumBook:
    """What was told of the last steps; no clock."""

    def __init__(self) -> None:
        self.mismatches = 0
        """Steps and sets of replicas whose checksums were not the same."""
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._sums: dict[int, list[tuple[Array, Array]]] = {}
        self._heard: dict[int, float] = {}
        self._norms: dict[int, list[tuple[Array, Array]]] = {}
        self._judged = -1
        self._judged_norm = -1
        self._lately: deque[int] = deque(maxlen=8 * STEPS)
        self._behind: set[int] = set()

    def add(self, rows: Array, ranks: Array, now: float) -> None:
        """Take rows of `ckptd.monitor.sheet.SUM`; `ranks` are the ranks of the sheet's rows."""
        if self._went_back(rows):
            self.forget()
        for step in np.unique(rows["step"]).tolist():
            here = rows[rows["step"] == step]
            for what, book, done in (
                (CHECKSUM, self._sums, self._judged),
                (NORM, self._norms, self._judged_norm),
            ):
                mine = here[here["what"] == what]
                if len(mine) and step > done:
                    book.setdefault(step, []).append((mine, ranks[mine["row"]]))
                    self._heard[step] = now
        for book in (self._sums, self._norms):
            for step in sorted(book)[: -2 * STEPS]:
                del book[step]

    def _went_back(self, rows: Array) -> bool:
        """Whether steps are made anew, or the last that was judged was a lie or a damage.

        Then two checks come of steps before it that were not judged lately, only late; or norms
        come of steps long ago.
        """
        norms = rows["step"][rows["what"] == NORM]
        if len(norms) and int(norms.max()) < self._judged_norm - NORMS_LATE:
            return True
        steps = set(rows["step"][rows["what"] == CHECKSUM].tolist())
        self._behind |= {s for s in steps if s <= self._judged} - set(self._lately)
        return len(self._behind) > 1

    def judge(self, now: float) -> Iterator[Verdict]:
        """Yield verdicts on steps of which nothing further is to be expected."""
        for step in sorted(self._sums):
            if self._complete(step, self._sums, now):
                rows, ranks = _whole(self._sums.pop(step))
                self._judged = max(self._judged, step)
                self._lately.append(step)
                self.mismatches += _differing(rows)
                yield from replica_differences(rows["set"], ranks, rows["value"], step)
        self._heard = {s: t for s, t in self._heard.items() if s in self._sums or s in self._norms}
        yield from self._judge_norms(now)

    def _complete(self, step: int, book: dict[int, list[tuple[Array, Array]]], now: float) -> bool:
        # A later step of everybody's, or silence: whoever has not told by then does not.
        later = max(book) > step and now - self._heard.get(step, now) > LATE_S / 3
        return later or now - self._heard.get(step, now) > LATE_S

    def _judge_norms(self, now: float) -> Iterator[Verdict]:
        ready = [s for s in sorted(self._norms) if self._complete(s, self._norms, now)]
        if len(ready) < NORM_STEPS or ready[-1] <= self._judged_norm:
            return
        self._judged_norm = ready[-1]
        last = ready[-NORM_STEPS:]
        tables = [_whole(self._norms[s]) for s in last]
        for s in ready[: -NORM_STEPS + 1]:
            del self._norms[s]
        for group in np.unique(tables[-1][0]["set"]).tolist():
            yield from _outliers(tables, group)


def _outliers(tables: list[tuple[Array, Array]], group: int) -> Iterator[Verdict]:
    told = [
        dict(zip(ranks[mine].tolist(), rows["value"][mine].view("<f8").tolist(), strict=True))
        for rows, ranks in tables
        for mine in [rows["set"] == group]
    ]
    ranks = sorted(set.intersection(*(set(t) for t in told)))
    if len(ranks) >= 3:
        yield from norm_outliers(ranks, np.array([[t[r] for r in ranks] for t in told]))


def _differing(rows: Array) -> int:
    """Return in how many sets not all values are the same."""
    sets = np.unique(np.unique(rows[["set", "value"]])["set"], return_counts=True)[1]
    return int((sets > 1).sum())


def _whole(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    rows = np.frombuffer(b"".join(r.tobytes() for r, _ in parts), SUM)
    return rows, np.concatenate([ranks for _, ranks in parts])
