from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.data.permutation import MOST, Permutation
from ckptd.errors import UsageError


@given(st.integers(1, 3000), st.lists(st.integers(), max_size=3))
def test_each_element_comes_once(size: int, key: list[int]) -> None:
    got = Permutation(size, *key)[range(size)]
    assert sorted(got.tolist()) == list(range(size))


@given(st.integers(1, MOST), st.lists(st.integers(0, 1 << 70), min_size=1, max_size=20))
def test_huge_ones_stay_inside_and_do_not_collide(size: int, places: list[int]) -> None:
    distinct = np.array(sorted({p % size for p in places}), np.int64)
    got = Permutation(size, 7)[distinct]
    assert got.min() >= 0
    assert got.max() < size
    assert len(set(got.tolist())) == len(distinct)


def test_every_number_of_the_key_counts() -> None:
    keys = [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (1 << 64,), (1 << 128,)]
    seen = {tuple(Permutation(1000, *key)[range(1000)].tolist()) for key in keys}
    assert len(seen) == len(keys)


def test_values_never_change_between_versions() -> None:
    # A job that resumes with a newer ckptd must go on with the same order.
    assert Permutation(10, 1, 2)[range(10)].tolist() == GOLDEN
    assert int(Permutation(10**15, 3)[np.array([10**14])][0]) == GOLDEN_LARGE


def test_it_looks_random() -> None:
    size = 20_000
    runs = np.stack([Permutation(size, 5, epoch)[range(200)] for epoch in range(400)])
    # Each place of each epoch is one draw: means, neighbours and repetitions as of uniform draws.
    middle = (size - 1) / 2
    sigma = size / np.sqrt(12)
    assert abs(runs.mean() - middle) < 5 * sigma / np.sqrt(runs.size)
    steps = np.diff(runs, axis=1)
    assert abs((steps > 0).mean() - 0.5) < 0.01
    assert abs(np.corrcoef(runs[:, :-1].ravel(), runs[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(runs[:-1].ravel(), runs[1:].ravel())[0, 1]) < 0.02
    counts = np.bincount(runs.ravel() * 100 // size, minlength=100)
    expected = runs.size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 180  # chi square of 99: 5 sigma is 169


@pytest.mark.parametrize("size", [0, -1, MOST + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="cannot have this size"):
        Permutation(size)


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_out_of_range_is_refused(place: int) -> None:
    with pytest.raises(UsageError, match="index out of range"):
        Permutation(10)[np.array([place])]


GOLDEN = [9, 8, 5, 7, 2, 1, 3, 6, 0, 4]
GOLDEN_LARGE = 133678810274631
