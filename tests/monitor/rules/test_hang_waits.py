"""The wait-for graph against the same rules written edge by edge."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptd.monitor.job import JobView
from ckptd.monitor.rules.hang import waits
from tests.monitor import jobs

RANKS = 6


@st.composite
def frozen(draw: st.DrawFn) -> JobView:
    """Ranks in some groups, most of them inside a call; some do not report."""
    members = {
        g: draw(st.sets(st.integers(0, RANKS - 1), min_size=2, max_size=4)) for g in (1, 2, 3)
    }
    views = []
    for rank in range(RANKS):
        mine = [g for g in members if rank in members[g]]
        rows = {g: (len(members[g]), e := draw(st.integers(1, 3)), e) for g in mine}
        pending = draw(st.sampled_from([0, *mine]))
        seq = rows[pending][1] if pending else 0
        views.append(
            jobs.view(
                rank,
                RANKS,
                groups=jobs.groups(rows) if rows else jobs.groups({}),
                pending_group=pending,
                pending_seq=seq,
                pending_since=jobs.NOW - 1 if pending else np.nan,
            )
        )
    silent = draw(st.sets(st.integers(0, RANKS - 1), max_size=2))
    return jobs.job(*(v for v in views if v.rank not in silent))


def _edges(job: JobView) -> dict[int, set[int]]:
    """For each row inside a call, the rows that have not entered it; -1 stands for silent ones."""
    out: dict[int, set[int]] = {}
    for row, rank in enumerate(job.ranks):
        if not rank["pending_group"]:
            continue
        mine = job.groups[job.groups["group"] == rank["pending_group"]]
        late = {int(r["row"]) for r in mine if r["entered"] < rank["pending_seq"]}
        out[row] = late | ({-1} if len(mine) < mine["size"][0] else set())
    return out


def _reaches(edges: dict[int, set[int]], start: int) -> set[int]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        for other in edges.get(todo.pop(), set()) - seen:
            seen.add(other)
            todo.append(other)
    return seen


@given(frozen())
def test_it_is_the_graph_of_all_edges(job: JobView) -> None:
    count = len(job.ranks)
    got = waits(job, np.zeros(count, bool))
    edges = _edges(job)
    # A silent member explains only who has no reporting one to wait for, or nothing better.
    awaited = {r for late in edges.values() for r in late}
    ends = {r for r in range(count) if not edges.get(r)}
    for row in range(count):
        reached = _reaches(edges, row)
        waiting = bool(edges.get(row))
        assert got.inside[row] == (row in edges)
        assert got.complete[row] == (row in edges and not waiting)
        assert got.awaited[row] == (row in awaited)
        assert got.root[row] == (row in awaited and row not in edges)
        unexplained = waiting and not reached & ends
        assert got.unheard[row] == (unexplained and -1 in reached)
        lost = unexplained and -1 not in reached
        if row in reached and lost:
            assert got.circle[row]
        if got.circle[row]:
            assert lost


def test_a_rank_that_is_explained_already_is_a_root_and_waits_for_nobody() -> None:
    rows = [jobs.inside(r, 7, 5 + (r == 0), 1.0, 2) for r in range(2)]
    job = jobs.job(*rows)
    got = waits(job, np.array([False, True]))
    assert got.inside.tolist() == [True, False]
    assert got.root.tolist() == [False, True]
