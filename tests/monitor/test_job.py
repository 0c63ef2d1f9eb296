"""Views of ranks as columns."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import NO_EXIT, join
from tests.monitor import jobs


def test_no_rank() -> None:
    job = join([])
    assert job.world == 0
    assert not len(job.ranks)


def test_times_become_ages_on_each_ranks_own_clock() -> None:
    late = jobs.changed(
        jobs.inside(1, 7, 1, 5.0, 2),
        at=9e6,
        moved=9e6 - 5,
        heartbeat=9e6 - 1,
        pending_since=9e6 - 5,
        calls=jobs.call(7, 1, 9e6 - 5),
    )
    job = jobs.job(jobs.inside(0, 7, 1, 5.0, 2, calls=jobs.call(7, 1, jobs.NOW - 5)), late)
    for name in ("idle", "pending_age"):
        assert job.ranks[name] == pytest.approx([5.0, 5.0])
    assert job.calls["start"] == pytest.approx([-5.0, -5.0])
    assert job.calls["row"].tolist() == [0, 1]


def test_columns() -> None:
    job = jobs.job(
        jobs.view(2, alive=False, exit_code=-9, process_state="Z", answers=False),
        jobs.view(0),
        jobs.outside(1, 5, 3, 1.0, 4, pid=4711, members={5: (0, 1, 2, 3)}),
    )
    assert job.ranks["rank"].tolist() == [2, 0, 1]
    assert job.ranks["pid"].tolist() == [0, 0, 4711]
    assert job.ranks["exit_code"].tolist() == [-9, NO_EXIT, NO_EXIT]
    assert job.ranks["state"].tolist() == [b"Z", b"", b""]
    assert job.ranks["answers"].tolist() == [0, -1, -1]
    assert [job.nodes[n] for n in job.ranks["node"]] == ["n1", "n0", "n0"]
    assert np.isnan(job.ranks["pending_age"]).all()
    assert job.groups["row"].tolist() == [2]
    assert job.members[5] == (0, 1, 2, 3)
    assert job.code_of(np.array([5, 6], np.uint64)).tolist() == [0, -1]


def test_last_call_and_cohorts() -> None:
    job = jobs.job(
        jobs.view(0, calls=jobs.calls(jobs.call(7, 1, 1.0), jobs.call(9, 1, 2.0))),
        jobs.view(1),
        jobs.view(2, calls=jobs.call(7, 1, 1.0)),
    )
    assert job.last_call.tolist() == [1, -1, 2]
    order, starts = job.cohorts
    assert [job.calls["group"][order[s]] for s in starts] == [7, 9]
    assert starts.tolist() == [0, 2]
