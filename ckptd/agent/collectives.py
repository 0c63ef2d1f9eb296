"""What all collectives of a node's ranks add up to: calls, bytes, time.

A collective is counted on the node of its first member. Its time is that of the member that waited
least: the last one to arrive, of those on this node.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from ckptd.agent.rings import Ring
from ckptd.monitor.collectives import (
    SIZES,
    TIMES,
    TIMES_S,
    UNKNOWN,
    Key,
    Outbox,
    Totals,
    bus_factor,
    word,
)
from ckptd.monitor.ring.layout import Counter, RecorderState
from ckptd.monitor.stats import Array
from ckptd.monitor.view import CALL, CallFlag

__all__ = ["Collectives"]

_MOST_KEYS = 256
_MOST_WAITING = 8192
_WAIT_S = 60.0
"""So long a collective waits for what the other members on this node say of it."""
_MEMBER = np.dtype(
    [
        ("group", "<u8"),
        ("seq", "<i8"),
        ("first", "?"),  # the group's first member
        ("op", "<u4"),
        ("bytes", "<f8"),
        ("seconds", "<f8"),  # NaN is unknown
        ("since", "<f8"),
    ]
)
_Group = tuple[bytes, int]
"""Kind and size of a group."""


@dataclass
class _Place:
    """How far the calls of one ring have been taken."""

    seen: int = 0
    open: Array = field(default_factory=lambda: np.zeros(0, CALL))
    numbers: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    groups: dict[int, bool] = field(default_factory=dict)  # whether it is the first member
    known: tuple[int, int] = (0, 0)
    completed: dict[int, int] = field(default_factory=dict)
    row: int = 0  # tells it from others


class Collectives:
    """Adds up collectives; `add` what each ring shows, `join` now and then, `take` for a sheet."""

    def __init__(self) -> None:
        self._places: dict[Ring, _Place] = {}
        self._groups: dict[int, _Group] = {}
        self._made = 0
        # Groups whose first member is on this node, whose ring that is, and how many others are.
        self._led: Array = np.zeros(0, np.uint64)
        self._leaders: Array = np.zeros(0, np.int64)
        self._members: Array = np.zeros(0, np.int64)
        self._texts: dict[int, str] = {}
        self._new: list[tuple[int, Array]] = []
        self._waiting: Array = np.zeros(0, _MEMBER)
        self._totals = Totals(_MOST_KEYS)
        self._outbox = Outbox(self._totals)
        self._kinds: dict[tuple[int, int], tuple[bytes, bytes, float]] = {}

    def keep_only(self, rings: Collection[Ring]) -> None:
        """Know nothing more of rings that are gone; what they told stays."""
        self._places = {ring: place for ring, place in self._places.items() if ring in rings}
        self._count_members()

    # --- what rings show ------------------------------------------------------------------------

    def add(self, ring: Ring, numbers: Array, calls: Array) -> None:
        """Take calls with their numbers; errors as of `RingReader`.

        Parameters
        ----------
        numbers, calls
            As of `RingReader.calls_since`: all since the last time, and those that had not ended.
        """
        place = self._place(ring)
        fresh = numbers > place.seen
        if len(place.numbers):
            fresh |= np.isin(numbers, place.numbers)
            lost = ~np.isin(place.numbers, numbers)
            if lost.any():  # nobody will ever see them end
                self._new.append((place.row, place.open[lost]))
        going = np.isnan(calls["end"])
        going &= fresh
        place.numbers, place.open = numbers[going], calls[going]
        self._new.append((place.row, calls[fresh ^ going]))
        place.seen = max(place.seen, int(numbers[-1]))

    def count(self, ring: Ring) -> None:
        """Take the counts of a rank of which nobody sees single calls."""
        if ring.counters[Counter.STATE] != RecorderState.COUNTERS:
            return
        place = self._place(ring)
        rows = ring.reader.group_rows()
        for ident, done in rows[["ident", "completed"]].tolist():
            if place.groups.get(ident):
                done = min(done, 1 << 53)
                more = max(done - place.completed.get(ident, 0), 0)
                place.completed[ident] = done
                values = np.zeros((1, TIMES + len(TIMES_S) + 1))
                values[0, 0] = more
                self._totals.add([(UNKNOWN, self._groups[ident][0], 0)], values)

    def _place(self, ring: Ring) -> _Place:
        place = self._places.get(ring)
        if place is None:
            self._made += 1
            place = self._places[ring] = _Place(row=self._made)
        counts = (ring.counters[Counter.GROUPS], ring.counters[Counter.TEXTS])
        if counts != place.known:
            place.known = counts
            self._learn(ring, place)
        return place

    def _learn(self, ring: Ring, place: _Place) -> None:
        """Read groups and texts that are new."""
        self._texts |= ring.reader.texts()
        for row in ring.reader.group_rows():
            ident = int(row["ident"])
            place.groups[ident] = int(row["me"]) == 0
            kind = word(bytes(row["kind"]).decode(errors="replace"), 24)
            self._groups[ident] = (kind, int(row["size"]))
        self._kinds.clear()
        self._count_members()

    def _count_members(self) -> None:
        counts: Counts[int] = Counts()
        leaders: dict[int, int] = {}
        for place in self._places.values():
            counts.update(list(place.groups))
            leaders.update((ident, place.row) for ident, first in place.groups.items() if first)
        led = sorted(leaders)
        self._led = np.array(led, np.uint64)
        self._leaders = np.array([leaders[ident] for ident in led])
        self._members = np.array([counts[ident] for ident in led])

    # --- many members, one collective -----------------------------------------------------------

    def join(self, now: float) -> None:
        """Add up the collectives of which all members here have told; now in monotonic seconds."""
        if not self._new:
            return
        rows = np.concatenate([self._waiting, self._told(now)])
        if not len(rows):
            return
        rows = rows[np.lexsort((~rows["first"], rows["seq"], rows["group"]))]
        same = (rows["group"][1:] == rows["group"][:-1]) & (rows["seq"][1:] == rows["seq"][:-1])
        starts = np.flatnonzero(np.append(True, ~same))
        counts = np.diff(np.append(starts, len(rows)))
        heads = rows[starts]
        done = counts >= self._members_of(heads["group"])
        done |= np.minimum.reduceat(rows["since"], starts) < now - _WAIT_S
        if len(rows) - int(counts[done].sum()) > _MOST_WAITING:
            done[:] = True
        self._waiting = rows[np.repeat(~done, counts)]
        heads["seconds"] = np.fmin.reduceat(rows["seconds"], starts)
        self._add_up(heads[done & heads["first"]])

    def _told(self, now: float) -> Array:
        """Return what came since, of groups whose first member is here."""
        # Bytes are put together, and not tables: numpy copies tables column by column.
        calls = np.frombuffer(b"".join([c.tobytes() for _, c in self._new]), CALL)
        places = np.repeat([row for row, _ in self._new], [len(c) for _, c in self._new])
        self._new.clear()
        if not len(self._led):
            return np.zeros(0, _MEMBER)
        at = np.minimum(np.searchsorted(self._led, calls["group"]), len(self._led) - 1)
        led = self._led[at] == calls["group"]
        if not led.all():
            calls, places, at = calls[led], places[led], at[led]
        rows = np.zeros(len(calls), _MEMBER)
        for name in ("group", "seq", "op"):
            rows[name] = calls[name]
        rows["first"] = self._leaders[at] == places
        rows["bytes"] = np.maximum(calls["bytes"], 0)
        failed = calls["flags"] & int(CallFlag.FAILED) != 0
        rows["seconds"] = np.where(failed, np.nan, np.maximum(calls["end"] - calls["start"], 0))
        rows["since"] = now
        return rows

    def _members_of(self, groups: Array) -> Array:
        """Return how many members of groups are on this node; none where the first has gone."""
        if not len(self._led):
            return np.zeros(len(groups), np.int64)
        at = np.minimum(np.searchsorted(self._led, groups), len(self._led) - 1)
        return np.where(self._led[at] == groups, self._members[at], 0)

    def _add_up(self, rows: Array) -> None:
        if not len(rows):
            return
        groups, group = np.unique(rows["group"], return_inverse=True)
        ops, op = np.unique(rows["op"], return_inverse=True)
        size = np.searchsorted(SIZES, rows["bytes"])
        codes = (group * len(ops) + op) * (len(SIZES) + 1) + size
        codes, code = np.unique(codes, return_inverse=True)
        keys: list[Key] = []
        factors = []
        for place in codes.tolist():
            which, bucket = divmod(place, len(SIZES) + 1)
            name, kind, factor = self._kind(int(ops[which % len(ops)]), groups[which // len(ops)])
            keys.append((name, kind, bucket))
            factors.append(factor)
        self._totals.add(keys, _values(rows, code, np.array(factors)))

    def _kind(self, op: int, group: int) -> tuple[bytes, bytes, float]:
        """Return operation and kind of group as labels, and the factor of the bus."""
        found = self._kinds.get((op, int(group)))
        if found is None:
            kind, size = self._groups.get(int(group), (b"", 0))
            name = word(self._texts.get(op, ""), 32) or UNKNOWN
            found = (name, kind, bus_factor(name.decode(), size))
            self._kinds[op, int(group)] = found
        return found

    # --- what is told ---------------------------------------------------------------------------

    def take(self, number: int, taken: int) -> tuple[Array, int]:
        """Return rows of `COLLECTIVE` for sheet `number`; see `Outbox.take`."""
        return self._outbox.take(number, taken)


def _values(rows: Array, code: Array, factors: Array) -> Array:
    """Return the values of `COLLECTIVE` of each code."""
    number, columns = len(factors), len(TIMES_S) + 1
    seconds = rows["seconds"]
    timed = ~np.isnan(seconds)
    out = np.zeros((number, TIMES + columns))
    out[:, 0] = np.bincount(code, minlength=number)
    out[:, 1] = np.bincount(code, rows["bytes"], minlength=number)
    code, seconds = code[timed], seconds[timed]
    out[:, 2] = np.bincount(code, rows["bytes"][timed] * factors[code], minlength=number)
    out[:, 3] = np.bincount(code, seconds, minlength=number)
    times = code * columns + np.searchsorted(TIMES_S, seconds)
    out[:, TIMES:] = np.bincount(times, minlength=number * columns).reshape(number, columns)
    return out
