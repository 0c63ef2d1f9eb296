"""Sums over collectives by operation, group and size: bus bandwidth, buckets of sizes and times.

Rows are added up where the calls are seen, sent as increments, and added up again where they
arrive. A report says after which one its increments begin, so that one that was lost, or whose
answer was, is neither missed nor counted twice.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptd.monitor.stats import Array

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 30)
"""Bounds of the size buckets in bytes; what is larger has one more."""
TIMES_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the time buckets in seconds; what is longer has one more."""
CALLS, BYTES, BUS_BYTES, SECONDS, TIMES = 0, 1, 2, 3, 4
"""Columns of ``values``: collectives, their bytes; of those whose time is known, the bytes on the
bus and the seconds; from the last on, how many fell into each time bucket."""

COLLECTIVE: np.dtype[Any] = np.dtype(
    [
        ("op", "S32"),
        ("kind", "S24"),  # of the group
        ("size", "<u4"),  # bucket
        ("values", "<f8", (TIMES + len(TIMES_S) + 1,)),
    ]
)
"""One row for each operation, kind of group and size bucket that has increments."""

WORD = re.compile(rb"[A-Za-z0-9_.:-]*")
"""Characters of the name of an operation or a kind."""
OTHER, UNKNOWN = b"other", b"unknown"

Key = tuple[bytes, bytes, int]

_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    # The recorder knows the size of one rank's part of these.
    "gather": lambda n: n - 1,
    "scatter": lambda n: n - 1,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "p2p": lambda n: 1,
    "p2p_any": lambda n: 1,
}
_FORMS = ("_coalesced", "_single")


def bus_factor(op: str, size: int) -> float:
    """Return how many bytes the busiest link carries for each byte of a call; 0 if unknown.

    As nccl-tests has it (doc/PERFORMANCE.md there), so that figures can be compared with the speed
    of the hardware whatever the operation and the number of ranks.
    """
    for form in _FORMS:
        op = op.removesuffix(form)
    if size < 2 and op != "p2p_any":
        return 0.0
    return float(_FACTORS[op](size)) if op in _FACTORS else 0.0


def word(text: str, most: int) -> bytes:
    """Return the first word of a text as a label may be: plain letters, `most` bytes at most."""
    first = text.split(" ", 1)[0].encode("ascii", "replace")[:most]
    return bytes(re.sub(rb"[^A-Za-z0-9_.:-]", b"_", first))


class Totals:
    """Adds up rows by their key; beyond `most` of them, those of further operations are one.

    Attributes
    ----------
    keys
        In the order of `values`; only ever grows.
    """

    def __init__(self, most: int) -> None:
        self.keys: list[Key] = []
        self._most = most
        self._at: dict[Key, int] = {}
        self._values = np.zeros((16, COLLECTIVE["values"].shape[0]))

    @property
    def values(self) -> Array:
        """One row for each key, columns as of `COLLECTIVE`; changes with every `add`."""
        return self._values[: len(self.keys)]

    def add(self, keys: Iterable[Key], values: Array) -> None:
        """Add one row for each key; values may be negative where too much was added before."""
        at = [self._place(key) for key in keys]
        np.add.at(self._values, at, values)

    def _place(self, key: Key) -> int:
        at = self._at.get(key)
        if at is not None:
            return at
        if len(self.keys) >= self._most:
            key = (OTHER, OTHER, min(key[2], len(SIZES)))
            if key in self._at:
                return self._at[key]
        if len(self.keys) == len(self._values):
            self._values = np.concatenate([self._values, np.zeros_like(self._values)])
        self._at[key] = len(self.keys)
        self.keys.append(key)
        return self._at[key]


class Outbox:
    """The increments of some totals that the daemon has not taken yet.

    Parameters
    ----------
    totals
        The totals; may grow meanwhile.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._after = 0
        self._sent = np.zeros_like(totals.values)
        self._last = (0, self._sent)

    def take(self, number: int, taken: int) -> tuple[Array, int]:
        """Return the rows for a report, and the number of the report after which they begin.

        Parameters
        ----------
        number
            Of the report that they go with.
        taken
            Of the last report that is known to have been taken.
        """
        if taken == self._last[0]:
            self._after, self._sent = self._last
        values = self._totals.values.copy()
        self._last = (number, values)
        new = values.copy()
        new[: len(self._sent)] -= self._sent
        at = np.flatnonzero(new.any(axis=1))
        return _rows([self._totals.keys[i] for i in at.tolist()], new[at]), self._after


def _rows(keys: list[Key], values: Array) -> Array:
    out = np.zeros(len(keys), COLLECTIVE)
    for column, name in enumerate(("op", "kind", "size")):
        out[name] = [key[column] for key in keys]
    out["values"] = np.maximum(values, 0.0)
    return out


@dataclass
class _LastReport:
    """The last report of a source."""

    number: int
    after: int
    rows: Array


class CallTable:
    """Adds up the increments of many sources. Reports must be newer than those before.

    Parameters
    ----------
    most
        Keys, and twice that many sources, that are remembered.
    """

    def __init__(self, most: int = 4096) -> None:
        self.totals = Totals(most)
        self._most = 2 * most
        self._sources: OrderedDict[str, _LastReport] = OrderedDict()
        self._lock = threading.Lock()
        self._marks: list[tuple[float, Array]] = []

    def take(self, source: str, number: int, after: int, rows: Array, now: float) -> None:
        """Add the increments of a report that were not added before.

        Parameters
        ----------
        source, number
            Of the report.
        after
            Number of the report after which its increments begin.
        rows
            Of `COLLECTIVE`, checked.
        now
            Monotonic seconds.
        """
        before = self._sources.pop(source, None)
        if before is not None and number <= before.number:
            self._sources[source] = before
            return
        self._sources[source] = _LastReport(number, after, rows)
        if len(self._sources) > self._most:
            self._sources.popitem(last=False)
        with self._lock:
            self._mark(now)
            if before is None or after >= before.number:
                self._add(rows, 1.0)
            elif after == before.after:  # its sender does not know that the last one arrived
                self._add(before.rows, -1.0)
                self._add(rows, 1.0)

    def _add(self, rows: Array, sign: float) -> None:
        if len(rows):
            self.totals.add(rows[["op", "kind", "size"]].tolist(), sign * rows["values"])

    def _mark(self, now: float) -> None:
        if not self._marks or now - self._marks[-1][0] >= _MARK_S:
            self._marks = [*self._marks[-1:], (now, self.totals.values.copy())]

    def read(self) -> tuple[list[Key], Array, Array]:
        """Return keys, totals, and what of these came in the last half to whole minute."""
        with self._lock:
            values = self.totals.values.copy()
            recent = values.copy()
            if self._marks:
                old = self._marks[0][1]
                recent[: len(old)] -= old
            return list(self.totals.keys), values, recent


_MARK_S = 30.0
