"""A program without steps: when is its start over?"""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import JobView, Phase, RankView
from ckptd.monitor.report import REPORT_RANK
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import LOOP_CALLS, CallLoops, HangLimits, Learned
from ckptd.monitor.verdict import Verdict
from ckptd.monitor.watch import JobWatch
from tests.monitor import jobs

LOOP, OTHER = 5, 6


def _round(number: int, site: int = LOOP) -> JobView:
    """Four ranks have ended call `number`, which all of them make at one place."""
    row = jobs.call(7, number, jobs.NOW - 0.2, jobs.NOW - 0.1, site=site, phase=Phase.INIT)
    calls = {"calls": jobs.calls(row), "phase": Phase.INIT, "steps_done": 0}
    return jobs.job(*(jobs.outside(r, 7, number, 0.1, 4, **calls) for r in range(4)))


def _after(count: int, seconds: float, site: int = LOOP) -> CallLoops:
    """What is known when so many calls were made there in so long a time."""
    rounds = CallLoops()
    for number in range(1, count + 1):
        rounds = rounds.after(_round(number, site), 1000.0 + seconds * number / count)
    return rounds


def _waiting(seq: int, site: int = LOOP, idle: float = 40.0, **other: object) -> JobView:
    """Three ranks wait for the fourth in a call at a place."""
    pending = jobs.call(7, seq, jobs.NOW - idle - 1, site=site, phase=Phase.INIT)
    made = jobs.call(7, seq - 1, jobs.NOW - idle - 2, jobs.NOW - idle - 1, site=LOOP, phase=0)

    def rank(number: int) -> RankView:
        usual = {"phase": Phase.INIT, "steps_done": 0} | other
        if number == 3:
            return jobs.outside(3, 7, seq - 1, idle, 4, calls=jobs.calls(made), **usual)
        return jobs.inside(number, 7, seq, idle + 1, 4, calls=jobs.calls(made, pending), **usual)

    return jobs.job(*map(rank, range(4)))


def _told(job: JobView, rounds: CallLoops | None) -> list[Verdict]:
    gone = np.zeros(len(job.ranks), bool)
    return list(hangs(job, HangLimits(), Learned(), gone, None, rounds))


def test_a_rank_that_leaves_a_loop_is_told_after_the_floor_of_training() -> None:
    rounds = _after(30, 20.0)
    (verdict,) = _told(_waiting(31), rounds)
    assert jobs.told([verdict]) == [("non-communication hang", ["3"])]
    assert verdict.numbers["limit s"] == 30.0
    assert not _told(_waiting(31, idle=29.0), rounds)


def test_without_rounds_the_start_is_what_it_is() -> None:
    assert not _told(_waiting(31), None)


@pytest.mark.parametrize(
    ("rounds", "site"),
    [
        pytest.param(_after(LOOP_CALLS - 1, 20.0), LOOP, id="too few"),
        pytest.param(_after(1000, 14.0), LOOP, id="weights that are sent one by one"),
        pytest.param(_after(1000, 60.0), OTHER, id="and then a barrier elsewhere"),
    ],
)
def test_a_start_is_no_loop(rounds: CallLoops, site: int) -> None:
    assert not _told(_waiting(1001, site), rounds)


def test_who_makes_steps_has_a_start_of_its_own() -> None:
    assert not _told(_waiting(31, steps_done=2), _after(30, 20.0))


def test_another_phase_keeps_its_floor() -> None:
    assert not _told(_waiting(31, phase=Phase.CKPT), _after(30, 20.0))


def test_the_same_call_seen_again_is_one() -> None:
    rounds = CallLoops()
    for look in range(100):
        rounds = rounds.after(_round(1), 1000.0 + look)
    assert rounds.times.tolist() == [1]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.monitor.rules.limits.MOST_KEYS", 8)
    rounds = _after(30, 20.0)
    for site in range(100, 150):
        rounds = rounds.after(_round(1, site), 2000.0)
    assert len(rounds.keys) == 8
    assert (np.diff(rounds.keys.astype(object)) > 0).all()
    assert rounds.times.max() == 30  # what comes often stays


def test_nobody_calls() -> None:
    empty = jobs.job(jobs.view(0))
    assert not len(CallLoops().after(empty, 1.0).keys)
    assert not CallLoops().held(empty, HangLimits()).any()


def test_another_life_begins_with_no_rounds() -> None:
    watch, rows = JobWatch("j"), np.zeros(4, REPORT_RANK)
    for number in range(1, 4):
        watch._learn(_round(number), rows, float(number))
    assert watch._loops.times.tolist() == [3]
    rows["generation"] = 1
    watch._learn(_round(4), rows, 4.0)
    assert watch._loops.times.tolist() == [1]
