"""How long is too long: floors by phase, warm-up, and what a job has shown to be usual."""

from __future__ import annotations

import pytest

from ckptd.monitor.job import Job
from ckptd.monitor.limits import Learned, Limits, learn
from ckptd.monitor.view import Phase
from tests.monitor import jobs

LIMITS = Limits()


def _job(pause: float, phase: Phase = Phase.TRAIN, world: int = 2, site: int = 5) -> Job:
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


def test_another_world_size_is_learned_anew() -> None:
    learned = learn(learn(Learned(), _job(100.0)), _job(1.0, world=3))
    assert learned.limit(_job(1.0), LIMITS, in_call=False) == pytest.approx([30.0, 30.0])
