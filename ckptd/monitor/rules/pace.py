"""How fast steps are made: who is slow, and whether all of them take longer than they did."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.report import GroupInfo
from ckptd.monitor.rules.slow import RankRoles, SlowLimits, Slowness, StepBook
from ckptd.monitor.stats import Array, mix
from ckptd.monitor.verdict import Verdict

__all__ = ["StepPace", "roles_of"]


_DATA = re.compile(r"(^|[\W_])(dp|ddp|fsdp|hsdp|data|replicate|replica|shard)($|[\W_\d])")
_TENSOR = re.compile(r"(^|[\W_])(tp|tensor|sp|cp|context)($|[\W_\d])")


def roles_of(job: JobView, names: Mapping[int, GroupInfo]) -> RankRoles:
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
    """What ranks told of their steps, and what follows from it; no clock.

    Attributes
    ----------
    longer
        Whether steps take longer than they did although nobody's own time does.
    roles
        Whom each rank of the last job is compared with.
    """

    def __init__(self, limits: SlowLimits) -> None:
        self.longer = False
        self.roles = RankRoles(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._book = StepBook()
        self._slowness = Slowness(limits)
        self._of: tuple[int, ...] = ()

    def add(self, rows: Array, ranks: Array) -> None:
        """Take the steps of a sheet, and its rows of ranks."""
        if not self._book.world:
            self._book.follow(ranks["step"], int(ranks["world"].max()))
        self._book.add(rows, ranks["rank"])

    def forget(self) -> None:
        """Begin anew."""
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
        """Who is slow."""
        return self._slowness.verdicts

    @property
    def ratio(self) -> Mapping[int, float]:
        """How many times its like's own time each rank takes, by rank."""
        return self._slowness.ratio

    @property
    def self_s(self) -> Mapping[int, float]:
        """Median own time of a step, in seconds, by rank."""
        return self._slowness.self_s


def _middle(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
