"""Faults planted in real ranks, and what the real agent and daemon say of them; a short selection.

The whole matrix is `python -m tests.monitor.faults.run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.monitor.faults.case import Case, draw
from tests.monitor.faults.judge import NOTHING, Heard, judge, table
from tests.monitor.faults.kinds import KINDS
from tests.monitor.faults.scene import RECORDING, Scene, replay
from tests.monitor.faults.zygote import Zygote

FLOOR_S = 2.0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


def drawn(kind: str, seed: int) -> Case:
    row = KINDS[kind]
    return draw(kind, seed, floor=FLOOR_S, nodes=row.nodes, pause=row.pause)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["kill", "stop", "skip"])
def test_the_culprit_is_named(kind: str, zygote: Zygote, tmp_path: Path) -> None:
    case = drawn(kind, 1)
    outcome = Scene(zygote, case, tmp_path / "case").run()
    assert outcome.right_class, outcome
    assert outcome.right_culprit, outcome
    assert not outcome.note
    again = replay(tmp_path / "case", case)
    assert [line.partition(" rank")[0] for line in again] == [h.kind for h in outcome.heard]
    assert (tmp_path / "case" / RECORDING).stat().st_size


def heard(kind: str, *names: str, after: float = 3.0, members: tuple[int, ...] = ()) -> Heard:
    return Heard(kind, names, members, after)


def test_the_judge() -> None:
    """Who judges the monitor is judged by hand."""
    stop = Case(kind="stop", seed=0, victim=2)
    right = judge(stop, [heard("non-communication hang", "rank 2")], ["n"])
    assert (right.right, right.latency_s) == (True, 1.0)
    for wrong in (
        [],
        [heard("non-communication hang", "rank 1")],
        [heard("non-communication hang", "rank 1", "rank 2")],
        [heard("crash", "rank 2")],
        [heard("non-communication hang", "rank 2", after=-1.0)],
        [heard("non-communication hang", "rank 2"), heard("slow rank", "rank 2")],
    ):
        assert not judge(stop, wrong, ["n"]).right
    unsure = [heard("cannot say", "rank 1"), heard("non-communication hang", "rank 2")]
    assert judge(stop, unsure, ["n"]).right
    assert judge(stop, [], ["n"]).verdict == NOTHING
    both = Case(kind="partition", seed=0, victim=1)
    group = heard("communication hang", "group ab", members=(0, 1))
    assert judge(both, [group], ["n"]).right
    assert not judge(both, [heard("communication hang", "group ab", members=(2, 3))], ["n"]).right
    node = Case(kind="node", seed=0, victim=3, nodes=2)
    for named in (("node b",), ("rank 2", "rank 3")):
        assert judge(node, [heard("crash", *named)], ["a", "b"]).right
    assert not judge(node, [heard("crash", "node a")], ["a", "b"]).right
    calm = Case(kind="all-pause", seed=0)
    assert judge(calm, [], ["n"]).right
    assert not judge(calm, [heard("crash", "rank 2")], ["n"]).right


def test_the_table_counts_each_kind() -> None:
    stop = Case(kind="stop", seed=0, victim=2)
    outcomes = [
        judge(stop, [heard("non-communication hang", "rank 2", after=3.0 + i)], ["n"])
        for i in range(3)
    ]
    outcomes.append(judge(stop, [heard("crash", "rank 2")], ["n"]))
    head, _, row = table(outcomes)
    cells = dict(zip(head.split("|"), row.split("|"), strict=True))
    assert cells["called"] == "non-communication hang 3, crash 1"
    assert (cells["right class"], cells["right culprit"]) == ("3/4", "4/4")
    assert (cells["p50 s"], cells["max s"]) == ("2.00", "3.00")


def test_a_case_is_what_its_seed_says() -> None:
    assert drawn("stop", 3) == drawn("stop", 3)
    assert len({drawn("stop", seed).step for seed in range(20)}) > 5
    assert {drawn("corrupt", seed).loop for seed in range(20)} == {"hand", "ddp"}
