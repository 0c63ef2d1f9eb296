"""Jobs that do not exist behave like jobs."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import join
from ckptd.monitor.rules.limits import HangLimits, Learned, learn
from ckptd_simulated.job import SLOTS, Fault, Mesh, Planted, delays, own_times, play, views

MESH = Mesh(2, 3, 2, per_node=4)


def test_members_of_a_group_are_as_many_as_it_says() -> None:
    for slot in range(SLOTS):
        ids = MESH.slots[:, slot]
        _, counts = np.unique(ids[ids >= 0], return_counts=True)
        # A channel's other member has it in another slot.
        assert (counts == (MESH.sizes[slot] if slot < 3 else 1)).all()
    _, counts = np.unique(MESH.slots[:, 3:][MESH.slots[:, 3:] >= 0], return_counts=True)
    assert (counts == 2).all()


def test_a_healthy_step_ends_and_all_members_have_counted_alike() -> None:
    job = play(MESH, [], np.random.default_rng(0))
    assert not job.ranks["pending_group"].any()
    for code in range(len(job.group_ids)):
        assert len(np.unique(job.groups["entered"][job.group_codes == code])) == 1
    assert (job.groups["entered"] == job.groups["completed"]).all()


def test_nobody_ends_a_call_before_all_have_entered_it() -> None:
    job = play(MESH, [], np.random.default_rng(0))
    order, starts = job.cohorts
    calls = job.calls[order]
    last = np.maximum.reduceat(calls["start"], starts)
    first = np.minimum.reduceat(calls["end"], starts)
    assert (first >= last).all()


def test_a_step_before_it_counts_on() -> None:
    a = play(MESH, [], np.random.default_rng(0), step=10)
    b = play(MESH, [], np.random.default_rng(0), step=11)
    assert (b.groups["entered"] > a.groups["entered"]).all()


def test_a_hung_rank_stops_the_job() -> None:
    job = play(MESH, [Fault(Planted.HANG, 5)], np.random.default_rng(0), age=60.0)
    waiting = job.ranks["pending_group"] != 0
    assert waiting.sum() == MESH.ranks - 1
    assert not waiting[5]
    assert (job.ranks["idle"] >= 60.0).all()


def test_views_are_the_same_job() -> None:
    job = play(MESH, [Fault(Planted.SKIP, 3, 4)], np.random.default_rng(0), silent=[1])
    again = join(views(job))
    assert (again.groups == job.groups).all()
    assert [again.nodes[n] for n in again.ranks["node"]] == [
        job.nodes[n] for n in job.ranks["node"]
    ]
    for name in set(job.ranks.dtype.names or ()) - {"node", "state"}:
        assert again.ranks[name] == pytest.approx(job.ranks[name], nan_ok=True)
    for name in job.calls.dtype.names or ():
        assert again.calls[name] == pytest.approx(job.calls[name], nan_ok=True)
    assert again.members == job.members


def test_nodes_that_do_not_report_are_missing_and_their_groups_known() -> None:
    job = play(MESH, [], np.random.default_rng(0), silent=[1])
    assert job.world == MESH.ranks
    assert set(job.ranks["rank"]) == set(range(MESH.ranks)) - {4, 5, 6, 7}
    assert any({4, 5} <= set(ranks) for ranks in job.members.values())


def test_what_is_usual_can_be_learned_of_a_played_step() -> None:
    job = play(MESH, [], np.random.default_rng(0))
    learned = learn(Learned(), job)
    assert len(learned.keys)
    assert (learned.longest < 1.0).all()
    assert (learned.limit(job, HangLimits(), in_call=True) == 30.0).all()


def test_own_times_have_the_planted_ratio() -> None:
    times = own_times(MESH, np.random.default_rng(0), 500, [(4, 2.0)], pauses=0.0)
    assert times.shape == (500, MESH.ranks)
    assert np.median(times[:, 4] / times[:, 5]) == pytest.approx(2.0, rel=0.02)


def test_delays_probe_no_node_by_itself_and_always_a_planted_link() -> None:
    source, to, seconds = delays(50, np.random.default_rng(0), [(3, 9, 50.0)])
    assert (source != to).all()
    assert np.bincount(source).tolist() == [8] * 50
    hit = (source == 3) & (to == 9)
    assert hit.any()
    assert seconds[hit].min() > 10 * np.median(seconds)
