"""Slow ranks (stragglers): own time of steps against like ranks and the past; windows, scores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ckptd.monitor.job import JobView, Phase
from ckptd.monitor.report import GroupInfo
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median, mix, sigma
from ckptd.monitor.verdict import Verdict, VerdictKind

# --- own time -------------------------------------------------------------------------------------


def self_times(calls: Array, rows: int, phase: Phase = Phase.TRAIN) -> tuple[Array, Array]:
    """Return the seconds that each rank spent by itself in each step.

    A gap counts to the step of the call that ends it. Gaps before another phase's call, or after
    it, are left out: a checkpoint or an evaluation makes no rank slow.

    Parameters
    ----------
    calls
        Rows of `ckptd.monitor.job.JOINED_CALL`, a rank's in their order.
    rows
        Ranks.
    phase
        The phase that is looked at.

    Returns
    -------
    steps : numpy.ndarray
        Numbers of the steps found, rising.
    seconds : numpy.ndarray
        Shape (steps, ranks); NaN where a rank shows nothing of a step, or its oldest calls of it
        are lost.
    """
    if not len(calls):
        return np.zeros(0, np.int64), np.zeros((0, rows))
    row, step = calls["row"], calls["step"]
    same = np.zeros(len(calls), bool)
    same[1:] = row[1:] == row[:-1]
    gap = calls["start"] - _free_since(calls, same)
    of_phase = calls["phase"] == phase
    kept = same & of_phase & np.roll(of_phase, 1) & (step >= 0) & ~np.isnan(gap)
    # What a rank shows of its oldest step is not all of it.
    first = np.full(rows, np.iinfo(np.int64).max)
    np.minimum.at(first, row, step)
    kept &= step > first[row]
    steps, codes = np.unique(step[kept], return_inverse=True)
    place = codes * rows + row[kept]
    total = np.bincount(place, np.maximum(gap[kept], 0.0), len(steps) * rows)
    seen = np.bincount(place, minlength=len(steps) * rows) > 0
    return steps, np.where(seen, total, np.nan).reshape(len(steps), rows)


def _free_since(calls: Array, same: Array) -> Array:
    """Return when the last call before each call of the same rank ended; NaN if one goes on."""
    ends = np.where(np.isnan(calls["end"]), np.inf, calls["end"])
    # One running maximum over all ranks: each is lifted above whatever came before it.
    finite = ends[np.isfinite(ends)]
    low = min(float(calls["start"].min()), float(finite.min()) if len(finite) else 0.0)
    high = max(float(calls["start"].max()), float(finite.max()) if len(finite) else 0.0)
    span = high - low + 1.0
    lift = np.cumsum(~same) * (2 * span)
    running = np.maximum.accumulate(np.minimum(ends, high + 0.5) - low + lift)
    before = np.roll(running, 1) - np.roll(lift, 1) + low
    return np.where(same & (before < high + 0.25), before, np.nan)


# --- one rank against its peers -------------------------------------------------------------------


AHEAD = 1 << 14
"""A step so far beyond those of most ranks is false or corrupt."""

MOST_CELLS = 1 << 24
"""Cells of each table: what bounds its memory, whatever world a report claims."""


class StepTable:
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
        """Begin again, with a world of another size or other steps."""
        self.world = world if 8 * world <= MOST_CELLS else 0
        self._reported = world
        self.newest = -1
        self._usual = -1
        self._depth = min(self._most, MOST_CELLS // max(self.world, 1))
        self._step = np.full(self._depth, -1)
        self._own = np.full((self._depth, self.world), np.nan, np.float32)
        self._wall = np.full((self._depth, self.world), np.nan, np.float32)

    def follow(self, steps: Array, world: int) -> None:
        """Take note of the steps that ranks are in; after a step back all starts over."""
        known = steps[steps >= 0]
        self._usual = int(np.median(known)) if len(known) else -1
        back = 0 <= self._usual < self.newest - self._depth
        if world != self._reported or back:
            usual = self._usual
            self.forget(world)
            self._usual = usual

    def add(self, rows: Array, ranks: Array) -> None:
        """Take rows of `ckptd.monitor.report.STEP`; `ranks` are the ranks of the report's rows."""
        rows = rows[rows["phase"] == Phase.TRAIN]
        if self._usual >= 0:
            rows = rows[rows["step"] <= self._usual + AHEAD]
        rank = ranks[rows["row"]]
        # Of a job that is not joined yet the size is what this report shows.
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
        inside = ranks < self.world
        if not len(order) or not inside.any():
            empty = np.zeros((0, len(ranks)))
            return np.zeros(0, np.int64), empty, empty
        columns = ranks[inside]
        some = np.isfinite(self._own[np.ix_(order, columns)]).mean(1) >= share
        order = order[some][-count:]
        own = np.full((len(order), len(ranks)), np.nan)
        wall = own.copy()
        own[:, inside] = self._own[np.ix_(order, columns)]
        wall[:, inside] = self._wall[np.ix_(order, columns)]
        return self._step[order], own, wall

    def since(self, after: int, ranks: Array, share: float = 0.8) -> tuple[Array, Array]:
        """Return steps later than `after` of which most of `ranks` told, and their whole times.

        As of `last`, of at most `MOST_STEPS` steps; of a large job it is called in each round.
        """
        order = np.argsort(self._step, kind="stable")
        order = order[self._step[order] > after][-MOST_STEPS:]
        wall = self._wall[np.ix_(order, ranks[ranks < self.world])]
        told = np.isfinite(wall).mean(1) >= share if wall.size else np.zeros(len(order), bool)
        return self._step[order[told]], wall[told]


