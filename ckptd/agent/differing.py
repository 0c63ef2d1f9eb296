"""Calls that ranks of one node make differently, also where nobody gets stuck over it.

A sheet tells the last calls of a rank. One that differs and passes, as with another reduction,
would be gone from them before the next sheet; who made it is told with many calls instead.
"""

from __future__ import annotations

import numpy as np

from ckptd.monitor.stats import Array, mix
from ckptd.monitor.view import CallFlag

__all__ = ["Differing"]

_KEPT = 1024
"""Calls of a rank that are remembered: those that others of the node may not have made yet."""

_SEEN: np.dtype[np.void] = np.dtype([("call", "<u8"), ("op", "<u8"), ("whole", "<u8")])


class Differing:
    """Compares the calls of ranks with each other; `add` as they are read, `some` for a sheet."""

    def __init__(self) -> None:
        self._seen: dict[int, Array] = {}
        self._told: dict[int, int] = {}
        self._fresh = False

    def add(self, rank: int, calls: Array) -> None:
        """Add calls of a rank; those that were added before may be among them."""
        if not len(calls):
            return
        new = np.zeros(len(calls), _SEEN)
        new["op"] = calls["op"]
        new["call"] = mix(calls["group"], calls["seq"])
        new["whole"] = mix(calls["op"], calls["dtype"], calls["bytes"], calls["root"])
        new["whole"][(calls["flags"] & CallFlag.VARIABLE) != 0] = 0
        before = self._seen.get(rank)
        both = new if before is None else np.concatenate([before, new])
        self._seen[rank] = both[-_KEPT:]
        self._fresh = True

    def forget(self, rank: int) -> None:
        """Know nothing more of a rank."""
        self._seen.pop(rank, None)

    def some(self) -> bool:
        """Whether ranks make a call differently, of which so many had not been told before.

        What others say about it may come later, and is news as well.
        """
        if not self._fresh or len(self._seen) < 2:
            return False
        self._fresh = False
        rows = np.concatenate(list(self._seen.values()))
        rows = rows[np.argsort(rows["call"])]
        starts = np.flatnonzero(np.append(True, rows["call"][1:] != rows["call"][:-1]))
        sized = np.minimum.reduceat(rows["whole"], starts) > 0
        apart = _apart(rows["op"], starts) | (sized & _apart(rows["whole"], starts))
        if not apart.any():
            return False
        counts = np.diff(np.append(starts, len(rows)))[apart].tolist()
        told = dict(zip(rows["call"][starts[apart]].tolist(), counts, strict=True))
        news = any(self._told.get(call, 0) < count for call, count in told.items())
        self._told = told
        return news


def _apart(values: Array, starts: Array) -> Array:
    out: Array = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
    return out
