from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.placement import Coordinate, NodeSlot
from ckptd.elastic.policy import Choice, JobSpec, MemoryNeed, Shape, choose, together
from ckptd.errors import RefusedError, UsageError


def cluster(nodes: int, slots: int, racks: int = 0) -> list[NodeSlot]:
    """Nodes, which lie in racks turn by turn, two racks a block; without racks nowhere."""
    where = [(f"b{r // 2}", f"r{r}") for r in range(racks)] or [()]
    return [
        NodeSlot(f"n{n:05}", k, None, where[n % len(where)])
        for n in range(nodes)
        for k in range(slots)
    ]


def settled(choice: Choice) -> list[NodeSlot]:
    """Return the slots as they are once the choice is carried out; parked ones hold nothing."""
    holding = [msgspec.structs.replace(p.slot, held=p.at) for p in choice.places]
    return holding + [msgspec.structs.replace(s, held=None) for s in choice.parked]


def without(slots: Sequence[NodeSlot], *nodes: str) -> list[NodeSlot]:
    return [s for s in slots if s.node not in nodes]


def test_a_spare_takes_the_place_of_who_is_gone() -> None:
    job = JobSpec(microbatches=8, planned=Shape(2, 2, 2))
    first = choose(job, cluster(5, 2))
    assert (first.shape, len(first.parked)) == (Shape(2, 2, 2), 2)
    gone = first.places[3].slot.node
    after = choose(job, without(settled(first), gone))
    assert after.shape == Shape(2, 2, 2)
    assert after.moves == 2
    assert "spares take the places" in after.why[0]
    stayed = {p.slot.node: p.at.dp for p in after.places if p.stays}
    assert stayed == {p.slot.node: p.at.dp for p in first.places if p.slot.node != gone}


def test_without_spares_a_replica_is_dropped_and_its_survivors_fill_holes() -> None:
    job = JobSpec(microbatches=8, planned=Shape(2, 3, 1))
    first = choose(job, cluster(6, 1))
    # One rank of replica 0 and one of replica 2 die, of different stages: what is left of the
    # replica that is dropped makes the other whole, and moves nothing.
    gone = [p.slot.node for p in first.places if p.at in ((0, 0, 0), (1, 2, 0))]
    after = choose(job, without(settled(first), *gone))
    assert after.shape == Shape(2, 2, 1)
    assert after.moves == 0
    assert "fewer replicas, 3 to 2" in after.why[0]
    assert after.why[1] == "each replica computes 4 of the 8 micro-batches"


def test_uneven_shares_are_said() -> None:
    choice = choose(JobSpec(microbatches=8, planned=Shape(dp=4)), cluster(3, 1))
    assert choice.shape == Shape(dp=3)
    assert choice.why[1] == "each replica computes 2 or 3 of the 8 micro-batches"


def test_the_pipeline_is_cut_anew_where_no_replica_fits() -> None:
    job = JobSpec(microbatches=8, planned=Shape(pp=4), pp=(2, 1))
    choice = choose(job, cluster(3, 1))
    assert choice.shape == Shape(pp=2)
    assert len(choice.parked) == 1
    assert any("pp=4" in line and "slots" in line for line in choice.why)


def test_a_pipeline_is_not_cut_anew_for_little() -> None:
    planned = Shape(pp=2, dp=8)
    slots = cluster(15, 1)  # 7 replicas of 2, or 3 of 4, or 15 of 1
    kept = choose(JobSpec(microbatches=64, planned=planned, pp=(1,), worth=10.0), slots)
    assert kept.shape == Shape(2, 7, 1)
    eager = choose(JobSpec(microbatches=64, planned=Shape(2, 15, 1), pp=(1,), worth=1.0), slots)
    assert eager.shape == Shape(1, 15, 1)


def test_tensor_parallel_changes_only_if_the_job_says_so() -> None:
    planned = Shape(tp=4)
    slots = cluster(2, 3)  # no node has 4
    with pytest.raises(RefusedError, match="no layout") as caught:
        choose(JobSpec(microbatches=4, planned=planned), slots)
    assert "no layout of this job fits the remaining slots" in caught.value.message
    assert "groups of 4 on one node" in str(caught.value.found)
    assert choose(JobSpec(microbatches=4, planned=planned, tp=(2,)), slots).shape == Shape(tp=2)


def test_what_does_not_fit_the_memory_is_refused() -> None:
    memory = MemoryNeed(replicated=40, sharded=80, activations=10, limit=90)
    job = JobSpec(microbatches=8, planned=Shape(dp=4), memory=memory)
    assert choose(job, cluster(2, 1)).shape == Shape(dp=2)  # 40 + 80 / 2 + 10
    with pytest.raises(RefusedError, match="no layout") as caught:
        choose(job, cluster(1, 1))
    assert "130 bytes" in str(caught.value.found)


