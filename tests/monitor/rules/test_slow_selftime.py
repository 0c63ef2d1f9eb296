"""What a rank spends by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptd.monitor.job import JobView, Phase
from ckptd.monitor.rules.slow import RankRoles, self_times, slow_ranks
from tests.monitor import jobs


def _played(work: np.ndarray[Any, Any], phases: dict[int, Phase] | None = None) -> JobView:
    """Ranks that reduce in pairs, then all together, in each step; `work` is (steps, ranks)."""
    steps, ranks = work.shape
    now = np.zeros(ranks)
    rows: list[list[Any]] = [[] for _ in range(ranks)]
    for step in range(steps):
        phase = (phases or {}).get(step, Phase.TRAIN)
        for share, size in ((0.7, 2), (0.3, ranks)):
            start = now + share * work[step]
            end = start.reshape(-1, size).max(1).repeat(size) + 0.001
            for r in range(ranks):
                group = 1000 + r // 2 if size == 2 else 1
                row = jobs.call(group, step + 1, start[r], end[r], step=step, phase=phase)
                rows[r].append(row)
            now = end
    late = float(now.max())
    return jobs.job(
        *(
            jobs.view(r, ranks, at=late, moved=late, calls=jobs.calls(*rows[r]))
            for r in range(ranks)
        )
    )


def test_the_time_between_calls_is_the_ranks_own() -> None:
    work = np.random.default_rng(1).uniform(0.5, 1.5, (6, 4))
    steps, seconds = self_times((job := _played(work)).calls, len(job.ranks))
    assert steps.tolist() == [1, 2, 3, 4, 5]  # of the oldest step something may be lost
    assert seconds == pytest.approx(work[1:])


def test_first_version_the_partner_of_a_straggler_is_not_blamed() -> None:
    """It arrives as late as the straggler, in all calls but those that they share."""
    work = np.exp(0.02 * np.random.default_rng(1).standard_normal((61, 16)))
    work[:, 6] *= 1.5
    job = _played(work)
    world = job.calls[job.calls["group"] == 1]
    arrival = {int(r): world["start"][world["row"] == r].sum() for r in range(16)}
    late = sorted(arrival, key=lambda r: -arrival[r])[:2]
    assert set(late) == {6, 7}  # by arrival, its partner is the next to be blamed
    _, seconds = self_times(job.calls, 16)
    roles = RankRoles(stage=np.zeros(16, np.int64), replica=np.arange(16))
    assert jobs.told(slow_ranks(job, seconds, roles)) == [("slow rank", ["6"])]


def test_other_phases_do_not_count() -> None:
    work = np.ones((8, 4))
    work[4] = 60.0
    job = _played(work, {4: Phase.CKPT})
    steps, seconds = self_times(job.calls, 4)
    assert 4 not in steps
    assert seconds[steps != 5] == pytest.approx(1.0)
    assert np.nanmax(seconds) <= 1.0 + 1e-9


def test_a_rank_that_is_inside_a_call_shows_no_time_after_it() -> None:
    rows = jobs.calls(
        jobs.call(1, 1, 1.0, 2.0, step=0),
        jobs.call(1, 2, 3.0, step=1),
        jobs.call(2, 1, 9.0, 9.5, step=1),
    )
    job = jobs.job(jobs.view(0, calls=rows))
    _, seconds = self_times(job.calls, 1)
    assert seconds == pytest.approx(np.array([[1.0]]))


def test_no_call() -> None:
    steps, seconds = self_times(jobs.job(jobs.view(0)).calls, 1)
    assert not len(steps)
    assert seconds.shape == (0, 1)
