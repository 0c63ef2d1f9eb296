"""The first call of a group, to which somebody has not come."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.monitor.job import JobView, RankView
from ckptd.monitor.ring import RingShape
from ckptd.monitor.rules.diagnose import diagnose
from ckptd.monitor.rules.mismatch import with_newcomers
from tests.monitor import jobs

A, B = 7, 8
MEMBERS = {A: (0, 1, 2, 3), B: (0, 1, 2, 3)}


def _first(rank: int, group: int, age: float = 700.0, **other: Any) -> RankView:
    return jobs.inside(rank, group, 1, age, 4, members=MEMBERS, **other)


def _rows(job: JobView, group: int) -> dict[int, int]:
    rows = job.groups[job.groups["group"] == group]
    return {int(job.ranks["rank"][r["row"]]): int(r["entered"]) for r in rows}


def test_two_groups_in_opposite_order_at_their_first_use() -> None:
    views = [_first(r, B if r == 2 else A) for r in range(4)]
    assert [v[0] for v in jobs.told(diagnose(jobs.job(*views)))] == ["deadlock"]


def test_a_rank_that_does_not_come_to_the_first_call() -> None:
    views = [*(_first(r, A) for r in range(3)), jobs.view(3, moved=jobs.NOW - 700.0)]
    assert jobs.told(diagnose(jobs.job(*views))) == [("non-communication hang", ["3"])]


def test_each_member_that_reports_has_a_row() -> None:
    job = with_newcomers(jobs.job(_first(3, A), jobs.view(1), jobs.view(0)))
    assert _rows(job, A) == {3: 1, 1: 0, 0: 0}
    assert (job.groups["size"] == 4).all()


def test_a_rank_without_room_for_groups_may_have_come_unseen() -> None:
    full = jobs.groups({100 + g: (4, 1, 1) for g in range(RingShape().groups)})
    job = with_newcomers(jobs.job(_first(0, A), jobs.view(1, groups=full), jobs.view(2)))
    assert _rows(job, A) == {0: 1, 2: 0}


def test_nothing_to_add() -> None:
    for job in (
        jobs.job(),
        jobs.job(jobs.view(0)),
        jobs.job(jobs.inside(0, A, 1, 1.0, 4), jobs.view(1)),
        jobs.job(*(_first(r, A) for r in range(4))),
    ):
        assert np.array_equal(with_newcomers(job).groups, job.groups)
