"""Medians of many cohorts, spread, and hashes of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.monitor.stats import grouped_median, mix, sigma

VALUES = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")))),
    max_size=40,
)


@given(VALUES)
def test_medians_are_those_of_each_cohort(pairs: list[tuple[int, float]]) -> None:
    codes = np.array([c for c, _ in pairs], np.int64)
    values = np.array([v for _, v in pairs], float)
    got = grouped_median(values, codes, 6)
    for code in range(6):
        mine = values[(codes == code) & ~np.isnan(values)]
        if len(mine):
            assert got[code] == pytest.approx(np.median(mine))
        else:
            assert np.isnan(got[code])


def test_outliers_do_not_move_the_spread() -> None:
    values = np.random.default_rng(1).standard_normal(2001)
    values[:200] = 1e9
    assert sigma(values) == pytest.approx(1.0, rel=0.2)
    assert sigma(np.array([np.nan])) == 0.0


def test_rows_that_differ_anywhere_hash_apart() -> None:
    a, b = np.meshgrid(np.arange(100), np.arange(-1, 99))
    hashes = mix(a.ravel(), b.ravel())
    assert len(np.unique(hashes)) == a.size
    assert (mix(a.ravel(), b.ravel()) == hashes).all()
    assert mix(np.array([1]), np.array([2])) != mix(np.array([2]), np.array([1]))
