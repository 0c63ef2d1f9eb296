"""Owner maps answer as the plain list of file numbers does."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.owners import ABSENT, Owners, single_owner

files = st.lists(st.sampled_from([ABSENT, ABSENT, 0, 1, 2, 3, 4, 8]), max_size=24)


@given(files, st.integers(0, 5))
def test_a_map_is_its_list(values: list[int], base: int) -> None:
    owners = Owners.from_array(values)
    based = [v if v == ABSENT else v + base for v in values]
    assert owners.npieces == len(values)
    assert owners.has_absent == (ABSENT in values)
    assert owners.array(base).tolist() == based
    assert [owners.owner(i, base) for i in range(len(values))] == based
    assert owners.highest(base) == max((v for v in based if v != ABSENT), default=ABSENT)
    for file in range(14):
        assert list(owners.pieces_of(file, base)) == [i for i, v in enumerate(based) if v == file]
    assert list(owners.pieces_of(ABSENT, base)) == []
    for outside in (-1, len(values)):
        with pytest.raises(IndexError):
            owners.owner(outside)


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        (list(range(16384)), ((0, 1, 16384),)),
        ([0, 8, 16, 1, 9, 17], ((0, 8, 3), (1, 8, 3))),
        ([3] * 5, ((3, 0, 5),)),
        ([2, 1, 0, ABSENT, ABSENT], ((2, -1, 3), (ABSENT, 0, 2))),
        ([1, ABSENT, 0], ((1, 0, 1), (ABSENT, 0, 1), (0, 0, 1))),
        ([], ()),
    ],
)
def test_regular_maps_are_few_runs(
    values: list[int], runs: tuple[tuple[int, int, int], ...]
) -> None:
    assert Owners.from_array(values).runs == runs


@pytest.mark.parametrize(
    "run",
    [
        (-2, 0, 1),
        (ABSENT, 1, 2),
        (0, -1, 2),
        (3, -2, 3),
        (0, 1, 0),
        (0, 1, -4),
        (0, 2**62, 3),
        (2**63, 0, 1),
        (0, 0, 2**63),
        (0.0, 0, 1),
        (0, True, 1),
    ],
)
def test_runs_that_cannot_be_are_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        Owners((run,))


def test_file_numbers_below_absent_are_refused() -> None:
    with pytest.raises(ValueError):
        Owners.from_array([0, -2])


def test_huge_counts_cost_nothing() -> None:
    tracemalloc.start()
    owners = Owners(((0, 0, 2**60), (ABSENT, 0, 2**60), (5, 3, 2**59)))
    assert owners.owner(2**60 - 1) == 0
    assert owners.owner(2**60) == ABSENT
    assert owners.owner(2**61 + 2) == 11
    assert owners.highest() == 5 + 3 * (2**59 - 1)
    assert next(owners.pieces_of(11)) == 2**61 + 2
    with pytest.raises(ValueError, match="an array of"):
        owners.array()
    with pytest.raises(ValueError):
        Owners(((0, 0, 2**62),) * 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_maps_hash_and_travel() -> None:
    owners = single_owner(7)
    copy = pickle.loads(pickle.dumps(owners))
    assert (copy, hash(copy)) == (owners, hash(owners))