MOST_STEPS = 64
"""Steps at most that are reported at once."""

LEAST_REPLICA = 4
"""Ranks of a replica below which its median is too much of one rank to be taken away."""


@dataclass(frozen=True)
class SlowLimits:
    """Settings of the search for slow ranks.

    Attributes
    ----------
    steps
        Steps of a window. Ten were too few: pauses of a loaded machine looked like stragglers.
    windows
        Windows in a row in which a rank must be slow.
    z
        Robust standard deviations of its peers that it must stand out by in each of them.
    own_z
        The same of its own past, where it has not enough like it.
    ratio
        How many times its usual time it must take, over all of them.
    soon_steps
        Steps of the windows in which a rank that is much slower is named sooner; one among enough
        others of its role only, since its own past says nothing of pauses that all have.
    soon_z, soon_ratio
        What it must exceed in each of these.
    cohort
        Ranks of one role below which a rank is compared with its own past instead.
    node
        Ranks of a replica up to which it may be one node: if the whole replica is slow in each
        window, its ranks are, and not their data.
    shared
        If more than this share of ranks stands out at once, the job changed and no rank is named.
    """

    steps: int = 20
    windows: int = 3
    z: float = 4.5
    own_z: float = 6.0
    ratio: float = 1.06
    soon_steps: int = 10
    soon_z: float = 8.0
    soon_ratio: float = 1.12
    cohort: int = 8
    node: int = 16
    shared: float = 0.2


@dataclass(frozen=True)
class RankRoles:
    """Ranks that a rank may be compared with; one element a row of ``JobView.ranks``, from 0.

    Attributes
    ----------
    stage
        Ranks of one stage do the same work: pipeline stage, with tensor rank if that matters.
    replica
        Ranks of one replica get the same data: data-parallel rank.
    """

    stage: Array
    replica: Array


