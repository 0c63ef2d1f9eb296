"""Sums of a node between two reports: collectives, checksums, gaps, steps; calls that differ.

In it: how many kinds, samples and steps are kept.

A report has the last few calls of a rank only. Here every call is read once, so that no figure is
estimated from a sample.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter as Counts
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckptd.errors import CkptdError, NotFoundError
from ckptd.monitor.agent.rings import Ring
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
from ckptd.monitor.job import CALL, JOINED_CALL, CallFlag, Phase
from ckptd.monitor.report import GAP, STEP, SUM
from ckptd.monitor.ring import Counter, RecorderState
from ckptd.monitor.rules.slow import self_times
from ckptd.monitor.samples import SampleReader, samples_path
from ckptd.monitor.stats import Array, mix

# --- collectives ----------------------------------------------------------------------------------


_MOST_KEYS = 256
_MOST_WAITING = 8192
_WAIT_S = 60.0
"""A collective waits for this long for the other members on this node."""
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
class _RingCalls:
    """How far the calls of one ring have been taken."""

    seen: int = 0
    open: Array = field(default_factory=lambda: np.zeros(0, CALL))
    numbers: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    groups: dict[int, bool] = field(default_factory=dict)  # whether it is the first member
    known: tuple[int, int] = (0, 0)
    completed: dict[int, int] = field(default_factory=dict)
    row: int = 0  # tells it from others


class Collectives:
    """Adds up collectives; `add` what each ring shows, `join` now and then, `take` for a report."""

    def __init__(self) -> None:
        self._places: dict[Ring, _RingCalls] = {}
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
        """Forget rings that are gone; what they added stays."""
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
            if lost.any():  # their end will never be seen
                self._new.append((place.row, place.open[lost]))
        going = np.isnan(calls["end"])
        going &= fresh
        place.numbers, place.open = numbers[going], calls[going]
        self._new.append((place.row, calls[fresh ^ going]))
        place.seen = max(place.seen, int(numbers[-1]))

    def count(self, ring: Ring) -> None:
        """Take the counts of a rank whose single calls are not recorded."""
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

    def _place(self, ring: Ring) -> _RingCalls:
        place = self._places.get(ring)
        if place is None:
            self._made += 1
            place = self._places[ring] = _RingCalls(row=self._made)
        counts = (ring.counters[Counter.GROUPS], ring.counters[Counter.TEXTS])
        if counts != place.known:
            place.known = counts
            self._learn(ring, place)
        return place

    def _learn(self, ring: Ring, place: _RingCalls) -> None:
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
        """Add up the collectives whose members here have all ended them; `now` is monotonic."""
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
        untimed = calls["flags"] & int(CallFlag.FAILED | CallFlag.UNSEEN) != 0
        rows["seconds"] = np.where(untimed, np.nan, np.maximum(calls["end"] - calls["start"], 0))
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

    # --- increments ----------------------------------------------------------------------------

    def take(self, number: int, taken: int) -> tuple[Array, int]:
        """Return rows of `COLLECTIVE` for report `number`; see `Outbox.take`."""
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


# --- calls that differ between ranks --------------------------------------------------------------


_KEPT = 1024
"""Calls of a rank that are remembered: those that others of the node may not have made yet."""

_SEEN: np.dtype[np.void] = np.dtype([("call", "<u8"), ("op", "<u8"), ("whole", "<u8")])


class Differing:
    """Compares the calls of ranks with each other; `add` as they are read, `some` for a report."""

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


# --- checksums and norms --------------------------------------------------------------------------


_log = logging.getLogger("ckptd.monitor")
_MOST_SAMPLES = 1 << 16


class RingSamples:
    """Gathers checksums and norms; `add` now and then, `take` for a report."""

    def __init__(self) -> None:
        self._readers: dict[Ring, SampleReader | None] = {}
        self._rows: list[tuple[int, Array]] = []
        self._count = 0

    def close(self) -> None:
        """Close all files."""
        self.keep_only(())

    def keep_only(self, rings: Collection[Ring]) -> None:
        """Close the files of ranks that are gone."""
        here = set(rings)
        for ring in [ring for ring in self._readers if ring not in here]:
            reader = self._readers.pop(ring)
            if reader is not None:
                reader.close()

    def add(self, ring: Ring) -> None:
        """Take what a rank has written since; a file that cannot be read is logged, and left."""
        reader = self._readers.get(ring)
        if reader is None and ring in self._readers:
            return  # it was logged
        try:
            if reader is None:
                reader = self._opened(ring)
            new = reader.new()
        except NotFoundError:
            return  # it takes none, or none yet
        except CkptdError as error:
            _log.warning("samples of rank %d are not read: %s", ring.rank, error)
            if reader is not None:
                reader.close()
            self._readers[ring] = None
            return
        # Samples that are not fetched are dropped: a daemon that comes back wants new ones.
        if len(new) and self._count + len(new) <= _MOST_SAMPLES:
            self._rows.append((ring.rank, new))
            self._count += len(new)

    def _opened(self, ring: Ring) -> SampleReader:
        path = samples_path(ring.path)
        try:
            info = os.stat(path, follow_symlinks=False)
        except OSError as error:
            raise NotFoundError("no samples here", where=str(path)) from error
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise NotFoundError("not a samples file of ckptd", where=str(path))
        reader = SampleReader(path)
        self._readers[ring] = reader
        return reader

    def take(self, rows: Mapping[int, int]) -> Array:
        """Return new rows of `SUM`; `rows` has the row in the report of each rank."""
        parts = []
        for rank, new in self._rows:
            if rank in rows:
                part = np.zeros(len(new), SUM)
                part["row"] = rows[rank]
                part["step"] = np.maximum(new["step"], -1)
                part["what"] = new["what"] - 1  # the report counts kinds from 0
                part["set"], part["value"] = new["set"], new["value"]
                parts.append(part)
        self._rows.clear()
        self._count = 0
        return np.concatenate(parts) if parts else np.zeros(0, SUM)


# --- pauses, steps, and all of it -----------------------------------------------------------------


_MOST_GAPS = 4096
_MOST_STEPS = 4096
_MOST_COST_NS = 10**7
_MOST_COST_S = 1e6
"""A ring that lies about its calls makes no nonsense of the sum."""
_MORE = 1.05
"""A pause is sent again when it is longer by this factor than the one sent before."""

_Key = tuple[int, int, int]


class _RingSteps:
    """How far the calls of one ring have been added up."""

    __slots__ = ("ended", "number", "recorded", "seen", "step")

    def __init__(self) -> None:
        self.recorded = 0  # calls whose cost was counted
        self.number = 0  # calls up to here need not be read again
        self.seen = 0  # the last call that was looked at
        self.step = -1  # the last step that was sent
        self.ended = np.nan  # when its last call ended


class RingTotals:
    """Adds up what the ranks of a node do; `add_up` now and then, `take` for a report.

    Attributes
    ----------
    overruns
        Calls that were overwritten before they were read.
    recorder_s
        Seconds that recording has cost the ranks.
    collectives, samples
        What their collectives add up to, and what they sampled.
    differing
        Ranks that made a call otherwise than another rank of the node.
    """

    def __init__(self) -> None:
        self.overruns = 0
        self.recorder_s = 0.0
        self.collectives = Collectives()
        self.samples = RingSamples()
        self.differing = Differing()
        self._places: dict[Ring, _RingSteps] = {}
        self._longest: dict[_Key, float] = {}
        self._told: dict[_Key, float] = {}
        self._steps: list[tuple[int, int, int, float, float, float]] = []

    def keep_only(self, rings: Collection[Ring]) -> None:
        """Know nothing more of rings that are gone."""
        here = set(rings)
        if len(here) < len(self._places):
            for ring in self._places.keys() - here:
                self.differing.forget(ring.rank)
            self._places = {ring: place for ring, place in self._places.items() if ring in here}
            self.collectives.keep_only(here)
        self.samples.keep_only(here)

    def close(self) -> None:
        """Close all files."""
        self.samples.close()

    def add_up(self, rings: Collection[Ring], now: float) -> list[tuple[Ring, CkptdError]]:
        """Add what the ranks have done since; return the rings that could not be read, and why."""
        failed = []
        self.keep_only(rings)
        for ring in rings:
            try:
                self.add(ring)
            except CkptdError as error:
                failed.append((ring, error))
        self.collectives.join(now)
        return failed

    def add(self, ring: Ring) -> None:
        """Add what the rank has done since; errors as of `RingReader`."""
        self._add_calls(ring)
        self.samples.add(ring)

    def _add_calls(self, ring: Ring) -> None:
        place = self._places.get(ring)
        if place is None:
            place = self._places[ring] = _RingSteps()
        written = min(max(ring.counters[Counter.WRITTEN], 0), 1 << 62)
        step = ring.counters[Counter.STEP]
        slots = ring.header.shape.slots
        self._add_cost(place, written, ring.counters[Counter.COST])
        self.collectives.count(ring)
        if 0 <= step < place.step:  # it trains the same steps again
            place.step, place.ended = -1, np.nan
        fresh = written - place.seen
        # Most polls end here: a step is added up when it is done, or before its calls are lost.
        goes_on = ring.alive and 0 <= step <= place.step + 1
        if fresh <= 0 or (goes_on and fresh < slots // 2):
            return
        numbers, calls = ring.reader.calls_since(place.number)
        if len(calls):
            self.overruns += max(int(numbers[0]) - 1 - place.seen, 0)
            seen, place.seen = place.seen, int(numbers[-1])
            self._add_gaps(calls)
            self.collectives.add(ring, numbers, calls)
            self.differing.add(ring.rank, calls[numbers > seen])
            if step >= 0:
                self._add_steps(ring.rank, place, calls, step)
            place.number = _settled(numbers, calls, place.step, slots)

    def _add_cost(self, place: _RingSteps, written: int, cost_ns: int) -> None:
        calls, place.recorded = max(written - place.recorded, 0), written
        self.recorder_s += min(calls * min(max(cost_ns, 0), _MOST_COST_NS) / 1e9, _MOST_COST_S)

    def _add_gaps(self, calls: Array) -> None:
        before, after = calls[:-1], calls[1:]
        gap = after["start"] - before["end"]
        for i in _longest_of(before, gap):
            key = (int(before["site"][i]), int(before["phase"][i]), int(before["op"][i]))
            if key in self._longest or len(self._longest) < _MOST_GAPS:
                self._longest[key] = max(float(gap[i]), self._longest.get(key, 0.0))

    def _add_steps(self, rank: int, place: _RingSteps, calls: Array, current: int) -> None:
        """Add the steps before `current` whose calls are all there and have ended."""
        rows = np.zeros(len(calls), JOINED_CALL)
        for name in CALL.names or ():
            rows[name] = calls[name]
        steps, seconds = self_times(rows, 1)
        ends, before = _ends(calls, steps)
        columns = (steps, seconds[:, 0], ends, before) if len(steps) else ()
        for step, alone, ended, earlier in zip(*(c.tolist() for c in columns), strict=True):
            if not place.step < step < current or alone != alone:
                continue
            if ended != ended:
                if step == current - 1:
                    break  # it may well end before the next look
                continue
            wall = ended - (place.ended if place.step == step - 1 else earlier)
            place.step, place.ended = step, ended
            if wall == wall and len(self._steps) < _MOST_STEPS:
                wall, alone = max(wall, 0.0), max(alone, 0.0)
                inside = max(wall - alone, 0.0)
                self._steps.append((rank, step, int(Phase.TRAIN), alone, inside, wall))

    def take(
        self, number: int, taken: int, ranks: Mapping[int, int], *, again: bool = False
    ) -> tuple[dict[str, Array], int]:
        """Return the tables of a report with what is new, and `NodeReport.after`.

        Parameters
        ----------
        number, taken
            Number of the report, and of the last one that is known to have been taken.
        ranks
            Row in the report of each rank.
        again
            Return all pauses, whatever was sent before.
        """
        collectives, after = self.collectives.take(number, taken)
        tables = {
            "gaps": self._take_gaps(again=again),
            "steps": self._take_steps(ranks),
            "sums": self.samples.take(ranks),
            "collectives": collectives,
        }
        return tables, after

    def _take_gaps(self, *, again: bool) -> Array:
        if again:
            self._told.clear()
        new = {k: s for k, s in self._longest.items() if s > _MORE * self._told.get(k, 0.0)}
        self._told |= new
        return np.array([(*key, seconds) for key, seconds in new.items()], GAP)

    def _take_steps(self, ranks: Mapping[int, int]) -> Array:
        steps = [(ranks[rank], *rest) for rank, *rest in self._steps if rank in ranks]
        self._steps.clear()
        return np.array(steps, STEP)


def _longest_of(before: Array, gap: Array) -> list[int]:
    """Return the place of the longest gap behind each kind of call."""
    order = np.flatnonzero(gap > 0)  # NaN is not above 0
    order = order[np.argsort(gap[order], kind="stable")]
    kinds = before[["site", "phase", "op"]][order]
    # From the longest on, the first of each kind.
    _, first = np.unique(kinds[::-1], return_index=True)
    return [int(i) for i in order[::-1][first]]


def _ends(calls: Array, steps: Array) -> tuple[Array, Array]:
    """Return when the last call of each step ended, and the last one before the step.

    NaN where a call goes on, or where the ring does not show any.
    """
    every, codes = np.unique(calls["step"], return_inverse=True)
    last = np.full(len(every), -np.inf)
    np.maximum.at(last, codes, calls["end"])  # NaN stays
    so_far = np.concatenate([[np.nan], np.fmax.accumulate(last)])
    at = np.searchsorted(every, steps)
    return last[at], so_far[at]


def _settled(numbers: Array, calls: Array, told: int, slots: int) -> int:
    """Return up to which call nothing will be asked again.

    Kept are the calls of steps that are not sent, one call before them, and what goes on; but
    never more than half of the ring, or calls would be lost.
    """
    last = int(numbers[-1])
    open_ = np.isnan(calls["end"]) | ((calls["step"] > told) & (calls["step"] >= 0))
    kept = int(numbers[np.argmax(open_)]) - 2 if open_.any() else last - 1
    return max(kept, last - slots // 2, 0)