def test_the_job_grows_back_but_never_beyond_its_plan() -> None:
    job = JobSpec(microbatches=8, planned=Shape(dp=3))
    small = choose(job, cluster(2, 1))
    grown = choose(job, [*settled(small), NodeSlot("new", 0), NodeSlot("newer", 0)], small.shape)
    assert (grown.shape, grown.moves, len(grown.parked)) == (Shape(dp=3), 1, 1)
    assert "more replicas, 2 to 3" in grown.why[0]
    assert [p.at.dp for p in grown.places if p.stays] == [0, 1]


def racks(choice: Choice) -> list[set[str]]:
    """Return the racks of each stage."""
    return [
        {p.slot.domains[-1] for p in choice.places if p.at.pp == stage}
        for stage in range(choice.shape.pp)
    ]


def test_a_stage_lies_within_a_rack_where_one_has_room() -> None:
    job = JobSpec(microbatches=8, planned=Shape(pp=3, dp=4))
    first = choose(job, cluster(15, 1, 3))
    assert all(len(found) == 1 for found in racks(first))
    assert "the replicas of 3 of 3 pipeline stages are within one domain" in first.why
    assert together(choose(job, cluster(15, 1)).candidates[0]) == ""
    # A spare of the same rack takes the place; without one there, one of the same block.
    lost = next(p.slot for p in first.places if p.at == (1, 2, 0))
    after = choose(job, without(settled(first), lost.node))
    assert racks(after) == racks(first)
    assert after.moves == 1
    near = {s.node for s in after.parked if s.domains == lost.domains}
    again = choose(job, without(settled(after), *near, after.places[4].slot.node))
    blocks = {p.slot.domains[0] for p in again.places if p.at.pp == 1}
    assert len(blocks) == (1 if lost.domains[0] == "b0" else 2)


def test_a_stage_that_no_rack_holds_lies_within_a_block() -> None:
    job = JobSpec(microbatches=8, planned=Shape(pp=2, dp=5))
    choice = choose(job, cluster(12, 1, 4))  # racks of three
    for stage in range(2):
        assert len({p.slot.domains[0] for p in choice.places if p.at.pp == stage}) == 1


