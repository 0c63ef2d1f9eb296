"""What all calls of a node's ranks add up to: the longest pauses, and what each step took.

A sheet holds the last few calls of a rank. Here every call is looked at once, so that nothing is
learnt from a sample.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ckptd.agent.collectives import Collectives
from ckptd.agent.differing import Differing
from ckptd.agent.rings import Ring
from ckptd.monitor.job import JOINED_CALL
from ckptd.monitor.report import GAP, STEP
from ckptd.monitor.ring.layout import Counter
from ckptd.monitor.rules.selftime import self_times
from ckptd.monitor.stats import Array
from ckptd.monitor.view import CALL, Phase

__all__ = ["Tally"]

_MOST_GAPS = 4096
_MOST_STEPS = 4096
_MOST_COST_NS = 10**7
_MOST_COST_S = 1e6
"""A ring that lies about its calls makes no nonsense of the sum."""
_MORE = 1.05
"""A pause is told again when it is longer by this factor than told before."""

_Key = tuple[int, int, int]


class _Place:
    """How far the calls of one ring have been added up."""

    __slots__ = ("ended", "number", "recorded", "seen", "step")

    def __init__(self) -> None:
        self.recorded = 0  # calls whose cost was counted
        self.number = 0  # calls up to here need not be read again
        self.seen = 0  # the last call that was looked at
        self.step = -1  # the last step that was told
        self.ended = np.nan  # when its last call ended


class Tally:
    """Adds up the calls of rings; `add` now and then, `take` for a sheet.

    Attributes
    ----------
    overruns
        Calls that were overwritten before they were read.
    recorder_s
        Seconds that recording has cost the ranks.
    collectives
        What their collectives add up to.
    differing
        Who made a call that another rank of the node made differently.
    """

    def __init__(self) -> None:
        self.overruns = 0
        self.recorder_s = 0.0
        self.collectives = Collectives()
        self.differing = Differing()
        self._places: dict[Ring, _Place] = {}
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

    def add(self, ring: Ring) -> None:
        """Add what the rank has done since; errors as of `RingReader`."""
        place = self._places.get(ring)
        if place is None:
            place = self._places[ring] = _Place()
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

    def _add_cost(self, place: _Place, written: int, cost_ns: int) -> None:
        calls, place.recorded = max(written - place.recorded, 0), written
        self.recorder_s += min(calls * min(max(cost_ns, 0), _MOST_COST_NS) / 1e9, _MOST_COST_S)

    def _add_gaps(self, calls: Array) -> None:
        before, after = calls[:-1], calls[1:]
        gap = after["start"] - before["end"]
        for i in _longest_of(before, gap):
            key = (int(before["site"][i]), int(before["phase"][i]), int(before["op"][i]))
            if key in self._longest or len(self._longest) < _MOST_GAPS:
                self._longest[key] = max(float(gap[i]), self._longest.get(key, 0.0))

    def _add_steps(self, rank: int, place: _Place, calls: Array, current: int) -> None:
        """Tell the steps before `current` of which every call is there and has ended."""
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

    def take(self, ranks: dict[int, int], *, again: bool = False) -> tuple[Array, Array]:
        """Return new rows of `GAP` and `STEP`, and count them as told.

        Parameters
        ----------
        ranks
            Row in the sheet of each rank.
        again
            Tell all pauses, whatever was told before.
        """
        if again:
            self._told.clear()
        new = {k: s for k, s in self._longest.items() if s > _MORE * self._told.get(k, 0.0)}
        self._told |= new
        gaps = np.array([(*key, seconds) for key, seconds in new.items()], GAP)
        steps = [(ranks[rank], *rest) for rank, *rest in self._steps if rank in ranks]
        self._steps.clear()
        return gaps, np.array(steps, STEP)


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

    Kept are the calls of steps that are not told, one call before them, and what goes on; but
    never more than half of the ring, or calls would be lost.
    """
    last = int(numbers[-1])
    open_ = np.isnan(calls["end"]) | ((calls["step"] > told) & (calls["step"] >= 0))
    kept = int(numbers[np.argmax(open_)]) - 2 if open_.any() else last - 1
    return max(kept, last - slots // 2, 0)
