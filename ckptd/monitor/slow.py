"""Ranks that are slower than their like, by their own time; never by when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.naming import rank_suspects
from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median, sigma
from ckptd.monitor.verdict import Kind, Verdict

__all__ = ["Roles", "SlowLimits", "scores", "slow_ranks"]


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
        Robust standard deviations of its like that it must stand out by in each of them.
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
        If more than this share of ranks stands out at once, the job changed and nobody is named.
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
class Roles:
    """Whom a rank may be compared with; one element a row of ``Job.ranks``, counted from 0.

    Attributes
    ----------
    stage
        Ranks of one stage do the same work: pipeline stage, with tensor rank if that matters.
    replica
        Ranks of one replica get the same data: data-parallel rank.
    """

    stage: Array
    replica: Array


def scores(seconds: Array, roles: Roles, limits: SlowLimits, past: Array | None) -> Array:
    """Return how each rank stands out in one window.

    Parameters
    ----------
    seconds
        Own time, shape (steps, ranks), NaN where not known.
    roles
        Who is compared with whom.
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
    out: Array = np.stack([np.nan_to_num(z, nan=0.0), np.exp(np.nan_to_num(rest, nan=0.0))])
    return out


def _enough(roles: Roles, limits: SlowLimits) -> Array:
    """Return which ranks have enough others of their role to be compared with them."""
    out: Array = np.bincount(roles.stage)[roles.stage] >= limits.cohort
    return out


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


def _by_role(shared: Array, roles: Roles) -> tuple[Array, Array]:
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
    out: Array = z[replica]
    return out


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
    out: Array = spread[stage]
    return out


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
    job: Job,
    seconds: Array,
    roles: Roles,
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
        `ckptd.monitor.selftime.self_times`. Only the last steps count that the windows need (60),
        and of half as many only a rank is named that is much slower.
    roles
        Who is compared with whom.
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


def _slow(found: Array, roles: Roles, limits: SlowLimits) -> Array:
    z = np.where(_enough(roles, limits), limits.z, limits.own_z)
    out: Array = (found[:, 0] > z).all(0) & (_ratios(found) > limits.ratio)
    return out


def _much_slower(found: Array, roles: Roles, limits: SlowLimits) -> Array:
    z, ratio = found.min(0)
    out: Array = _enough(roles, limits) & (z > limits.soon_z) & (ratio > limits.soon_ratio)
    return out


def _ratios(found: Array) -> Array:
    out: Array = np.exp(np.log(found[:, 1]).mean(0))
    return out


def _verdict(job: Job, rows: Array, found: Array, steps: int) -> Verdict:
    z, ratio = found[:, 0].min(0), _ratios(found)
    rows = rows[np.argsort(-ratio[rows], kind="stable")]
    return Verdict(
        kind=Kind.SLOW_RANK,
        suspects=rank_suspects(job, rows, 0.9, [f"{ratio[r]:.2f} times its like" for r in rows]),
        evidence=(
            f"slower than its like by itself in {len(found)} windows of {steps} steps",
            f"rank {job.ranks['rank'][rows[0]]}: {ratio[rows[0]]:.2f} times, z {z[rows[0]]:.0f}",
        ),
        rules_out=(
            "a slow peer or link: time in calls is not counted",
            "an uneven stage or batch: medians of stage and replica are removed",
        ),
        refuted_by="the next window shows the rank as fast as its like",
        action="warn; checkpoint, then replace it if what it costs exceeds a restart",
        numbers={
            "slow": len(rows),
            "ratio": float(ratio[rows[0]]),
            "z": float(z[rows[0]]),
            "steps": steps * len(found),
        },
    )
