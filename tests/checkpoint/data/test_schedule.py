from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.data.schedule import Schedule, share
from ckptd.errors import UsageError

SIZES = st.integers(1, 200)


@given(st.integers(0, 500), st.integers(1, 40))
def test_shares_are_contiguous_and_even(count: int, parts: int) -> None:
    runs = [share(count, parts, part) for part in range(parts)]
    assert [k for run in runs for k in run] == list(range(count))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(SIZES, st.integers(1, 7), st.integers(1, 12), st.booleans(), st.data())
def test_a_step_is_the_same_whatever_the_world(
    size: int, microbatch: int, microbatches: int, shuffle: bool, data: st.DataObject
) -> None:
    schedule = Schedule(
        size=size, microbatch=microbatch, microbatches=microbatches, shuffle=shuffle
    )
    consumed = data.draw(st.integers(0, 3 * size))
    world = data.draw(st.integers(1, microbatches))
    alone = [b.tolist() for b in schedule.samples_of(consumed, schedule.mine(0, 1))]
    shared = [
        b.tolist()
        for rank in range(world)
        for b in schedule.samples_of(consumed, schedule.mine(rank, world))
    ]
    assert shared == alone
    assert len(alone) == microbatches
    assert {len(b) for b in alone} == {microbatch}


@given(SIZES, st.integers(1, 3), st.lists(st.integers(1, 6), min_size=1, max_size=30))
def test_each_sample_is_consumed_once_an_epoch_while_the_world_changes(
    size: int, microbatch: int, worlds: list[int]
) -> None:
    schedule = Schedule(size=size, microbatch=microbatch, microbatches=6, seed=3)
    consumed, seen = 0, Counter[int]()
    for world in worlds:
        for rank in range(world):
            for batch in schedule.samples_of(consumed, schedule.mine(rank, world)):
                seen.update(batch.tolist())
        consumed += schedule.batch
    epochs, rest = divmod(consumed, size)
    times = Counter(seen[k] for k in range(size))
    expected = {epochs: size - rest, epochs + 1: rest}
    assert times == {number: count for number, count in expected.items() if count}


def test_without_shuffle_samples_come_in_their_order() -> None:
    schedule = Schedule(size=5, microbatch=2, microbatches=2, shuffle=False)
    assert schedule.samples(3, 4).tolist() == [3, 4, 0, 1]


def test_more_ranks_than_micro_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="more ranks than micro-batches") as caught:
        Schedule(size=9, microbatch=1, microbatches=3).mine(0, 4)
    assert "spares" in str(caught.value)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_schedule_without_samples_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="needs samples"):
        Schedule(size=numbers[0], microbatch=numbers[1], microbatches=numbers[2])


@pytest.mark.parametrize(("begin", "count"), [(-1, 1), (0, -1)])
def test_samples_before_the_first_are_refused(begin: int, count: int) -> None:
    with pytest.raises(UsageError, match="counted from 0"):
        Schedule(size=1, microbatch=1, microbatches=1).samples(begin, count)


@pytest.mark.parametrize(("parts", "part"), [(2, 2), (2, -1), (0, 0)])
def test_a_part_that_is_not_there_is_refused(parts: int, part: int) -> None:
    with pytest.raises(UsageError, match="part out of range"):
        share(3, parts, part)
