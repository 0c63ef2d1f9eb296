"""Faults in real jobs; `tests.elastic.live.campaign` plays as many as one likes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from ckptd_demo.elasticjob import RankRow, TrainedRow
from tests.elastic.live.campaign import References, _promises, campaign, grown, misread
from tests.elastic.live.job import LiveJob


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_real_job_goes_on_after_each_of_three_schedules() -> None:
    results = campaign(range(1, 4), each=3, right=References(), modes=("session",))
    assert [result.end for result in results] == ["progress"] * 3
    assert [result.wrong for result in results] == [[], [], []]


def test_what_grows_in_a_process_is_found() -> None:
    held = [{"n0 7": (90 + 10 * k, 20 + k, 9), "n1 8": (90, 20 + 20 * k, 9)} for k in range(6)]
    assert grown(held) == ["n1 8: 60 files, then 80"]
    held = [{"n0 7": (90, 20, 3 + 14 * (k % 2)), "n2 9": (50, 9, 9 * k)} for k in range(6)]
    assert grown(held) == ["n2 9: 18 threads, then 27"]
    assert grown(held[:4]) == []


def test_a_cause_that_no_fault_explains_is_found() -> None:
    faults = ["1.0 s: cut node n3 for 4.0 s", "2.0 s: full disk", "2.5 s: stop worker n0"]
    right = [
        "no heartbeat from n3",
        "no heartbeat from n3; a worker on n1 ended with 1: rank 2: ended\nn2: before it came",
        "n1: RuntimeError('closed by [10.77.0.4]: see there'); no heartbeat from n3",
        "n2: StoreError('no space left')",
        "j-1: non-communication hang of rank 2 on n0",
        "growing from pp=1 dp=1 tp=1 to pp=1 dp=2 tp=1",
        "ordered: drain n1",
    ]
    assert misread(faults, right) == []
    wrong = [
        "no heartbeat from n1, n3",
        "a worker on n0 ended with 86",
        "a worker on n3 ended with -9: rank 1: SIGKILL",
        "n1: RuntimeError('closed by [10.77.0.4]: see there'); no heartbeat from n2",
        "j-1: non-communication hang of rank 2 on n3",
    ]
    assert len(misread(faults, wrong)) == len(wrong)


@pytest.mark.parametrize(("less", "fallen"), [(("n0", "n1", "n3"), 0), (("n0", "n1"), 1)])
def test_a_step_is_lost_with_two_nodes_that_are_away(less: tuple[str, ...], fallen: int) -> None:
    whole = ("n0", "n1", "n2", "n3")
    ranks = [
        RankRow(generation=number, rank=r, ranks=len(names), node=n, pid=1, resumed=1, at=at)
        for number, names, at in ((1, whole, 5.0), (3, less, 12.0))
        for r, n in enumerate(names)
    ]
    rows = [
        TrainedRow(step=step, generation=1, ranks=4, loss=1.0, ids=[], at=5.0 + step)
        for step in (2, 3)
    ]
    away = [(9.0, 30.0, name) for name in whole if name not in less]
    job = SimpleNamespace(ranks=ranks, rows=rows, away=away, promised=lambda: {1: 1, 3: 3})
    promised, excused = _promises(cast(LiveJob, job))
    assert (promised[3], excused) == (0 if fallen else 3, fallen)