def scores(seconds: Array, roles: RankRoles, limits: SlowLimits, past: Array | None) -> Array:
    """Return how each rank stands out in one window.

    Parameters
    ----------
    seconds
        Own time, shape (steps, ranks), NaN where not known.
    roles
        Ranks that are compared with each other.
    limits
        Least size of a cohort.
    past
        Own time of the same ranks in earlier steps of the same phase, shape (steps, ranks).

    Returns
    -------
    numpy.ndarray
        Shape (2, ranks): robust standard deviations, and the ratio to what is usual; 0 and 1
        where nothing can be said.
    """
    logs = _logs(seconds)
    usual = _medians(logs)
    alone = ~_enough(roles, limits)
    if past is not None and len(past):
        own = usual - _medians(_logs(past))
        # All ranks slower together is the job, not one of them.
        own = own - np.nanmedian(own) if np.isfinite(own).any() else own
    else:
        own = np.full(len(usual), np.nan)
    shared = _among(np.where(alone, np.nan, logs - usual), roles.replica)
    shared = np.where(alone, np.nan, _medians(logs - shared))
    shared, moved = _by_role(shared, roles)
    spread = np.where(alone, _own_sigma(past, usual, limits), _cohort_sigma(shared, roles.stage))
    rest = np.where(alone, own, shared)
    z = np.divide(rest, spread, out=np.zeros(len(rest)), where=spread > 0)
    whole = _whole(moved, roles.replica, limits)
    z = np.where(whole > limits.z, np.fmax(z, whole), z)
    rest = np.where(whole > limits.z, rest + moved, rest)
    return np.stack([np.nan_to_num(z, nan=0.0), np.exp(np.nan_to_num(rest, nan=0.0))])


def _enough(roles: RankRoles, limits: SlowLimits) -> Array:
    """Return which ranks have enough others of their role to be compared with them."""
    return np.bincount(roles.stage)[roles.stage] >= limits.cohort


def _among(rest: Array, replica: Array) -> Array:
    """Return what the ranks of a replica have in common in each step: their batch."""
    size = np.bincount(replica)
    out = np.zeros(rest.shape)
    if not len(size) or size.max() < LEAST_REPLICA:
        return out
    order = np.argsort(replica, kind="stable")
    starts = np.cumsum(size) - size
    column = np.arange(len(replica)) - starts[replica[order]]
    table = np.full((len(rest), len(size), size.max()), np.nan, rest.dtype)
    table[:, replica[order], column] = rest[:, order]
    table.sort(axis=2)  # what is not known comes last
    known = (~np.isnan(table)).sum(2)
    low, high = np.maximum(known - 1, 0) // 2, known // 2
    high = np.minimum(high, size.max() - 1)
    middle = np.take_along_axis(table, np.stack([low, high], axis=2), axis=2).mean(2)
    common = np.where((known >= LEAST_REPLICA), middle, 0.0)
    out[:] = common[:, replica]
    return out


def _by_role(shared: Array, roles: RankRoles) -> tuple[Array, Array]:
    """Take away the medians of stages and replicas; return what is left, and the replicas'."""
    moved = np.zeros(len(shared))
    # Stage first, replica second, and stage again for what the replicas had moved.
    for codes, least in ((roles.stage, 1), (roles.replica, LEAST_REPLICA), (roles.stage, 1)):
        medians = np.nan_to_num(grouped_median(shared, codes, len(codes) + 1))
        usual = np.where(np.bincount(codes)[codes] >= least, medians[codes], 0.0)
        shared = shared - usual
        moved = usual if codes is roles.replica else moved
    return shared, moved


def _whole(moved: Array, replica: Array, limits: SlowLimits) -> Array:
    """Return by how many standard deviations each rank's replica, if it may be a node, is slow."""
    size = np.bincount(replica)
    replicas = np.flatnonzero(size >= LEAST_REPLICA)
    if len(replicas) < limits.cohort:
        return np.zeros(len(replica))
    offset = np.zeros(len(size))
    offset[replica] = moved
    away = offset - np.median(offset[replicas])
    spread = sigma(offset[replicas])
    z = np.where(size <= limits.node, away / spread, 0.0) if spread > 0 else np.zeros(len(size))
    return z[replica]


