"""Ranks that are slower than their like, by their own time; never by when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.naming import rank_suspects
from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median
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
        Robust standard deviations that it must stand out by.
    ratio
        How many times its usual time it must take.
    cohort
        Ranks of one role below which a rank is compared with its own past instead.
    shared
        If more than this share of ranks stands out at once, the job changed and nobody is named.
    """

    steps: int = 20
    windows: int = 3
    z: float = 6.0
    ratio: float = 1.08
    cohort: int = 8
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
    usual = _medians(seconds)
    size = np.bincount(roles.stage)
    alone = size[roles.stage] < limits.cohort
    rest = usual.copy()
    if past is not None and len(past):
        own = usual - _medians(past)
        # All ranks slower together is the job, not one of them.
        rest[alone] = (own - np.nanmedian(own) if np.isfinite(own).any() else own)[alone]
    else:
        rest[alone] = np.nan
    shared = np.where(alone, np.nan, usual)
    # Stage first, replica second, and stage again for what the replicas had moved.
    for codes, least in ((roles.stage, 1), (roles.replica, LEAST_REPLICA), (roles.stage, 1)):
        medians = np.nan_to_num(grouped_median(shared, codes, len(codes) + 1))
        shared = shared - np.where(np.bincount(codes)[codes] >= least, medians[codes], 0.0)
    rest = np.where(alone, rest, shared)
    spread = np.where(alone, _own_sigma(past, usual, limits), _cohort_sigma(rest, roles.stage))
    z = np.divide(rest, spread, out=np.zeros(len(rest)), where=spread > 0)
    out: Array = np.nan_to_num(np.stack([z, np.exp(rest)]), nan=0.0)
    return out


def _medians(seconds: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(seconds)
    logs[~np.isfinite(logs)] = np.nan
    out = np.full(logs.shape[1], np.nan)
    some = ~np.isnan(logs).all(0) if len(logs) else np.zeros(logs.shape[1], bool)
    out[some] = np.nanmedian(logs[:, some], axis=0)
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
    windows = [_medians(past[i * limits.steps : (i + 1) * limits.steps]) for i in range(count)]
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
        `ckptd.monitor.selftime.self_times`. Fewer steps than the windows need give no verdict.
    roles
        Who is compared with whom.
    limits
        Settings.
    past
        Own time in earlier steps, for ranks without enough others of their role.
    """
    limits = limits or SlowLimits()
    need = limits.steps * limits.windows
    if len(seconds) < need:
        return
    recent = seconds[-need:].reshape(limits.windows, limits.steps, -1)
    found = np.stack([scores(window, roles, limits, past) for window in recent])
    slow = np.all((found[:, 0] > limits.z) & (found[:, 1] > limits.ratio), axis=0)
    rows = np.flatnonzero(slow)
    if not len(rows) or len(rows) > max(limits.shared * len(slow), 1):
        return
    z, ratio = found[:, 0].min(0), np.median(found[:, 1], 0)
    rows = rows[np.argsort(-ratio[rows], kind="stable")]
    yield Verdict(
        kind=Kind.SLOW_RANK,
        suspects=rank_suspects(job, rows, 0.9, [f"{ratio[r]:.2f} times its like" for r in rows]),
        evidence=(
            f"slower than its like by itself in {limits.windows} windows of {limits.steps} steps",
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
            "steps": need,
        },
    )
