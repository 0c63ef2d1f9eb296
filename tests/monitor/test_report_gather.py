from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import JobView, RankView
from ckptd.monitor.report import (
    AgentState,
    NodeReport,
    RankNote,
    from_views,
    gathered,
    job_of,
    merge,
    pack,
    unpack_report,
)
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor.jobs import changed, view

MESH = Mesh(4, 2, 4)
JOB = play(MESH, [Fault(Planted.HANG, 9, 2)], np.random.default_rng(1))


def parts(job: JobView = JOB) -> list[NodeReport]:
    """A sheet of each node."""
    by_node: dict[str, list[RankView]] = {}
    for v in views(job):
        by_node.setdefault(v.node, []).append(v)
    return [
        unpack_report(pack(from_views(mine, job="j", source=node, number=1)))
        for node, mine in by_node.items()
    ]


def assert_same(one: JobView, other: JobView) -> None:
    assert (one.world, one.nodes) == (other.world, other.nodes)
    for name in ("ranks", "groups", "calls"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert len(mine) == len(theirs)
        for column in mine.dtype.names:
            np.testing.assert_array_equal(mine[column], theirs[column], err_msg=column)


def test_sheets_are_the_job_that_they_show() -> None:
    assert_same(job_of(parts(), {}), JOB)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_forwarder_changes_nothing(split: int) -> None:
    each = parts()
    merged = [
        merge(some, [0.0] * len(some), job="j", source=f"f{i}", number=1)
        for i, some in enumerate((each[:split], each[split:]))
    ]
    whole = job_of([unpack_report(pack(s)) for s in merged], {})
    assert_same(whole, job_of(each, {}))
    again = merge(merged, [0.0, 0.0], job="j", source="root", number=1)
    assert_same(job_of([unpack_report(pack(again))], {}), job_of(each, {}))


def test_ages_of_agents_add_up_on_the_way() -> None:
    one = from_views([view(0)], job="j", source="a", number=1, agents={"n0": AgentState(rings=3)})
    first = merge([one], [2.0], job="j", source="f", number=1)
    second = merge([first], [0.5], job="j", source="g", number=1)
    assert second.agents == (AgentState(rings=3, age_s=2.5),)


def test_nothing_is_a_job_too() -> None:
    assert len(job_of([], {}).ranks) == 0
    empty = merge([], [], job="j", source="f", number=1)
    assert job_of([unpack_report(pack(empty))], {}).world == 0


def both(*views_and_notes: tuple[RankView, RankNote]) -> list[NodeReport]:
    return [
        from_views([v], job="j", source=f"s{i}", number=1, notes={v.rank: note})
        for i, (v, note) in enumerate(views_and_notes)
    ]


@pytest.mark.parametrize(
    ("dead", "one", "other"),
    [
        (True, RankNote(generation=1), RankNote(generation=0)),
        (False, RankNote(generation=0), RankNote(generation=1)),
        (False, RankNote(lived=500.0), RankNote(lived=3.0)),
    ],
)
def test_of_a_rank_that_two_tell_one_counts(dead: bool, one: RankNote, other: RankNote) -> None:
    """The process that runs, the newer generation, the younger process: here always the second."""
    first = changed(view(0, node="a"), alive=not dead, pid=1)
    second = changed(view(0, node="b"), pid=2)
    for sheets in (
        both((first, one), (second, other)),
        both((second, other), (first, one)),
    ):
        job, rows = gathered(sheets, {})
        assert rows["pid"].tolist() == job.ranks["pid"].tolist() == [2]
        assert job.nodes[job.ranks["node"][0]] == "b"


def test_dead_processes_of_earlier_generations_are_left_out() -> None:
    old = changed(view(0), alive=False)
    sheets = both((old, RankNote(generation=0)), (view(1), RankNote(generation=1)))
    assert job_of(sheets, {}).ranks["rank"].tolist() == [1]
    sheets = both((old, RankNote()), (view(1), RankNote()))
    assert job_of(sheets, {}).ranks["rank"].tolist() == [0, 1]


def test_rows_of_silent_nodes_do_not_count() -> None:
    job, rows = gathered(parts(), {}, silent=["n1"])
    assert set(job.ranks["rank"].tolist()) == set(range(32)) - set(range(8, 16))
    assert len(rows) == len(job.ranks)
    assert job.calls["row"].max() == len(job.ranks) - 1
    ranks = job.ranks["rank"][job.calls["row"]]
    whole = job_of(parts(), {})
    theirs = whole.ranks["rank"][whole.calls["row"]]
    assert ranks.tolist() == [r for r in theirs.tolist() if not 8 <= r < 16]
