"""The failure rate that a root's generations tell."""

from __future__ import annotations

import random

import pytest

from ckptd.checkpoint.format.records import Generation, Parent
from ckptd.checkpoint.root.auto import ENOUGH, lives_of, mtbf_s, recent
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.index import stamp
from ckptd.store import open_store


def history(lengths: list[float], world: int = 4) -> list[Generation]:
    """Lives of these seconds, each going on from a checkpoint of the one before."""
    found, now = [], 1e9
    for number, length in enumerate([*lengths, 0.0], 1):
        parent = Parent(number, number - 1) if number > 1 else None
        found.append(Generation(number, f"c{number}", parent, stamp(now), world, "load"))
        now += length
    return found


def changed(record: Generation, **fields: object) -> Generation:
    import msgspec

    return msgspec.structs.replace(record, **fields)


def test_a_life_counts_in_seconds_of_ranks() -> None:
    assert lives_of(history([10.0, 20.0], world=4)) == [40.0, 80.0]
    assert lives_of([]) == []
    assert lives_of(history([])) == []


def test_what_tells_nothing_of_machines_does_not_count() -> None:
    whole = history([10.0, 20.0, 30.0], world=1)
    rolled_back = [*whole[:2], changed(whole[2], world_size=0), whole[3]]
    assert lives_of(rolled_back) == [10.0]
    # The second life ended before its first checkpoint: the third goes on from the first.
    fruitless = [*whole[:2], changed(whole[2], parent=Parent(1, 1)), whole[3]]
    assert lives_of(fruitless) == [10.0, 30.0]
    fresh = [*whole[:2], changed(whole[2], parent=None), whole[3]]
    assert lives_of(fresh) == [10.0, 30.0]
    backwards = [*whole[:2], changed(whole[2], created=stamp(0.0)), whole[3]]
    assert 20.0 not in lives_of(backwards)


@pytest.mark.parametrize("world", [1, 64])
def test_the_rate_of_random_failures_is_found(world: int) -> None:
    order = random.Random(7)
    found = []
    for _ in range(200):
        lengths = [order.expovariate(1 / 5000.0) for _ in range(20)]
        lengths[3] += 1e6  # a night in which nobody began again
        rate = mtbf_s(lives_of(history(lengths, world)), world)
        assert rate is not None
        found.append(rate)
    assert sorted(found)[100] == pytest.approx(5000.0, rel=0.15)
    assert min(found) > 5000.0 / 4
    assert max(found) < 5000.0 * 4


def test_more_ranks_fail_more_often() -> None:
    lives = lives_of(history([100.0] * ENOUGH, world=8))
    alone, double = mtbf_s(lives, 8), mtbf_s(lives, 16)
    assert alone is not None
    assert double == alone / 2


def test_few_lives_tell_nothing() -> None:
    assert mtbf_s(lives_of(history([5.0] * (ENOUGH - 1))), 4) is None


def test_records_come_from_the_root(tmp_path: object) -> None:
    with open_store(str(tmp_path)) as store:
        catalogue = Catalogue(store)
        catalogue.create_or_open()
        for _ in range(40):
            catalogue.claim(None, 2, "start")
        assert [g.generation for g in recent(catalogue)] == list(range(8, 41))