@st.composite
def situations(draw: st.DrawFn) -> tuple[JobSpec, list[NodeSlot], Shape]:
    planned = Shape(*(draw(st.integers(1, 4)) for _ in range(3)))
    job = JobSpec(
        microbatches=draw(st.integers(planned.dp, 12)),
        planned=planned,
        pp=tuple(draw(st.lists(st.integers(1, 4), max_size=2))),
        tp=tuple(draw(st.lists(st.integers(1, 4), max_size=1))),
    )
    nodes = -(-planned.world // planned.tp) + draw(st.integers(0, 2))
    first = choose(job, cluster(nodes, planned.tp, draw(st.integers(0, 4))))
    gone = draw(st.sets(st.sampled_from(range(len(first.places) + len(first.parked)))))
    left = [s for k, s in enumerate(settled(first)) if k not in gone]
    return job, left, first.shape


def paced(slots: Sequence[NodeSlot], paces: Mapping[str, int]) -> list[NodeSlot]:
    return [msgspec.structs.replace(s, pace=paces.get(s.node, 0)) for s in slots]


def test_slow_nodes_are_spares_and_then_share_the_last_stages() -> None:
    job = JobSpec(microbatches=64, planned=Shape(pp=2, dp=3))
    slots = cluster(7, 1)
    slow = {"n00000": 2, "n00002": 2, "n00004": 2, "n00005": 2}
    choice = choose(job, paced(slots, slow))
    stages = [{p.slot.pace for p in choice.places if p.at.pp == stage} for stage in range(2)]
    assert (stages, len(choice.parked)) == ([{0}, {2}], 1)
    (one,) = choice.candidates
    assert one.network > 0
    assert one.cost == job.step_cost(choice.shape) + one.network
    names = "n00000, n00002, n00004, n00005"
    (said,) = (text for text in choice.why if text.startswith("links of"))
    assert said.startswith(f"links of {names} are up to 4 times slower than others")
    blind = choose(job, slots).places
    actual = [msgspec.structs.replace(p, slot=paced([p.slot], slow)[0]) for p in blind]
    assert one.network < job.network_cost(choice.shape, actual)
    # One of the first stage is lost: the slow spare takes its place, as moving all is worth less.
    left = without(settled(choice), choice.places[0].slot.node)
    after = choose(msgspec.structs.replace(job, worth=2.0), left)
    assert after.moves == 1
    # With two spares of the other pace the near one is taken.
    more = [*settled(choice), NodeSlot("x", 0), NodeSlot("y", 0, pace=2)]
    after = choose(job, without(more, choice.places[0].slot.node))
    assert (after.moves, {p.slot.pace for p in after.places if p.at.pp == 0}) == (1, {0})


def test_a_stage_begins_among_the_fastest_nodes_that_have_room_together() -> None:
    job = JobSpec(microbatches=64, planned=Shape(pp=1, dp=2))
    paces = {"a": 2, "b": 2, "c": 1, "d": 0}
    slots = [NodeSlot(name, 0, None, (), pace) for name, pace in paces.items()]
    assert {p.slot.node for p in choose(job, slots).places} == {"c", "d"}


def test_a_stage_leaves_no_domain_for_links_that_are_as_slow() -> None:
    job = JobSpec(microbatches=64, planned=Shape(pp=1, dp=2))
    near = [NodeSlot("a", 0, None, ("r1",)), NodeSlot("b", 0, None, ("r1",), 1)]
    far = NodeSlot("c", 0, None, ("r2",))
    assert {p.slot.node for p in choose(job, [*near, far]).places} == {"a", "b"}
    slower = msgspec.structs.replace(near[1], pace=2)
    assert {p.slot.node for p in choose(job, [near[0], slower, far]).places} == {"a", "c"}


def test_survivors_get_other_places_where_that_makes_steps_much_shorter() -> None:
    job = JobSpec(microbatches=8, planned=Shape(pp=2, dp=4))
    first = choose(job, cluster(8, 1))
    slow = {p.slot.node: 3 for p in first.places if p.at.dp % 2}
    after = choose(msgspec.structs.replace(job, worth=1.0), paced(settled(first), slow))
    assert [{p.slot.pace for p in after.places if p.at.pp == stage} for stage in range(2)] == [
        {0},
        {3},
    ]
    stay = choose(msgspec.structs.replace(job, worth=1.5), paced(settled(first), slow))
    assert (stay.moves, after.moves > 0) == (0, True)


@given(situations(), st.data())
def test_measured_speeds_never_make_a_step_longer_by_the_model(
    situation: tuple[JobSpec, list[NodeSlot], Shape], data: st.DataObject
) -> None:
    job, left, current = situation
    job = msgspec.structs.replace(job, worth=1.0)
    nodes = sorted({s.node for s in left})
    racks = {s.node: s.domains for s in left}
    slow_rack = data.draw(st.sampled_from(sorted(set(racks.values())))) if racks else ()
    any_pace = st.integers(0, 6)
    paces = data.draw(
        st.sampled_from(
            [
                {node: 2 * (racks[node] == slow_rack) for node in nodes},
                {node: data.draw(any_pace) for node in nodes},
                dict.fromkeys(nodes, 3),
            ]
        )
    )
    try:
        blind = choose(job, left, current)
    except RefusedError as error:
        with pytest.raises(RefusedError, match=re.escape(error.message)):
            choose(job, paced(left, paces), current)
        return
    choice = choose(job, paced(left, paces), current)
    if len(set(paces.values())) == 1:  # links that are all alike are as if nobody had measured
        assert paced([p.slot for p in blind.places], paces) == [p.slot for p in choice.places]
        assert (blind.why, blind.candidates) == (choice.why, choice.candidates)
        return
    actual = [
        msgspec.structs.replace(p, slot=msgspec.structs.replace(p.slot, pace=paces[p.slot.node]))
        for p in blind.places
    ]
    theirs = job.step_cost(blind.shape) + job.network_cost(blind.shape, actual)
    assert choice.candidates[0].cost <= theirs
    used = sorted([*(p.slot for p in choice.places), *choice.parked])
    assert used == sorted(paced(left, paces))
    assert choice == choose(job, paced(left, paces)[::-1], current)


@given(situations())
def test_every_place_is_taken_once_by_groups_on_one_node(
    situation: tuple[JobSpec, list[NodeSlot], Shape],
) -> None:
    job, left, current = situation
    try:
        choice = choose(job, left, current)
    except RefusedError:
        smallest = min((job.planned.tp, *job.tp))
        most = sum(sum(s.node == node for s in left) // smallest for node in {s.node for s in left})
        assert most < min((job.planned.pp, *job.pp)) or smallest > 1
        return
    shape = choice.shape
    every = [
        Coordinate(p, d, t)
        for p in range(shape.pp)
        for d in range(shape.dp)
        for t in range(shape.tp)
    ]
    assert [p.at for p in choice.places] == every
    used = [p.slot for p in choice.places]
    assert sorted([*used, *choice.parked]) == sorted(left)
    for k in range(0, len(used), shape.tp):
        assert len({s.node for s in used[k : k + shape.tp]}) == 1
    assert choice.moves == sum(not p.stays for p in choice.places)
    assert shape.dp <= job.planned.dp
    assert choose(job, left[::-1], current) == choice  # the order of what is left says nothing


def test_ten_thousand_ranks_are_placed_soon() -> None:
    job = JobSpec(microbatches=512, planned=Shape(8, 160, 8), pp=(4,))
    first = choose(job, cluster(1282, 8, 80))
    assert first.shape.world == 10_240
    after = choose(job, without(settled(first), "n00003", "n00700", "n01000"))
    assert after.shape == Shape(8, 159, 8)


@pytest.mark.parametrize("held", [Coordinate(0, 2, 0), Coordinate(-1, 0, 0)])
def test_places_that_cannot_be_are_refused(held: Coordinate) -> None:
    with pytest.raises(UsageError, match="invalid positions"):
        choose(JobSpec(microbatches=2, planned=Shape(dp=2)), [NodeSlot("a", 0, held)])


def test_a_job_with_more_replicas_than_micro_batches_is_none() -> None:
    with pytest.raises(UsageError, match="invalid job spec"):
        JobSpec(microbatches=1, planned=Shape(dp=2))
