"""Which ranks do the same work, read from the groups that they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.sheet import GroupInfo
from ckptd.monitor.slow import Roles
from ckptd.monitor.stats import Array, mix

__all__ = ["roles_of"]

_DATA = re.compile(r"(^|[\W_])(dp|ddp|fsdp|hsdp|data|replicate|replica|shard)($|[\W_\d])")
_TENSOR = re.compile(r"(^|[\W_])(tp|tensor|sp|cp|context)($|[\W_\d])")


def roles_of(job: Job, names: Mapping[int, GroupInfo]) -> Roles:
    """Return whom each rank of `job` may be compared with.

    Ranks of one data-parallel group, by its kind or name, do the same work, as those do that share
    its tensors with them; those at the same place of such groups get the same data. Where
    no group is told to be one, ranks that are in groups of the same sizes and kinds are taken for
    equals, unless some call each other point to point: stages of a pipeline look alike and are
    not.
    """
    count = len(job.ranks)
    alone = np.arange(count)
    if not len(job.groups):
        return Roles(alone, alone)
    infos = [names.get(int(g)) for g in job.group_ids]
    data = np.array([_is(info, _DATA) for info in infos], bool)[job.group_codes]
    data &= job.groups["size"] > 1
    if data.any():
        tensor = np.array([_is(info, _TENSOR) for info in infos], bool)[job.group_codes]
        return _by_data_groups(job, data, tensor & ~data, alone)
    if any(info is not None and info.kind == "p2p" for info in infos):
        return Roles(alone, alone)
    kinds = {kind: i for i, kind in enumerate(sorted({_kind(info) for info in infos}))}
    codes = np.array([kinds[_kind(info)] for info in infos], np.int64)[job.group_codes]
    each = mix(job.groups["size"], codes)
    total = np.zeros(count, np.uint64)
    np.add.at(total, job.groups["row"], each)  # a sum that does not depend on the order
    return Roles(np.unique(total, return_inverse=True)[1], alone)


def _by_data_groups(job: Job, data: Array, tensor: Array, alone: Array) -> Roles:
    work = _largest(job, data, alone)
    # Place of each rank among those of its group, by global rank.
    order = np.lexsort((job.ranks["rank"], work))
    starts = np.flatnonzero(np.append(True, np.diff(work[order]) != 0))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    replica = np.empty(len(order), np.int64)
    replica[order] = place
    return Roles(_united(work, _largest(job, tensor, alone)), replica)


def _largest(job: Job, chosen: Array, alone: Array) -> Array:
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
