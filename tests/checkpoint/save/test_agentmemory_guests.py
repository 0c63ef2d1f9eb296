"""Memory for guests: filled again and again, never beyond its budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.save.agentmemory import GuestMemory
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import StoreError


@pytest.fixture
def segments() -> Iterator[GuestMemory]:
    found = GuestMemory()
    yield found
    found.close()


def test_one_that_came_back_is_taken_again(segments: GuestMemory) -> None:
    first = segments.take(1000)
    segments.give_back(first)
    assert segments.take(900) is first
    segments.give_back(first, again=False)
    assert first.fd == -1
    second = segments.take(900)
    assert second is not first
    segments.give_back(second)


def test_a_budget_is_kept(segments: GuestMemory) -> None:
    segments.budget = 2500
    taken = [segments.take(1000), segments.take(1000)]
    with pytest.raises(StoreError) as caught:
        segments.take(1000)
    assert caught.value.kind == "no-space"
    segments.give_back(taken.pop())
    taken.append(segments.take(1500))
    for segment in taken:
        segments.give_back(segment)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=40))
def test_nothing_is_given_twice_nor_beyond_the_budget(moves: list[tuple[bool, int]]) -> None:
    segments = GuestMemory()
    segments.budget = 12_000
    out: list[Slot] = []
    for take, size in moves:
        if not take and out:
            segments.give_back(out.pop(size % len(out)))
            continue
        try:
            got = segments.take(size)
        except StoreError:
            assert sum(s.nbytes for s in out) + size > 12_000
            continue
        assert got.nbytes >= size
        assert got not in out
        out.append(got)
        assert sum(s.nbytes for s in out) <= 12_000
    for segment in out:
        segments.give_back(segment, again=False)
    segments.close()
