from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.placement import Coordinate, NodeSlot
from ckptd.elastic.policy import JobSpec, MemoryNeed, Shape
from ckptd.errors import RefusedError, UsageError
from ckptd.reshard.explain import Explanation, cluster_of, explain, row_of, survivors_of

PLANNED = Shape(2, 4, 2)
JOB = JobSpec(microbatches=64, planned=PLANNED)


def told(job: JobSpec, left: list[NodeSlot], slots: int = 8) -> Explanation:
    return explain(job, left, job.planned, slots)


def test_a_cluster_is_as_large_as_its_layout_and_holds_it() -> None:
    slots = cluster_of(JOB, 8, spare_nodes=1)
    assert len(slots) == 24
    assert {s.held for s in slots if s.held} == {
        Coordinate(p, d, t) for p in range(2) for d in range(4) for t in range(2)
    }
    assert [s.node for s in slots if s.held is None] == ["n2"] * 8
    # A node of 3 slots has room for one group of 2.
    assert len(cluster_of(JOB, 3)) == 24


def test_groups_that_fit_no_node_are_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        cluster_of(JOB, 1)
    assert caught.value.kind == "no-layout"


def test_thirteen_of_sixteen() -> None:
    left = survivors_of(cluster_of(JOB, 8), survivors=13)
    e = told(JOB, left)
    assert (e.shape, e.survivors, e.moves) == (Shape(2, 3, 2), 13, 2)
    assert e.parked == ("n1/4",)
    assert e.lost == (Coordinate(1, 2, 1), Coordinate(1, 3, 0), Coordinate(1, 3, 1))
    assert e.throughput == pytest.approx((16 + 1) / (22 + 1))
    assert e.ideal == pytest.approx(13 / 16)
    assert e.grown.shape == PLANNED
    assert [s.rank for s in e.seats] == list(range(12))
    moved = [s for s in e.seats if not s.stays]
    assert [(s.before, (s.pp, s.dp, s.tp)) for s in moved] == [
        (Coordinate(0, 3, 0), (1, 2, 0)),
        (Coordinate(0, 3, 1), (1, 2, 1)),
    ]


def test_a_refusal_says_whether_one_more_node_would_do() -> None:
    left = survivors_of(cluster_of(JOB, 2), survivors=3)
    with pytest.raises(RefusedError) as caught:
        told(JOB, left, 2)
    assert "one more node of 2 slots would do: pp=2 dp=1 tp=2" in str(caught.value.hint)
    memory = MemoryNeed(replicated=100, limit=1)
    hopeless = JobSpec(microbatches=64, planned=PLANNED, memory=memory)
    with pytest.raises(RefusedError) as caught:
        told(hopeless, left, 2)
    assert "one more node" not in str(caught.value.hint)
    assert row_of(hopeless, left, PLANNED).shape is None
    everything = cluster_of(JOB, 2)
    assert "bytes a rank" in row_of(hopeless, everything, PLANNED).refused


@pytest.mark.parametrize(
    "wrong", [{"nodes_lost": ("n7",)}, {"survivors": 17}, {"nodes_lost": ("n0",), "survivors": 9}]
)
def test_what_cannot_be_left_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        survivors_of(cluster_of(JOB, 8), **wrong)  # type: ignore[arg-type]
    assert caught.value.kind == "bad-argument"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[JobSpec, int]:
    planned = Shape(*(draw(st.integers(1, 3)) for _ in range(3)))
    job = JobSpec(
        microbatches=draw(st.integers(planned.dp, 12)),
        planned=planned,
        pp=tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
        tp=tuple(draw(st.lists(st.integers(1, 3), max_size=1))),
    )
    return job, planned.tp * draw(st.integers(1, 2))


@given(jobs(), st.data())
def test_every_micro_batch_is_computed_once_and_every_slot_is_accounted_for(
    made: tuple[JobSpec, int], data: st.DataObject
) -> None:
    job, slots = made
    cluster = cluster_of(job, slots, data.draw(st.integers(0, 1)))
    left = survivors_of(cluster, survivors=data.draw(st.integers(0, len(cluster))))
    row = row_of(job, left, job.planned)
    try:
        e = told(job, left, slots)
    except RefusedError:
        assert row.shape is None
        assert row.refused
        return
    assert (row.shape, row.throughput, row.moves) == (e.shape, e.throughput, e.moves)
    assert row.parked == len(e.parked) == len(left) - len(e.seats)
    for p in range(e.shape.pp):
        for t in range(e.shape.tp):
            runs = [s.microbatches for s in e.seats if (s.pp, s.tp) == (p, t)]
            every = [m for low, end in sorted(runs) for m in range(low, end)]
            assert every == list(range(job.microbatches))
    held = {s.held for s in left if s.held is not None}
    assert len(held) + len(e.lost) == job.planned.world
    assert e.moves == sum(not s.stays for s in e.seats)
    assert e.options[0].shape == e.shape
    assert not e.options[0].refused
    assert e.grown.shape is not None  # more slots never leave less


@given(jobs())
def test_nothing_lost_changes_nothing(made: tuple[JobSpec, int]) -> None:
    job, slots = made
    only = JobSpec(microbatches=job.microbatches, planned=job.planned)
    e = told(only, cluster_of(only, slots), slots)
    assert (e.shape, e.throughput, e.ideal, e.moves, e.lost) == (job.planned, 1.0, 1.0, 0, ())
