"""All calls are added up: pauses and steps, each told once, whenever they are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.monitor import ring as ring_module
from ckptd.monitor.agent.rings import Ring, Rings
from ckptd.monitor.agent.totals import RingTotals
from ckptd.monitor.job import Phase
from ckptd.monitor.ring import RingGroup, RingIdentity, RingShape, RingWriter


class Rank:
    """A ring whose clock is ours: times are what they are said to be."""

    def __init__(self, folder: Path, rank: int = 0, slots: int = 256) -> None:
        shape = RingShape(slots=slots)
        self.ring = RingWriter(folder / f"x-{rank}-1.ring", RingIdentity(rank=rank, world=2), shape)
        group = self.ring.add_group(7, 2, rank, range(2), "world")
        assert group is not None
        self.group: RingGroup = group
        self.ring.phase = Phase.TRAIN

    def call(self, alone_s: float, inside_s: float, site: int = 3) -> None:
        clock.now += round(alone_s * 1e9)
        number, seq = self.ring.enter(self.group, 1, 4, 0, -1, 0, site)
        clock.now += round(inside_s * 1e9)
        self.ring.leave(self.group, number, seq)

    def step(self, step: int, alone_s: float = 0.1, calls: int = 2) -> None:
        self.ring.step(step)
        for _ in range(calls):
            self.call(alone_s, 0.02)


class Clock:
    now = 0


clock = Clock()


@pytest.fixture(autouse=True)
def _our_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any time is a legal one: a machine may have booted just now, and clocks begin at 0 there.
    clock.now = 10**9
    monkeypatch.setattr(ring_module.time, "monotonic_ns", lambda: clock.now)
    monkeypatch.setattr(ring_module, "_now", lambda: clock.now)


def opened(folder: Path) -> tuple[Rings, Ring]:
    rings = Rings(folder)
    rings.refresh(clock.now / 1e9)
    return rings, rings.ranks[0]


def added(totals: RingTotals, ring: Ring) -> tuple[Any, Any]:
    ring.glance(clock.now / 1e9)
    totals.add(ring)
    tables, _ = totals.take(1, 0, {0: 4})
    return tables["gaps"], tables["steps"]


def test_steps_are_told_once_when_they_are_done(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    for step in range(4):
        rank.step(step)
    _, steps = added(totals, ring)
    # Nobody saw what was before step 0, and step 3 goes on.
    assert steps["step"].tolist() == [1, 2]
    assert steps["row"].tolist() == [4, 4]
    np.testing.assert_allclose(steps["self_s"], 0.2)
    np.testing.assert_allclose(steps["inside_s"], 0.04)
    np.testing.assert_allclose(steps["wall_s"], 0.24)
    for step in range(4, 6):
        rank.step(step, 0.3)
    _, steps = added(totals, ring)
    assert steps["step"].tolist() == [3, 4]
    np.testing.assert_allclose(steps["self_s"], [0.2, 0.6])
    assert len(added(totals, ring)[1]) == 0
    rings.close()


def test_it_does_not_matter_how_often_one_looks(tmp_path: Path) -> None:
    rank, often, seldom = Rank(tmp_path), RingTotals(), RingTotals()
    rings, ring = opened(tmp_path)
    seen = []
    for step in range(12):
        rank.step(step, 0.1 + 0.01 * step, calls=3)
        seen += added(often, ring)[1].tolist()
    np.testing.assert_allclose(np.array(seen), np.array(added(seldom, ring)[1].tolist()))
    assert [row[1] for row in seen] == list(range(1, 11))
    rings.close()


def test_a_step_waits_for_its_last_call(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    rank.step(0)
    rank.step(1)
    number, seq = rank.ring.enter(rank.group, 1, 4, 0, -1, 0, 3)
    rank.ring.step(2)
    assert len(added(totals, ring)[1]) == 0
    clock.now += 10**9
    rank.ring.leave(rank.group, number, seq)
    rank.step(2)
    assert added(totals, ring)[1]["step"].tolist() == [1]
    rings.close()


def test_steps_again_from_an_earlier_one(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    for step in (*range(10, 14), *range(5, 9)):
        rank.step(step)
        last = added(totals, ring)[1]
    assert last["step"].tolist() == [7]
    rings.close()


def test_the_longest_pause_of_each_kind_of_call(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    for pause in (0.1, 0.5, 0.2):
        rank.call(pause, 0.01)
    rank.call(0.3, 0.01, site=9)
    rank.call(0.05, 0.01, site=9)
    gaps, _ = added(totals, ring)
    told = {int(row["site"]): float(row["seconds"]) for row in gaps}
    assert told == pytest.approx({3: 0.5, 9: 0.05})
    assert len(added(totals, ring)[0]) == 0
    # A little longer is not worth a word, much longer is.
    rank.call(0.051, 0.01, site=9)
    assert len(added(totals, ring)[0]) == 0
    rank.call(0.8, 0.01, site=9)
    assert added(totals, ring)[0]["seconds"].tolist() == pytest.approx([0.8])
    again = totals.take(1, 0, {0: 0}, again=True)[0]["gaps"]
    assert len(again) == 2
    rings.close()


def test_pauses_are_seen_across_looks(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    rank.call(0.1, 0.01)
    added(totals, ring)
    rank.call(0.7, 0.01)
    assert added(totals, ring)[0]["seconds"].tolist() == pytest.approx([0.7])
    rings.close()


def test_calls_that_were_overwritten_are_counted(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path, slots=64), RingTotals()
    rings, ring = opened(tmp_path)
    for step in range(20):
        rank.step(step, calls=10)
    _, steps = added(totals, ring)
    assert totals.overruns == 200 - 64
    assert steps["step"].tolist() == [14, 15, 16, 17, 18]
    rings.close()


def test_a_step_longer_than_the_ring(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path, slots=64), RingTotals()
    rings, ring = opened(tmp_path)
    rank.ring.step(0)
    for _ in range(10):
        for _ in range(40):
            rank.call(0.01, 0.01)
        assert len(added(totals, ring)[1]) == 0
    assert totals.overruns == 0
    for step in range(1, 4):
        rank.step(step)
    assert added(totals, ring)[1]["step"].tolist()[-1] == 2
    rings.close()


def test_a_checkpoint_is_nobodys_own_time(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    rank.step(0)
    rank.step(1)
    rank.ring.phase = Phase.CKPT
    rank.call(5.0, 0.1)
    rank.ring.phase = Phase.TRAIN
    rank.step(2)
    rank.step(3)
    _, steps = added(totals, ring)
    assert (steps["self_s"] < 1).all()
    rings.close()


def test_rings_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    rank, totals = Rank(tmp_path), RingTotals()
    rings, ring = opened(tmp_path)
    rank.step(0)
    added(totals, ring)
    totals.keep_only([])
    assert len(added(totals, ring)[0]) == 0  # told already, though the ring is new to it
    rings.close()
