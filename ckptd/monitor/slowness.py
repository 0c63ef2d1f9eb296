"""Slow ranks, from what ranks told of their last steps; with rules for ranks with few like them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.naming import rank_suspects
from ckptd.monitor.slow import Roles, SlowLimits, scores, slow_ranks
from ckptd.monitor.stats import Array
from ckptd.monitor.steps import StepBook
from ckptd.monitor.verdict import Kind, Verdict

__all__ = ["FIRST_SLOW", "FewLimits", "Slowness", "few_slow"]

FIRST_SLOW = "since first slow step s"
"""Number of a verdict: seconds that all steps took that count for it."""


@dataclass(frozen=True)
class FewLimits:
    """Settings for ranks with few others of their role: noise of one is not averaged away.

    Attributes
    ----------
    peers
        Others that do the same work, from so many on a rank is compared with them.
    peer_ratio
        How many times their own time it must take.
    past_steps
        Steps that a rank's past must have.
    past_ratio
        How many times its own past it must take, beyond what the others' times changed by.
    often
        In so large a share of the steps of each window it must be the slowest.
    least_s
        Seconds of a step that it must lose.
    least_share
        The same as a share of the step.
    """

    peers: int = 2
    peer_ratio: float = 1.5
    past_steps: int = 40
    past_ratio: float = 1.3
    often: float = 0.75
    least_s: float = 0.002
    least_share: float = 0.05


@dataclass
class Slowness:
    """Who is slow, judged anew whenever ranks told of enough further steps.

    Attributes
    ----------
    limits, few
        Settings.
    stride
        Steps between two judgements.
    verdicts
        Of the last judgement.
    ratio, self_s
        How many times its like's own time each rank takes, and its median own time of a step in
        seconds, by rank.
    """

    limits: SlowLimits = field(default_factory=SlowLimits)
    few: FewLimits = field(default_factory=FewLimits)
    stride: int = 5
    verdicts: tuple[Verdict, ...] = ()
    ratio: dict[int, float] = field(default_factory=dict)
    self_s: dict[int, float] = field(default_factory=dict)
    _judged: int = -1

    def judge(self, job: Job, book: StepBook, roles: Roles) -> bool:
        """Judge if there is enough that is new; return whether it was judged."""
        if book.newest < self._judged:
            self.forget()
        if book.newest - self._judged < self.stride or not len(job.ranks):
            return False
        need = self.limits.steps * self.limits.windows
        _, own, wall = book.last(need + 2 * self.few.past_steps, job.ranks["rank"])
        if not len(own):
            return False
        self._judged = book.newest
        found = (
            *slow_ranks(job, _masked(own, roles, self.limits), roles, self.limits),
            *few_slow(job, own, wall, roles, self.limits, self.few),
        )
        self.verdicts = tuple(_aged(verdict, wall) for verdict in found)
        self._note(job, own[-self.limits.steps :], roles)
        return True

    def forget(self) -> None:
        """Forget all: the job began anew."""
        self.verdicts, self._judged = (), -1
        self.ratio, self.self_s = {}, {}

    def _note(self, job: Job, own: Array, roles: Roles) -> None:
        ranks = job.ranks["rank"].tolist()
        usual = _median(own)
        self.self_s = {r: s for r, s in zip(ranks, usual.tolist(), strict=True) if s == s}
        size = np.bincount(roles.stage)[roles.stage]
        among = scores(own, roles, self.limits, None)[1]
        like = np.where(size >= self.limits.cohort, among, usual / _others(usual, roles.stage))
        self.ratio = {r: s for r, s in zip(ranks, like.tolist(), strict=True) if s == s and s > 0}


def _aged(verdict: Verdict, wall: Array) -> Verdict:
    """Return `verdict` with the seconds that the steps took by which it was judged."""
    steps = _median(wall[-int(verdict.numbers["steps"]) :].T)
    age = float(np.nansum(steps))
    return msgspec.structs.replace(verdict, numbers={**verdict.numbers, FIRST_SLOW: age})


def _masked(own: Array, roles: Roles, limits: SlowLimits) -> Array:
    few = np.bincount(roles.stage)[roles.stage] < limits.cohort
    out: Array = np.where(few, np.nan, own)
    return out


def few_slow(
    job: Job, own: Array, wall: Array, roles: Roles, limits: SlowLimits, few: FewLimits
) -> tuple[Verdict, ...]:
    """Return the verdict on ranks with few like them; empty if none is slow.

    Such a rank is slow if it is so in each window against the others that do the same work, or
    against its own past; and if it was the slowest in most steps, which no load of the machine
    makes one rank for long.

    Parameters
    ----------
    job
        For names.
    own, wall
        Own time and whole time of steps, shape (steps, ranks), oldest first.
    roles
        Who is compared with whom.
    limits, few
        Settings.
    """
    need = limits.steps * limits.windows
    alone = np.bincount(roles.stage)[roles.stage] < limits.cohort
    if len(own) < need or not alone.any():
        return ()
    recent = own[-need:]
    least = np.maximum(few.least_s, few.least_share * _median(wall[-need:]))
    peers, ratio = _against_peers(recent, roles, limits, few, least)
    past, change = _against_past(own[:-need], recent, limits, few, least)
    out: list[Verdict] = []
    for rows, times, against in ((peers, ratio, "its like"), (past, change, "its own past")):
        rows = np.flatnonzero(rows & alone)
        if 0 < len(rows) <= max(limits.shared * len(alone), 1) and not out:
            rows = rows[np.argsort(-times[rows], kind="stable")]
            out.append(_verdict(job, rows, times, need, against))
    return tuple(out)


def _against_peers(
    recent: Array, roles: Roles, limits: SlowLimits, few: FewLimits, least: Array
) -> tuple[Array, Array]:
    stage = roles.stage
    size = np.bincount(stage)[stage]
    slow = size > few.peers
    ratio = np.full(len(stage), np.inf)
    for window in recent.reshape(limits.windows, limits.steps, -1):
        usual = _median(window)
        others = _others(usual, stage)
        ratio = np.fmin(ratio, usual / others)
        slow &= (usual > few.peer_ratio * others) & (usual - others > least)
        slow &= _often_first(window, stage) >= few.often
    return slow, ratio


def _against_past(
    before: Array, recent: Array, limits: SlowLimits, few: FewLimits, least: Array
) -> tuple[Array, Array]:
    """Compare with the past, less what the times of all other ranks of the job changed by."""
    count = recent.shape[1]
    slow, ratio = np.ones(count, bool), np.full(count, np.inf)
    if len(before) < few.past_steps:
        return np.zeros(count, bool), ratio
    usual = _median(before)
    together = np.zeros(count, np.int64)
    # Its own past must have been steady enough for the change to mean anything.
    swing = _quantile(before, 0.9)
    for window in recent.reshape(limits.windows, limits.steps, -1):
        now = _median(window)
        change = now / usual
        others = np.fmax(_others(change, together), 1.0) if count > 1 else np.ones(count)
        ratio = np.fmin(ratio, change / others)
        slow &= (change > few.past_ratio * others) & (now - usual * others > least)
        slow &= now > swing * others
        slow &= _often_first(window / usual, together) >= few.often
    return slow, ratio


def _others(values: Array, codes: Array) -> Array:
    """Return for each value the median of the other values of its cohort; NaN without others."""
    order = np.lexsort((values, codes))
    out = np.full(len(values), np.nan)
    starts = np.flatnonzero(np.append(True, np.diff(codes[order]) != 0))
    for begin, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        rows = order[begin:end]
        rows = rows[~np.isnan(values[rows])]
        n = len(rows)
        if n < 2:
            continue
        ranked, place = values[rows], np.arange(n)
        # Without the i-th of n sorted values, the middle moves by at most one place.
        low, high = (n - 2) // 2, (n - 1) // 2
        out[rows] = (ranked[low + (place <= low)] + ranked[high + (place <= high)]) / 2
    return out


def _often_first(window: Array, codes: Array) -> Array:
    """Return in which share of the steps each rank takes longest of its cohort."""
    filled = np.nan_to_num(window, nan=-np.inf)
    longest = np.full((len(window), int(codes.max()) + 1 if len(codes) else 0), -np.inf)
    for step, row in zip(longest, filled, strict=True):
        np.maximum.at(step, codes, row)
    out: Array = ((filled >= longest[:, codes]) & np.isfinite(filled)).mean(0)
    return out


def _median(values: Array) -> Array:
    return _quantile(values, 0.5)


def _quantile(values: Array, share: float) -> Array:
    """Return the value that so large a share of each column's known values is not above."""
    # numpy's own takes a column at a time: a second for the ranks of a large job.
    columns = np.sort(np.ascontiguousarray(values.T), axis=1)  # NaN last
    known = np.isfinite(columns).sum(1)
    out = np.full(len(columns), np.nan)
    some = np.flatnonzero(known)
    place = share * (known[some] - 1)
    low, high = np.floor(place).astype(int), np.ceil(place).astype(int)
    below, above = columns[some, low], columns[some, high]
    out[some] = below + (above - below) * (place - low)
    return out


def _verdict(job: Job, rows: Array, ratio: Array, steps: int, against: str) -> Verdict:
    return Verdict(
        kind=Kind.SLOW_RANK,
        suspects=rank_suspects(job, rows, 0.8, [f"{ratio[r]:.2f} times {against}" for r in rows]),
        evidence=(
            f"slower than {against} by itself in each of the windows of the last {steps} steps",
            "and the slowest in most of these steps",
        ),
        rules_out=("a slow peer or link: time in calls is not counted",),
        refuted_by=f"the next steps show the rank as fast as {against}",
        action="warn; checkpoint, then replace it if what it costs exceeds a restart",
        numbers={
            "slow": len(rows),
            "ratio": float(ratio[rows[0]]),
            "steps": steps,
        },
    )
