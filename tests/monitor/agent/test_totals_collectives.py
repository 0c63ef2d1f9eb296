"""Each collective is counted once, with the time of the member that waited least."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from ckptd.monitor.agent.rings import Rings
from ckptd.monitor.agent.totals import RingTotals
from ckptd.monitor.collectives import BUS_BYTES, BYTES, CALLS, SECONDS, TIMES, TIMES_S
from ckptd.monitor.ring import RecorderState, RingGroup, RingIdentity, RingShape, RingWriter
from ckptd.monitor.stats import Array

MIB = 1 << 20


class Rank:
    """Writes calls whose times are what they are said to be."""

    def __init__(self, folder: Path, rank: int, slots: int = 64) -> None:
        identity = RingIdentity(rank=rank, world=4)
        self.ring = RingWriter(folder / f"x-{rank}-1.ring", identity, RingShape(slots=slots))
        self.ring.state(RecorderState.CALLS)

    def group(self, ident: int, size: int, me: int, kind: str) -> RingGroup:
        group = self.ring.add_group(ident, size, me, range(size), f"g{ident}", kind)
        assert group is not None
        return group

    def begin(self, group: RingGroup, op: str, nbytes: int = MIB) -> tuple[int, int]:
        return self.ring.enter(group, self.ring.text(op), nbytes, 0, -1, 0, 3)

    def end(self, group: RingGroup, call: tuple[int, int], seconds: float) -> None:
        slot = self.ring._words[4096 // 8 + (call[0] - 1) % self.ring.shape.slots * 8 + 1]
        self.ring.leave(group, *call, at=slot + round(seconds * 1e9))

    def call(self, group: RingGroup, op: str, seconds: float, nbytes: int = MIB) -> None:
        self.end(group, self.begin(group, op, nbytes), seconds)


class Node:
    def __init__(self, folder: Path) -> None:
        self.rings = Rings(folder)
        self.totals = RingTotals()
        self.number = 0
        self.now = time.monotonic()

    def told(self, later_s: float = 0.0) -> dict[tuple[str, str], Array]:
        self.now += later_s
        self.rings.refresh(time.monotonic())
        rings = list(self.rings.ranks.values())
        for ring in rings:
            ring.glance(time.monotonic())
        assert self.totals.add_up(rings, self.now) == []
        self.number += 1
        rows, _ = self.totals.collectives.take(self.number, self.number - 1)
        return {(r["op"].decode(), r["kind"].decode()): r["values"] for r in rows}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_once_each_with_the_time_of_the_last_to_arrive(tmp_path: Path, node: Node) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    for me, rank in enumerate(ranks):
        tp = rank.group(7, 2, me, "tp")
        for seconds in (0.5, 0.002) if me else (0.02, 0.2):
            rank.call(tp, "all_reduce", seconds)
    told = node.told()["all_reduce", "tp"]
    assert told[CALLS] == 2
    assert told[BYTES] == told[BUS_BYTES] == 2 * MIB
    assert told[SECONDS] == pytest.approx(0.022)
    assert told[TIMES + int(np.searchsorted(TIMES_S, 0.02))] == 1
    assert told[TIMES:].sum() == 2
    assert not node.told()
    node.rings.close()


def test_a_member_that_tells_later_is_waited_for_and_not_for_ever(
    tmp_path: Path, node: Node
) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    groups = [rank.group(7, 2, me, "tp") for me, rank in enumerate(ranks)]
    for _ in range(2):
        ranks[0].call(groups[0], "all_reduce", 0.3)
    ranks[1].call(groups[1], "all_reduce", 0.1)
    assert node.told()["all_reduce", "tp"][SECONDS] == pytest.approx(0.1)
    assert not node.told(30.0)
    ranks[0].call(groups[0], "barrier", 0.3)
    assert node.told(61.0)["all_reduce", "tp"][SECONDS] == pytest.approx(0.3)
    node.rings.close()


def test_only_where_the_first_member_is(tmp_path: Path, node: Node) -> None:
    rank = Rank(tmp_path, 1)
    mine, others = rank.group(7, 2, 0, "dp"), rank.group(8, 2, 1, "pp")
    rank.call(mine, "reduce_scatter max", 0.01)
    rank.call(others, "all_gather", 0.01)
    told = node.told()
    assert list(told) == [("reduce_scatter", "dp")]
    assert told["reduce_scatter", "dp"][BUS_BYTES] == MIB / 2
    node.rings.close()


def test_calls_that_go_on_are_counted_when_they_end_or_never_will(
    tmp_path: Path, node: Node
) -> None:
    rank = Rank(tmp_path, 0)
    group = rank.group(7, 1, 0, "dp")
    rank.begin(group, "all_gather")
    slow = rank.begin(group, "all_reduce")
    rank.call(group, "barrier", 0.001, 0)
    assert list(node.told()) == [("barrier", "dp")]
    rank.end(group, slow, 0.2)
    rank.call(group, "barrier", 0.001, 0)
    assert node.told()["all_reduce", "dp"][SECONDS] == pytest.approx(0.2)
    for _ in range(2):
        for _ in range(40):
            rank.call(group, "barrier", 0.001, 0)
        told = node.told()
        assert told["barrier", "dp"][CALLS] == 40
        if ("all_gather", "dp") in told:
            break
    assert told["all_gather", "dp"][CALLS] == 1
    assert told["all_gather", "dp"][TIMES:].sum() == 0
    assert node.totals.overruns == 0
    node.rings.close()


def test_a_call_that_failed_has_no_time(tmp_path: Path, node: Node) -> None:
    rank = Rank(tmp_path, 0)
    group = rank.group(7, 1, 0, "dp")
    rank.ring.leave(group, *rank.begin(group, "all_reduce"), failed=True)
    told = node.told()["all_reduce", "dp"]
    assert (told[CALLS], told[SECONDS], told[TIMES:].sum()) == (1, 0, 0)
    node.rings.close()


def test_counts_of_a_rank_without_calls(tmp_path: Path, node: Node) -> None:
    rank = Rank(tmp_path, 0)
    group = rank.group(7, 2, 0, "default_pg")
    rank.ring.state(RecorderState.COUNTERS)
    group.at_least(9, 8, 1)
    assert node.told()["unknown", "default_pg"][CALLS] == 8
    group.at_least(11, 11, 1)
    assert node.told()["unknown", "default_pg"][CALLS] == 3
    node.rings.close()


def test_what_recording_costs(tmp_path: Path, node: Node) -> None:
    rank = Rank(tmp_path, 0)
    group = rank.group(7, 1, 0, "dp")
    rank.ring.cost(2000)
    for count in (5, 7):
        for _ in range(count):
            rank.call(group, "all_reduce", 0.001)
        node.told()
    assert node.totals.recorder_s == pytest.approx(12 * 2e-6)
    node.rings.close()
