"""Who waits for whom: a graph over (group, sequence number), solved for all ranks at once.

A rank that is inside call `s` of group `g` waits for every member that has not entered it. A rank
that waits for nobody is a *root*. Everyone from whom a root can be reached is explained by it;
who is left waits in a circle. No edge is ever listed: a group's members of one kind are all that
a fixed point over groups needs, so a round costs a few passes over (rank, group) rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.stats import Array

__all__ = ["Waits", "absent", "held_up", "waits"]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Waits:
    """What stands still and why; one element a row of ``Job.ranks``.

    Attributes
    ----------
    inside
        The rank is inside a call.
    complete
        The rank is inside a call that all members have entered.
    awaited
        Somebody waits for the rank.
    root
        Awaited, and not waiting itself.
    unheard
        What the rank waits for leads to members that do not report, and to no root.
    circle
        The rank waits in a circle, or between two.
    code
        Place of the rank's group in ``Job.group_ids``; -1 if it is in no call.
    missing
        Members that do not report, one element a group.
    """

    inside: Array
    complete: Array
    awaited: Array
    root: Array
    unheard: Array
    circle: Array
    code: Array
    missing: Array


def waits(job: Job, gone: Array) -> Waits:
    """Return who waits for whom in `job`.

    Parameters
    ----------
    job
        The moment.
    gone
        Ranks that are explained already (crashed, or in a mismatch): roots, whatever they show.
    """
    ranks, rows, groups = job.ranks, job.groups, len(job.group_ids)
    code = job.code_of(ranks["pending_group"])
    inside = (code >= 0) & ranks["alive"] & ~gone
    code = np.where(inside, code, -1)
    seq = ranks["pending_seq"]
    entered = rows["entered"]
    least = _least(job, np.ones(len(ranks), bool))
    missing = absent(job)
    behind = inside & (least[code] < seq)
    unsure = inside & ~behind & (missing[code] > 0)
    complete = inside & ~behind & ~unsure
    wanted = np.zeros(groups, np.int64)
    np.maximum.at(wanted, code[inside], seq[inside])
    awaited = np.zeros(len(ranks), bool)
    awaited[rows["row"][entered < wanted[job.group_codes]]] = True
    explained = _reach(job, ~inside | complete, behind, code)
    unheard = behind & ~explained & (missing[code] > 0) | unsure
    lost = _reach(job, unheard, behind & ~explained, code)
    circle = _core(job, behind & ~explained & ~lost, code)
    return Waits(inside, complete, awaited, awaited & ~inside, lost, circle, code, missing)


def held_up(job: Job, wait: Waits, seconds: float) -> Array:
    """Return for whom a rank that runs has waited for longer than `seconds`."""
    ranks, rows = job.ranks, job.groups
    runs = ~np.isin(ranks["state"], np.array([b"T", b"t", b"Z"]))
    long = wait.inside & runs & (ranks["pending_age"] > seconds)
    wanted = np.zeros(max(len(job.group_ids), 1), np.int64)
    np.maximum.at(wanted, wait.code[long], ranks["pending_seq"][long])
    out = np.zeros(len(ranks), bool)
    out[rows["row"][rows["entered"] < wanted[job.group_codes]]] = True
    return out


def _least(job: Job, some: Array) -> Array:
    """Return the least sequence number that `some` ranks have entered, of each group."""
    out = np.full(max(len(job.group_ids), 1), _NEVER)
    kept = some[job.groups["row"]]
    np.minimum.at(out, job.group_codes[kept], job.groups["entered"][kept])
    return out


def absent(job: Job) -> Array:
    """Return how many members of each group do not report."""
    groups = len(job.group_ids)
    sizes = np.zeros(max(groups, 1), np.int64)
    np.maximum.at(sizes, job.group_codes, job.groups["size"].astype(np.int64))
    seen = np.bincount(job.group_codes, minlength=max(groups, 1))
    out: Array = np.maximum(sizes - seen, 0)
    return out


def _reach(job: Job, start: Array, waiting: Array, code: Array) -> Array:
    """Return `start` and all of `waiting` that wait, directly or not, for one of it."""
    reached: Array = start.copy()
    seq = job.ranks["pending_seq"]
    while True:
        more = waiting & ~reached & (_least(job, reached)[code] < seq)
        if not more.any():
            return reached
        reached |= more


def _core(job: Job, waiting: Array, code: Array) -> Array:
    """Return those of `waiting` for whom one of them waits, and who wait for one of them."""
    rows, seq = job.groups, job.ranks["pending_seq"]
    core: Array = waiting.copy()
    while core.any():
        wanted = np.zeros(max(len(job.group_ids), 1), np.int64)
        np.maximum.at(wanted, code[core], seq[core])
        awaited = np.zeros(len(core), bool)
        awaited[rows["row"][rows["entered"] < wanted[job.group_codes]]] = True
        kept = core & awaited & (_least(job, core)[code] < seq)
        if (kept == core).all():
            break
        core = kept
    return core
