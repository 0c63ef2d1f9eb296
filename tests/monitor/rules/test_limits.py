"""How long is too long: floors by phase, warm-up, and what a job has shown to be usual."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import JobView, Phase, RankView
from ckptd.monitor.report import GAP
from ckptd.monitor.rules.limits import MOST_KEYS, HangLimits, Learned, learn, learn_cut_short
from tests.monitor import jobs

LIMITS = HangLimits()


def _job(pause: float, phase: Phase = Phase.TRAIN, world: int = 2, site: int = 5) -> JobView:
    """Two ranks; rank 1 arrives `pause` seconds after its last call, and the calls last 0.5 s."""

    def rank(number: int, wait: float) -> object:
        first = jobs.call(7, 1, 100.0, 101.0, site=site, phase=phase)
        second = jobs.call(7, 2, 101 + wait, 101.5 + pause, site=site, phase=phase)
        return jobs.view(number, world, phase=phase, calls=jobs.calls(first, second))

    return jobs.job(rank(0, 0.0), rank(1, pause))  # type: ignore[arg-type]


def test_floors_by_phase() -> None:
    job = jobs.job(*(jobs.view(p, 6, phase=Phase(p)) for p in range(6)))
    got = Learned().limit(job, LIMITS, in_call=False)
    assert got.tolist() == [LIMITS.floors[Phase(p)] for p in range(6)]


def test_before_some_steps_are_done_only_the_start_up_floor_holds() -> None:
    job = jobs.job(jobs.view(0, 2, steps_done=4), jobs.view(1, 2, steps_done=5))
    assert Learned().limit(job, LIMITS, in_call=False).tolist() == [600.0, 30.0]


def test_the_limit_is_a_multiple_of_what_was_usual() -> None:
    job = _job(10.0)
    learned = learn(Learned(), job)
    assert learned.limit(job, LIMITS, in_call=False) == pytest.approx([50.0, 50.0])
    # Rank 0 was in the call for 10.5 s, but the last to come for 1 s only, in the call before.
    assert learned.limit(job, LIMITS, in_call=True) == pytest.approx([30.0, 30.0])


def test_the_longest_stays() -> None:
    learned = learn(learn(Learned(), _job(10.0)), _job(8.0))
    assert learned.limit(_job(1.0), LIMITS, in_call=False) == pytest.approx([50.0, 50.0])


def test_phases_and_call_sites_are_apart() -> None:
    learned = learn(Learned(), _job(500.0, Phase.CKPT))
    assert learned.limit(_job(1.0), LIMITS, in_call=False) == pytest.approx([30.0, 30.0])
    learned = learn(Learned(), _job(500.0, site=6))
    assert learned.limit(_job(1.0), LIMITS, in_call=False) == pytest.approx([30.0, 30.0])


def test_what_was_learned_stays_with_another_world_size() -> None:
    learned = learn(learn(Learned(), _job(100.0)), _job(1.0, world=3))
    assert learned.limit(_job(1.0), LIMITS, in_call=False) == pytest.approx([500.0, 500.0])


def test_a_pause_that_was_cut_short_is_learned_for_those_who_did_something() -> None:
    call = jobs.call(7, 1, jobs.NOW - 50.0, jobs.NOW - 49.0, site=5)
    views = [jobs.view(r, 2, calls=jobs.calls(call), moved=jobs.NOW - 49.0) for r in range(2)]
    job = jobs.job(*views)
    learned = learn_cut_short(Learned(), job, np.array([True, False]))
    assert learned.limit(job, LIMITS, in_call=False) == pytest.approx([245.0, 245.0])
    nobody = learn_cut_short(Learned(), job, np.array([False, False]))
    assert nobody.limit(job, LIMITS, in_call=False) == pytest.approx([30.0, 30.0])


def test_times_in_a_call_are_learned_only_when_all_members_ended_it() -> None:
    """Of those that show it all may have waited for one that does not."""
    told = jobs.job(*(_in_call(r, 3.0) for r in range(3)))
    assert not (learn(Learned(), told).longest > 2).any()
    told = jobs.job(*(_in_call(r, 3.0) for r in range(3)), _in_call(3, 0.2))
    longest = learn(Learned(), told).longest
    assert longest.tolist() == pytest.approx([0.2])


def _in_call(rank: int, took: float) -> RankView:
    row = jobs.call(5, 8, jobs.NOW - 4, jobs.NOW - 4 + took)
    return jobs.view(rank, groups=jobs.groups({5: (4, 8, 8)}), calls=jobs.calls(row))


def test_gaps_that_agents_tell_are_taken_in_place_of_those_shown() -> None:
    two = jobs.calls(
        jobs.call(5, 7, jobs.NOW - 9, jobs.NOW - 8, site=3),
        jobs.call(5, 8, jobs.NOW - 2, jobs.NOW - 1, site=3),
    )
    seen = jobs.job(jobs.view(0, groups=jobs.groups({5: (4, 8, 8)}), calls=two))
    gaps = np.zeros(1, GAP)
    gaps["site"], gaps["phase"], gaps["op"], gaps["seconds"] = 3, Phase.TRAIN, 1, 40.0
    assert learn(Learned(), seen).longest.max() == pytest.approx(6.0)
    known = learn(Learned(), seen, gaps)
    assert known.longest.tolist() == [40.0]
    limit = known.limit(seen, HangLimits(), in_call=False)
    assert limit.tolist() == [200.0]


def test_what_is_learned_is_bounded() -> None:
    gaps = np.zeros(MOST_KEYS + 100, GAP)
    gaps["site"], gaps["seconds"] = np.arange(len(gaps)), np.arange(len(gaps))
    known = learn(Learned(), jobs.job(jobs.view(0)), gaps)
    assert len(known.keys) == MOST_KEYS
    assert (np.diff(known.keys.astype(object)) > 0).all()
    assert known.longest.min() == 100.0
