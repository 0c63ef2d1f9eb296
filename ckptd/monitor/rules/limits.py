"""Limits of hangs: seconds of silence by phase (init, train, eval, checkpoint), learned ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckptd.monitor.job import CallFlag, JobView, Phase
from ckptd.monitor.stats import Array, mix

ENGINE_S = 600.0
"""After which a backend gives a call up, where it is not known."""
START_S = 600.0
CHECKPOINT_S = 600.0
EVAL_S = 120.0
TRAIN_S = 30.0

_GAP, _CALL = np.uint64(1), np.uint64(2)

MOST_KEYS = 1 << 16
"""Call sites that are remembered, those with the longest times."""
LOOP_CALLS = 20
"""A program that has come to a call site so often goes round: its start is over."""


def _floors() -> dict[Phase, float]:
    return {
        Phase.INIT: START_S,
        Phase.COMPILE: START_S,
        Phase.TRAIN: TRAIN_S,
        Phase.EVAL: EVAL_S,
        Phase.CKPT: CHECKPOINT_S,
        Phase.EXIT: START_S,
    }


@dataclass(frozen=True)
class HangLimits:
    """Settings of the diagnosis of what stands still; times in seconds.

    Attributes
    ----------
    floors
        Least limit of each phase. It must exceed every pause that is rightful and not marked.
    factor
        The limit is this many times the longest that was usual so far.
    warm_steps
        Before a rank has made so many steps, the floor of INIT holds. For a rank that makes none
        it holds until others wait for it at a call site to which the job has come `LOOP_CALLS`
        times, for at least half of the floor of TRAIN: that is a loop, and the floor of TRAIN
        holds there.
    majority_wait
        How long a mismatch may wait for a strict majority before it is reported without a culprit.
    missed_beats
        Beats that an agent misses before its node is taken for silent.
    stopped_s
        A rank that the kernel shows as stopped for so long, and for which one that runs waits as
        long, hangs: that needs no comparison with what was usual.
    still_s
        A rank that is stopped while no other rank moves or does anything for so long holds the
        job up, also where none shows for what it waits.
    """

    floors: dict[Phase, float] = field(default_factory=_floors)
    factor: float = 5.0
    warm_steps: int = 5
    majority_wait: float = 0.5
    missed_beats: int = 3
    stopped_s: float = 1.0
    still_s: float = 10.0


@dataclass(frozen=True)
class CallLoops:
    """How often the job came back to call sites in this life: what tells a loop from a start.

    Attributes
    ----------
    keys
        Sorted; of each (call site, phase).
    times
        Calls that looks have found there; in between there may have been more.
    newest
        The greatest sequence number of a call that has ended there.
    since, spans
        When the first call was found there, by the clock of the looks, and how many seconds after
        that the newest one.
    """

    keys: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    times: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    newest: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    since: Array = field(default_factory=lambda: np.zeros(0, np.float64))
    spans: Array = field(default_factory=lambda: np.zeros(0, np.float64))

    def after(self, job: JobView, now: float) -> CallLoops:
        """Return the loops with what `job` shows at `now`."""
        calls = job.calls[~np.isnan(job.calls["end"])]
        keys = np.concatenate([self.keys, _keys(calls, _CALL)])
        unique, codes = np.unique(keys, return_inverse=True)
        known, shown = codes[: len(self.keys)], codes[len(self.keys) :]
        before, times = (np.zeros(len(unique), np.int64) for _ in range(2))
        before[known], times[known] = self.newest, self.times
        newest = before.copy()
        np.maximum.at(newest, shown, calls["seq"])
        new = np.flatnonzero(calls["seq"] > before[shown])
        _, one = np.unique(mix(shown[new], calls["seq"][new]), return_index=True)  # of all ranks
        times += np.bincount(shown[new[one]], minlength=len(unique))
        since, spans = np.full(len(unique), now), np.zeros(len(unique))
        since[known], spans[known] = self.since, self.spans
        more = newest > before
        kept = np.arange(len(unique))
        if len(unique) > MOST_KEYS:
            kept = np.sort(np.argsort(-times, kind="stable")[:MOST_KEYS])
        columns = unique, times, newest, since, np.where(more, now - since, spans)
        return CallLoops(*(column[kept] for column in columns))

    def held(self, job: JobView, limits: HangLimits) -> Array:
        """Return for each rank whether it is, or was last, in a call of a loop."""
        last = job.last_call
        if not len(job.calls):
            return np.zeros(len(last), bool)
        least = limits.floors.get(Phase.TRAIN, TRAIN_S) / 2
        again = self.keys[(self.times >= LOOP_CALLS) & (self.spans >= least)]
        return (last >= 0) & np.isin(_keys(job.calls[last], _CALL), again)


@dataclass(frozen=True)
class Learned:
    """The longest that was usual, of each (call site, phase).

    What was learned stays when the job goes on with another world: a pause that was rightful once
    is not to be a fault after each restart. Times of a larger or smaller world only make the limit
    longer.

    Attributes
    ----------
    keys, longest
        Sorted keys and seconds.
    """

    keys: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    longest: Array = field(default_factory=lambda: np.zeros(0, np.float64))

    def knows(self, job: JobView) -> Array:
        """Return for each rank whether a call like its last one has ended before."""
        last = job.last_call
        if not len(job.calls):
            return np.zeros(len(last), bool)
        return (last >= 0) & np.isin(_keys(job.calls[last], _CALL), self.keys)

    def _usual(self, keys: Array) -> Array:
        if not len(self.keys):
            return np.zeros(len(keys))
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.longest[at], 0.0)

    def limit(
        self, job: JobView, limits: HangLimits, *, in_call: bool, started: Array | None = None
    ) -> Array:
        """Return for each rank how long it may stand still, in seconds.

        Parameters
        ----------
        job
            The moment.
        limits
            Floors and factor.
        in_call
            Whether the time in its last call is meant, or the time after it.
        started
            Ranks whose start is over although they make no steps, by `CallLoops`.
        """
        ranks, calls, last = job.ranks, job.calls, job.last_call
        table = np.zeros(max(Phase) + 1)
        for number, floor in limits.floors.items():
            table[number] = floor
        phase: Array = np.clip(ranks["phase"], 0, max(Phase))
        cold = ranks["steps_done"] < limits.warm_steps
        if started is not None:
            plain = started & (ranks["steps_done"] == 0)
            cold &= ~plain
            phase = np.where(plain & (phase == Phase.INIT), Phase.TRAIN, phase)
        floors: Array = table[phase]
        floors = np.where(
            cold,
            np.maximum(floors, limits.floors.get(Phase.INIT, START_S)),
            floors,
        )
        if not len(calls):
            return floors
        keys = _keys(calls[last], _CALL if in_call else _GAP)
        usual = np.where(last >= 0, self._usual(keys), 0.0)
        return np.maximum(floors, limits.factor * usual)


def _keys(calls: Array, what: np.uint64) -> Array:
    return mix(calls["site"], calls["phase"], calls["op"], np.full(len(calls), what))


def learn(learned: Learned, job: JobView, gaps: Array | None = None) -> Learned:
    """Return `learned` with what `job` shows of calls that ended.

    Two things are learned of a call site in a phase: the longest from the end of its call to the
    rank's next call, and the longest that the last member to arrive was in the call: the others'
    times are times of waiting. The last member is known of a call that all members have ended.

    Parameters
    ----------
    learned
        What was usual before.
    job
        The moment.
    gaps
        Rows of `ckptd.monitor.report.GAP`, by agents that saw every call: taken in place of the
        gaps between those calls that `job` happens to show.
    """
    keys, spans = [learned.keys], [learned.longest]
    if gaps is not None:
        keys.append(_keys(gaps, _GAP))
        spans.append(gaps["seconds"])
    if len(job.calls):
        for more, longest in ([_gaps(job)] if gaps is None else []) + [_durations(job)]:
            keys.append(more)
            spans.append(longest)
    return _kept(np.concatenate(keys), np.concatenate(spans))


def learn_cut_short(learned: Learned, job: JobView, some: Array) -> Learned:
    """Return `learned` with how long `some` ranks were by themselves when they were ended.

    A pause that was not let come to its end would else never be known, and be cut short again.
    """
    last = job.last_call
    rows = np.flatnonzero(some & (last >= 0) & (job.ranks["pending_group"] == 0))
    if not len(rows):
        return learned
    keys = _keys(job.calls[last[rows]], _GAP)
    return _kept(
        np.concatenate([learned.keys, keys]),
        np.concatenate([learned.longest, job.ranks["idle"][rows]]),
    )


def _kept(keys: Array, spans: Array) -> Learned:
    """Return the longest span of each key, of as many keys as are remembered."""
    unique, codes = np.unique(keys, return_inverse=True)
    out = np.zeros(len(unique))
    np.maximum.at(out, codes, spans)
    if len(unique) > MOST_KEYS:
        longest_first = np.argsort(-out, kind="stable")[:MOST_KEYS]
        kept = np.sort(longest_first)
        unique, out = unique[kept], out[kept]
    return Learned(unique, out)


def _gaps(job: JobView) -> tuple[Array, Array]:
    before, after = job.calls[:-1], job.calls[1:]
    gap = after["start"] - before["end"]
    kept = (before["row"] == after["row"]) & (gap > 0)  # NaN is not above 0
    return _keys(before[kept], _GAP), gap[kept]


def _durations(job: JobView) -> tuple[Array, Array]:
    order, starts = job.cohorts
    calls = job.calls
    unseen = (calls["flags"] & CallFlag.UNSEEN) != 0
    spans = np.where(unseen, np.nan, calls["end"] - calls["start"])[order]
    shortest = np.minimum.reduceat(spans, starts)  # NaN, if one member has not ended it
    size = np.zeros(len(job.group_ids), np.int64)
    np.maximum.at(size, job.group_codes, job.groups["size"])
    code = job.code_of(calls["group"][order[starts]])
    members = np.where(code >= 0, size[code], 0) if len(size) else np.zeros(len(code))
    seen = np.diff(np.append(starts, len(order)))
    kept = ~np.isnan(shortest) & (seen >= members) & (members > 0)
    return _keys(calls[order[starts[kept]]], _CALL), shortest[kept]
