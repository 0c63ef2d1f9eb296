"""Ranks that are slower than their like."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.rules.slow import RankRoles, SlowLimits, slow_ranks
from ckptd.monitor.verdict import SuspectKind
from ckptd_simulated.job import Mesh, own_times, play
from tests.monitor import jobs

MESH = Mesh(8, 4, 4)
JOB = play(MESH, [], np.random.default_rng(0), rounds=0)
SMALL = jobs.job(*(jobs.view(r) for r in range(4)))
ALONE = RankRoles(stage=np.zeros(4, np.int64), replica=np.arange(4))
SEEDS = range(5)


def _named(times: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[str]:
    return [n for v in slow_ranks(JOB, times, MESH.roles) for n in v.names()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [1.2, 2.0])
def test_a_slow_rank_is_named_and_no_other(seed: int, ratio: float) -> None:
    assert _named(own_times(MESH, np.random.default_rng(seed), 60, [(77, ratio)])) == ["77"]


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_named_in_a_healthy_job(seed: int) -> None:
    """Stages are unequal, replicas get sequences of other length, and ranks pause."""
    assert not _named(own_times(MESH, np.random.default_rng(seed), 60, uneven=0.2, pauses=0.02))


def test_several_at_once_the_slowest_first() -> None:
    slow = [(5, 1.3), (50, 2.0), (100, 1.6)]
    assert _named(own_times(MESH, np.random.default_rng(1), 60, slow)) == ["50", "100", "5"]


def test_a_slow_node() -> None:
    slow = [(r, 1.4) for r in range(8, 16)]
    (verdict,) = slow_ranks(JOB, own_times(MESH, np.random.default_rng(1), 60, slow), MESH.roles)
    assert verdict.names(SuspectKind.NODE) == ("n1",)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_that_is_much_slower_is_named_after_half_as_many_steps(seed: int) -> None:
    times = own_times(MESH, np.random.default_rng(seed), 30, [(77, 1.2)])
    (verdict,) = slow_ranks(JOB, times, MESH.roles)
    assert jobs.told([verdict]) == [("slow rank", ["77"])]
    assert verdict.numbers["steps"] == 30
    assert not _named(own_times(MESH, np.random.default_rng(seed), 30, [(77, 1.05)]))
    assert not _named(own_times(MESH, np.random.default_rng(seed), 30))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenth_is_seen_though_batches_vary_more_from_step_to_step(seed: int) -> None:
    times = own_times(MESH, np.random.default_rng(seed), 60, [(77, 1.1)], uneven=0.2)
    assert _named(times) == ["77"]


def test_a_node_that_holds_a_whole_replica_is_slow_and_its_batches_are_not() -> None:
    """Its ranks are all alike, so only other replicas show it."""
    mesh = Mesh(32, 1, 8)
    job = play(mesh, [], np.random.default_rng(0), rounds=0)
    slow = [(r, 1.2) for r in range(16, 24)]
    times = own_times(mesh, np.random.default_rng(1), 60, slow)
    (verdict,) = slow_ranks(job, times, mesh.roles)
    assert verdict.names(SuspectKind.NODE) == ("n2",)
    assert len(verdict.names()) == 8
    limits = SlowLimits(node=4)
    assert not list(slow_ranks(job, times, mesh.roles, limits))


def test_a_job_that_changed_names_nobody() -> None:
    slow = [(r, 1.0 + r / 64) for r in range(0, 128, 3)]
    assert not _named(own_times(MESH, np.random.default_rng(1), 60, slow))


def test_ranks_that_show_nothing_are_left_out() -> None:
    times = own_times(MESH, np.random.default_rng(1), 60, [(77, 1.5)])
    times[:, 3] = np.nan
    times[10:30, 9] = np.nan
    assert _named(times) == ["77"]


def _pauses(seed: int, steps: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Four ranks on a loaded machine: each loses some steps in a row to others, now and then."""
    rng = np.random.default_rng(seed)
    times = 0.02 * np.exp(0.05 * rng.standard_normal((steps, 4)))
    for _ in range(steps // 25):
        at = int(rng.integers(steps - 8))
        times[at : at + 8, rng.integers(4)] *= 2.0
    return times


def test_first_version_windows_of_ten_steps_blamed_a_loaded_machine() -> None:
    """Eight bad steps are most of a window of ten, and not of twenty, three times in a row."""
    past = 0.02 * np.exp(0.05 * np.random.default_rng(0).standard_normal((200, 4)))
    roles, blamed = ALONE, {10: 0, 20: 0}
    for seed in range(12):
        now = _pauses(seed, 60)
        for steps, windows in ((10, 1), (20, 3)):
            limits = SlowLimits(steps=steps, windows=windows)
            blamed[steps] += len(list(slow_ranks(SMALL, now, roles, limits, past)))
    assert SlowLimits() == SlowLimits(steps=20, windows=3)
    assert blamed[10] > 0
    assert blamed[20] == 0


def test_few_ranks_are_compared_with_their_own_past() -> None:
    rng = np.random.default_rng(1)
    own = np.array([1.0, 1.0, 3.0, 1.0])  # rank 2 has more to do, and always had
    past = own * np.exp(0.03 * rng.standard_normal((200, 4)))
    now = own * np.exp(0.03 * rng.standard_normal((60, 4)))
    assert not list(slow_ranks(SMALL, now, ALONE, past=past))
    now[:, 1] *= 1.5
    assert jobs.told(slow_ranks(SMALL, now, ALONE, past=past)) == [("slow rank", ["1"])]
    # All slower at once: the machine, or the job.
    assert not list(slow_ranks(SMALL, 2 * own * np.ones((60, 4)), ALONE, past=past))


def test_without_like_or_past_nothing_is_said() -> None:
    now = np.ones((60, 4))
    now[:, 1] = 5
    assert not list(slow_ranks(SMALL, now, ALONE))
    assert not list(slow_ranks(SMALL, now[:59], ALONE, past=now))