def _logs(seconds: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Array = np.log(seconds)
    logs[~np.isfinite(logs)] = np.nan
    return logs


def _medians(logs: Array) -> Array:
    """Return each rank's median over the steps; NaN for one that shows nothing."""
    out = np.full(logs.shape[1], np.nan)
    unknown = np.isnan(logs)
    some = ~unknown.any(0) if len(logs) else np.zeros(logs.shape[1], bool)
    # A rank's values in a row: columns of a table cost four times as much to sort.
    out[some] = np.median(np.ascontiguousarray(logs[:, some].T), axis=1)
    partly = ~some & ~unknown.all(0)
    if partly.any():
        out[partly] = np.nanmedian(logs[:, partly], axis=0)
    return out


def _cohort_sigma(rest: Array, stage: Array) -> Array:
    spread = grouped_median(np.abs(rest), stage, len(stage) + 1) * MAD_TO_SIGMA
    return spread[stage]


def _own_sigma(past: Array | None, usual: Array, limits: SlowLimits) -> Array:
    """Return how much a rank's own windows have differed; never below a hundredth."""
    if past is None or len(past) < 2 * limits.steps:
        return np.full(len(usual), np.nan)
    count = len(past) // limits.steps
    logs = _logs(past)
    windows = [_medians(logs[i * limits.steps : (i + 1) * limits.steps]) for i in range(count)]
    table = np.stack(windows)
    spread = np.nanmax(np.nan_to_num(table, nan=-np.inf), 0) - np.min(
        np.nan_to_num(table, nan=np.inf), 0
    )
    return np.maximum(np.where(np.isfinite(spread), spread / 2, np.nan), 0.01)


def slow_ranks(
    job: JobView,
    seconds: Array,
    roles: RankRoles,
    limits: SlowLimits | None = None,
    past: Array | None = None,
) -> Iterator[Verdict]:
    """Yield a verdict naming the ranks that were slow in each of the last windows.

    Parameters
    ----------
    job
        For names of ranks and nodes.
    seconds
        Own time of one phase, shape (steps, ranks), oldest first; see
        `ckptd.monitor.rules.slow.self_times`. Only the last steps count that the windows need
        (60), and of half as many only a rank is named that is much slower.
    roles
        Ranks that are compared with each other.
    limits
        Settings.
    past
        Own time in earlier steps, for ranks without enough others of their role.
    """
    limits = limits or SlowLimits()
    for steps, rule in ((limits.steps, _slow), (limits.soon_steps, _much_slower)):
        need = steps * limits.windows
        if len(seconds) < need:
            continue
        recent = seconds[-need:].reshape(limits.windows, steps, -1)
        found = np.stack([scores(window, roles, limits, past) for window in recent])
        rows = np.flatnonzero(rule(found, roles, limits))
        if 0 < len(rows) <= max(limits.shared * seconds.shape[1], 1):
            yield _verdict(job, rows, found, steps)
            return


def _slow(found: Array, roles: RankRoles, limits: SlowLimits) -> Array:
    z = np.where(_enough(roles, limits), limits.z, limits.own_z)
    return (found[:, 0] > z).all(0) & (_ratios(found) > limits.ratio)


def _much_slower(found: Array, roles: RankRoles, limits: SlowLimits) -> Array:
    z, ratio = found.min(0)
    out: Array = _enough(roles, limits) & (z > limits.soon_z) & (ratio > limits.soon_ratio)
    return out


def _ratios(found: Array) -> Array:
    out: Array = np.exp(np.log(found[:, 1]).mean(0))
    return out


def _verdict(job: JobView, rows: Array, found: Array, steps: int) -> Verdict:
    z, ratio = found[:, 0].min(0), _ratios(found)
    rows = rows[np.argsort(-ratio[rows], kind="stable")]
    return Verdict(
        kind=VerdictKind.SLOW_RANK,
        suspects=rank_suspects(
            job, rows, 0.9, [f"{ratio[r]:.2f} times its peers' time" for r in rows]
        ),
        evidence=(
            f"slower than its peers by itself in {len(found)} windows of {steps} steps",
            f"rank {job.ranks['rank'][rows[0]]}: {ratio[rows[0]]:.2f} times, z {z[rows[0]]:.0f}",
        ),
        rules_out=(
            "a slow peer or link: time in calls is not counted",
            "an uneven stage or batch: medians of stage and replica are removed",
        ),
        refuted_by="the next window shows the rank as fast as its peers",
        action="warn; checkpoint, then replace it if what it costs exceeds a restart",
        numbers={
            "slow": len(rows),
            "ratio": float(ratio[rows[0]]),
            "z": float(z[rows[0]]),
            "steps": steps * len(found),
        },
    )


FIRST_SLOW = "since first slow step s"
"""Number of a verdict: seconds that all steps took that count for it."""
OWN, SHARE = "own s", "share of a step"
"""Numbers of a verdict: own time of a step, and the share of a step that slowness takes."""


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
    """Slow ranks, judged again whenever ranks told of enough further steps.

    Attributes
    ----------
    limits, few
        Settings.
    stride
        Steps between two judgements.
    verdicts
        Of the last judgement.
    ratio, self_s
        How many times its peers' own time each rank takes, and its median own time of a step in
        seconds, by rank.
    """

    limits: SlowLimits = field(default_factory=SlowLimits)
    few: FewLimits = field(default_factory=FewLimits)
    stride: int = 5
    verdicts: tuple[Verdict, ...] = ()
    ratio: dict[int, float] = field(default_factory=dict)
    self_s: dict[int, float] = field(default_factory=dict)
    _judged: int = -1

    def judge(self, job: JobView, book: StepTable, roles: RankRoles) -> bool:
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
        self.verdicts = tuple(self._priced(job, verdict, own, wall) for verdict in found)
        self._note(job, own[-self.limits.steps :], roles)
        return True

    def _priced(self, job: JobView, verdict: Verdict, own: Array, wall: Array) -> Verdict:
        """Return `verdict` with what it costs, in a sentence that comes first.

        Seconds that the first suspect takes by itself, those that its like take, and those of a
        whole step are medians over the steps by which it was judged.
        """
        count = int(verdict.numbers["steps"])
        steps = _median(wall[-count:].T)
        first = int(verdict.names()[0])
        row = np.flatnonzero(job.ranks["rank"] == first)
        mine, step = float(_median(own[-count:, row])[0]), _middle(steps)
        usual = mine / verdict.numbers["ratio"]
        share = min(max((mine - usual) / step, 0.0), 1.0) if step > 0 else 0.0
        node = job.nodes[int(job.ranks["node"][row[0]])]
        sentence = (
            f"rank {first} on {node} takes {_told(mine)} a step by itself where others take"
            f" {_told(usual)}; all {len(job.ranks):,} ranks wait for it: {100 * share:.0f} % of"
            " the job"
        )
        numbers = {
            FIRST_SLOW: float(np.nansum(steps)),
            OWN: mine,
            "usual s": usual,
            "step s": step,
            SHARE: share,
        }
        return msgspec.structs.replace(
            verdict,
            evidence=(sentence, *verdict.evidence),
            numbers={**verdict.numbers, **numbers},
        )

    def forget(self) -> None:
        """Forget all: the job began again."""
        self.verdicts, self._judged = (), -1
        self.ratio, self.self_s = {}, {}

    def _note(self, job: JobView, own: Array, roles: RankRoles) -> None:
        ranks = job.ranks["rank"].tolist()
        usual = _median(own)
        self.self_s = {r: s for r, s in zip(ranks, usual.tolist(), strict=True) if s == s}
        size = np.bincount(roles.stage)[roles.stage]
        among = scores(own, roles, self.limits, None)[1]
        like = np.where(size >= self.limits.cohort, among, usual / _others(usual, roles.stage))
        self.ratio = {r: s for r, s in zip(ranks, like.tolist(), strict=True) if s == s and s > 0}


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 9.995 else f"{1e3 * seconds:.0f} ms"


def _masked(own: Array, roles: RankRoles, limits: SlowLimits) -> Array:
    few = np.bincount(roles.stage)[roles.stage] < limits.cohort
    return np.where(few, np.nan, own)


def few_slow(
    job: JobView, own: Array, wall: Array, roles: RankRoles, limits: SlowLimits, few: FewLimits
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
        Ranks that are compared with each other.
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
    for rows, times, against in ((peers, ratio, "its peers"), (past, change, "its own past")):
        rows = np.flatnonzero(rows & alone)
        if 0 < len(rows) <= max(limits.shared * len(alone), 1) and not out:
            rows = rows[np.argsort(-times[rows], kind="stable")]
            out.append(_slower_verdict(job, rows, times, need, against))
    return tuple(out)


def _against_peers(
    recent: Array, roles: RankRoles, limits: SlowLimits, few: FewLimits, least: Array
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


def _slower_verdict(job: JobView, rows: Array, ratio: Array, steps: int, against: str) -> Verdict:
    return Verdict(
        kind=VerdictKind.SLOW_RANK,
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


# --- all ranks over time --------------------------------------------------------------------------


_DATA = re.compile(r"(^|[\W_])(dp|ddp|fsdp|hsdp|data|replicate|replica|shard)($|[\W_\d])")
_TENSOR = re.compile(r"(^|[\W_])(tp|tensor|sp|cp|context)($|[\W_\d])")


def roles_of(job: JobView, names: Mapping[int, GroupInfo]) -> RankRoles:
    """Return the ranks that each rank of `job` may be compared with.

    Ranks of one data-parallel group, by its kind or name, do the same work, as those do that share
    its tensors with them; those at the same place of such groups get the same data. Where
    no group is known to be one, ranks that are in groups of the same sizes and kinds are taken for
    equals, unless some call each other point to point: stages of a pipeline look alike and are
    not.
    """
    count = len(job.ranks)
    alone = np.arange(count)
    if not len(job.groups):
        return RankRoles(alone, alone)
    infos = [names.get(int(g)) for g in job.group_ids]
    data = np.array([_is(info, _DATA) for info in infos], bool)[job.group_codes]
    data &= job.groups["size"] > 1
    if data.any():
        tensor = np.array([_is(info, _TENSOR) for info in infos], bool)[job.group_codes]
        return _by_data_groups(job, data, tensor & ~data, alone)
    if any(info is not None and info.kind == "p2p" for info in infos):
        return RankRoles(alone, alone)
    kinds = {kind: i for i, kind in enumerate(sorted({_kind(info) for info in infos}))}
    codes = np.array([kinds[_kind(info)] for info in infos], np.int64)[job.group_codes]
    each = mix(job.groups["size"], codes)
    total = np.zeros(count, np.uint64)
    np.add.at(total, job.groups["row"], each)  # a sum that does not depend on the order
    return RankRoles(np.unique(total, return_inverse=True)[1], alone)


def _by_data_groups(job: JobView, data: Array, tensor: Array, alone: Array) -> RankRoles:
    work = _largest(job, data, alone)
    # Place of each rank among those of its group, by global rank.
    order = np.lexsort((job.ranks["rank"], work))
    starts = np.flatnonzero(np.append(True, np.diff(work[order]) != 0))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    replica = np.empty(len(order), np.int64)
    replica[order] = place
    return RankRoles(_united(work, _largest(job, tensor, alone)), replica)


def _largest(job: JobView, chosen: Array, alone: Array) -> Array:
    """Return a dense number of the largest chosen group of each rank; its own where it has none."""
    order = np.argsort(job.groups["size"][chosen], kind="stable")
    out = len(job.group_ids) + alone
    out[job.groups["row"][chosen][order]] = job.group_codes[chosen][order]  # the last stays
    return np.unique(out, return_inverse=True)[1]


def _united(one: Array, other: Array) -> Array:
    """Return dense numbers of what either division puts together."""
    label = np.arange(len(one))
    while True:
        before = label
        for codes in (one, other):
            least = np.full(len(codes), len(codes))
            np.minimum.at(least, codes, label)
            label = least[codes]
        if (label == before).all():
            return np.unique(label, return_inverse=True)[1]


def _kind(info: GroupInfo | None) -> str:
    return info.kind if info is not None else ""


def _is(info: GroupInfo | None, pattern: re.Pattern[str]) -> bool:
    return info is not None and bool(
        pattern.search(info.kind.lower()) or pattern.search(info.name.lower())
    )


LONGER = 1.3
"""Steps that take so many times what they took are looked into, if no rank's own time explains."""
NOW_STEPS, BEFORE_STEPS = 10, 40


class StepPace:
    """Step times that ranks reported, and the slow ranks that follow; no clock of its own.

    Attributes
    ----------
    longer
        Whether steps take longer than they did although no rank's own time does.
    roles
        Ranks that each rank of the last job is compared with.
    """

    def __init__(self, limits: SlowLimits) -> None:
        self.longer = False
        self.roles = RankRoles(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._book = StepTable()
        self._slowness = Slowness(limits)
        self._of: tuple[int, ...] = ()

    def add(self, rows: Array, ranks: Array) -> None:
        """Take the steps of a report, and its rows of ranks."""
        if not self._book.world:
            self._book.follow(ranks["step"], int(ranks["world"].max()))
        self._book.add(rows, ranks["rank"])

    def walls(self, after: int, ranks: Array) -> tuple[int, Array]:
        """Return the newest step of which most of `ranks` told, and whole seconds of steps.

        They are of the steps later than `after`: of each rank the mean over them, NaN where it
        told of none.
        """
        if self._book.newest < after:
            after = -1  # the job began again at an earlier step
        steps, wall = self._book.since(after, ranks)
        if not len(steps):
            return after, np.zeros(0)
        known = np.isfinite(wall)
        total = np.where(known, wall, 0.0).sum(0)
        with np.errstate(invalid="ignore"):
            return int(steps[-1]), total / np.where(known.any(0), known.sum(0), np.nan)

    def forget(self) -> None:
        """Begin again."""
        self._book.forget(self._book.world)
        self._slowness.forget()
        self.longer = False

    def judge(self, job: JobView, names: Mapping[int, GroupInfo]) -> None:
        """Judge what is new since the last time."""
        if not len(job.ranks):
            return
        self._book.follow(job.ranks["step"], job.world)
        self._find_roles(job, names)
        if self._slowness.judge(job, self._book, self.roles):
            self.longer = self._takes_longer(job)

    def _find_roles(self, job: JobView, names: Mapping[int, GroupInfo]) -> None:
        """Read roles from groups when anything about them is new: they do not change in between."""
        ranks = job.ranks["rank"]
        of = (job.world, len(ranks), int(ranks.sum()), len(job.groups), len(names))
        if of != self._of:
            self.roles, self._of = roles_of(job, names), of

    def _takes_longer(self, job: JobView) -> bool:
        _, own, wall = self._book.last(NOW_STEPS + BEFORE_STEPS, job.ranks["rank"])
        if len(wall) < NOW_STEPS + BEFORE_STEPS or self.verdicts:
            return False
        now, before = _middle(wall[-NOW_STEPS:]), _middle(wall[:-NOW_STEPS])
        mine, was = _middle(own[-NOW_STEPS:]), _middle(own[:-NOW_STEPS])
        return now > LONGER * before and mine - was < (now - before) / 2

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Slow ranks."""
        return self._slowness.verdicts

    @property
    def ratio(self) -> Mapping[int, float]:
        """How many times its peers' own time each rank takes, by rank."""
        return self._slowness.ratio

    @property
    def self_s(self) -> Mapping[int, float]:
        """Median own time of a step, in seconds, by rank."""
        return self._slowness.self_s


def _middle(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
