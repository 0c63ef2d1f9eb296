"""Members of a group that have not come to its first call yet.

A rank tells of a group from its first call in it. To those who wait in that first call, the rank
that is missing must not look like one of which nothing is heard: it reports, and it has not come.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckptd.monitor.job import JOINED_GROUP, Job
from ckptd.monitor.ringlayout import Shape
from ckptd.monitor.stats import Array

__all__ = ["with_newcomers"]


def with_newcomers(job: Job) -> Job:
    """Return `job` with a row, nothing entered, for each such member that reports.

    A rank whose ring has no room for more groups may have come unseen, and gets no row.
    """
    if not len(job.groups):
        return job
    order = np.argsort(job.group_codes, kind="stable")
    seen = np.bincount(job.group_codes, minlength=len(job.group_ids))
    sizes = np.zeros(len(job.group_ids), np.int64)
    np.maximum.at(sizes, job.group_codes, job.groups["size"].astype(np.int64))
    ends = np.cumsum(seen)
    room = np.bincount(job.groups["row"], minlength=len(job.ranks)) < Shape().groups
    found = [job.groups]
    by_rank = np.argsort(job.ranks["rank"], kind="stable")
    for code in np.flatnonzero(seen < sizes):
        group = int(job.group_ids[code])
        members = np.asarray(job.members.get(group, ()), np.int64)
        have = job.groups["row"][order[ends[code] - seen[code] : ends[code]]]
        found.append(_rows(group, int(sizes[code]), _reporting(job, by_rank, members, have, room)))
    return replace(job, groups=np.concatenate(found)) if len(found) > 1 else job


def _reporting(job: Job, by_rank: Array, members: Array, have: Array, room: Array) -> Array:
    """Return the rows of `members` that report, have room for groups, and are not in `have`."""
    ranks = job.ranks["rank"]
    at = np.minimum(np.searchsorted(ranks, members, sorter=by_rank), len(ranks) - 1)
    rows = by_rank[at]
    rows = rows[(ranks[rows] == members) & room[rows]]
    out: Array = np.setdiff1d(rows, have)
    return out


def _rows(group: int, size: int, rows: Array) -> Array:
    out = np.zeros(len(rows), JOINED_GROUP)
    out["row"], out["group"], out["size"] = rows, group, size
    return out
