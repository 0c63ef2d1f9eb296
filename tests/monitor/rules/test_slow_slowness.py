from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptd.monitor.rules.slow import (
    FewLimits,
    RankRoles,
    SlowLimits,
    _often_first,
    _others,
    _quantile,
    few_slow,
)
from ckptd_simulated.job import Mesh, play

LIMITS, FEW = SlowLimits(), FewLimits()


def found(own: Any, roles: RankRoles | None = None, wall: Any = None) -> list[str]:
    count = own.shape[1]
    job = play(Mesh(count), [], np.random.default_rng(0), rounds=0)
    roles = roles or RankRoles(np.zeros(count, np.int64), np.arange(count))
    wall = np.nanmax(own, 1, keepdims=True).repeat(count, 1) * 1.2 if wall is None else wall
    return [n for v in few_slow(job, own, wall, roles, LIMITS, FEW) for n in v.names()]


def noisy(steps: int, ranks: int, seed: int = 0, noise: float = 0.1) -> Any:
    return 0.02 * np.exp(noise * np.random.default_rng(seed).standard_normal((steps, ranks)))


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_one_of_a_few_that_do_the_same_work(ranks: int) -> None:
    own = noisy(60, ranks)
    own[:, 1] += 0.02
    assert found(own) == ["1"]
    assert found(own[:59]) == []


def test_of_enough_others_another_rule_speaks() -> None:
    own = noisy(60, 8)
    own[:, 1] += 0.02
    assert found(own) == []


def test_of_two_neither_is_blamed_without_a_past() -> None:
    own = noisy(160, 2)
    own[100:, 1] += 0.02
    assert found(own[100:]) == []
    assert found(own) == ["1"]


def test_ranks_that_do_other_work_are_compared_with_their_past_alone() -> None:
    roles = RankRoles(np.arange(4), np.arange(4))
    own = noisy(160, 4) * np.array([1.0, 2.0, 4.0, 1.5])
    assert found(own, roles) == []
    own[100:, 3] *= 2
    assert found(own, roles) == ["3"]


def test_all_slower_together_is_nobody() -> None:
    roles = RankRoles(np.arange(4), np.arange(4))
    own = noisy(160, 4)
    own[100:] *= 2
    assert found(own, roles) == []
    assert found(own) == []


def test_one_that_is_slow_in_every_second_window_is_not_told() -> None:
    own = noisy(60, 4)
    own[:20, 1] += 0.02
    own[40:, 1] += 0.02
    assert found(own) == []


def test_what_costs_little_is_not_told() -> None:
    own = noisy(60, 4)
    own[:, 1] += 0.02
    assert found(own, wall=np.full(own.shape, 2.0)) == []
    assert found(own / 100, wall=own / 100) == []


def test_ranks_of_which_nothing_is_known_do_no_harm() -> None:
    own = noisy(60, 4)
    own[:, 1] += 0.02
    own[:, 2] = np.nan
    own[5:9, 0] = np.nan
    assert found(own) == ["1"]


@pytest.mark.parametrize("seed", range(20))
def test_no_load_makes_one_of_four_slow(seed: int) -> None:
    """Two cores for four ranks: heavy tails, bursts that hit one rank for a dozen of steps."""
    rng = np.random.default_rng(seed)
    own = noisy(160, 4, seed, noise=0.25)
    own += np.where(rng.random(own.shape) < 0.3, 0.04 * rng.random(own.shape) ** 3, 0)
    for _ in range(6):
        start = int(rng.integers(150))
        own[start : start + 12, rng.integers(4)] *= 3
    assert found(own) == []


def test_the_median_of_the_others() -> None:
    values = np.array([1.0, 5.0, 3.0, 9.0, np.nan, 7.0, 2.0])
    codes = np.array([0, 0, 0, 0, 0, 1, 2])
    got = _others(values, codes)
    for i in range(4):
        assert got[i] == np.median(np.delete(values[:4], i))
    assert np.isnan(got[4:]).all()


def test_how_often_a_rank_is_first() -> None:
    window = np.array([[1.0, 2.0, 9.0], [3.0, 2.0, 9.0], [1.0, np.nan, 9.0]])
    assert _often_first(window, np.array([0, 0, 1])).tolist() == pytest.approx([2 / 3, 1 / 3, 1.0])


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).random((21, 30))
    values[np.random.default_rng(1).random(values.shape) < 0.2] = np.nan
    for share in (0.0, 0.5, 0.9, 1.0):
        np.testing.assert_allclose(
            _quantile(values, share), np.nanquantile(values, share, axis=0), rtol=1e-12
        )
    assert np.isnan(_quantile(np.full((3, 1), np.nan), 0.5)).all()
    assert np.isnan(_quantile(np.zeros((0, 2)), 0.5)).all()
