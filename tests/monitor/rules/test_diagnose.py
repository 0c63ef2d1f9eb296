"""Whole rounds over played jobs: who is named, and that nobody is where nothing is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.monitor.job import Phase, join
from ckptd.monitor.rules.diagnose import diagnose
from ckptd.monitor.verdict import SuspectKind
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor import jobs

MESHES = st.builds(
    Mesh,
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([2, 4, 8]),
    micro=st.integers(1, 3),
).filter(lambda m: m.ranks > 1)
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=40)


@FEW
@given(MESHES, SEEDS, st.integers(0, 80), st.floats(0, 25))
def test_no_verdict_on_a_healthy_job_whatever_its_jitter(
    mesh: Mesh, seed: int, rounds: int, age: float
) -> None:
    """Stopped anywhere in a step, and for any pause below the floor."""
    assert not diagnose(play(mesh, [], np.random.default_rng(seed), rounds=rounds, age=age))


@FEW
@given(MESHES, SEEDS)
def test_a_step_that_is_done_leaves_nobody_waiting(mesh: Mesh, seed: int) -> None:
    job = play(mesh, [], np.random.default_rng(seed), age=1e6)
    assert not job.ranks["pending_group"].any()
    assert not diagnose(job)


@FEW
@given(MESHES, SEEDS, st.data())
def test_the_rank_that_hangs_is_named_and_no_other(
    mesh: Mesh, seed: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, mesh.ranks - 1))
    length = int((mesh.program[mesh.place[1][rank]] >= 0).sum())
    fault = Fault(Planted.HANG, rank, data.draw(st.integers(0, length - 1)))
    got = jobs.told(diagnose(play(mesh, [fault], np.random.default_rng(seed))))
    assert got == [("non-communication hang", [str(rank)])]


KINDS = st.sampled_from([Planted.HANG, Planted.STOP, Planted.CRASH, Planted.SWAP, Planted.LINK])


@FEW
@given(SEEDS, KINDS, st.integers(0, 31), st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(
    seed: int, kind: Planted, rank: int, random: object
) -> None:
    job = play(Mesh(2, 4, 4), [Fault(kind, rank, 1)], np.random.default_rng(seed))
    shown = views(job)
    assert jobs.told(diagnose(join(shown))) == jobs.told(diagnose(job))
    random.shuffle(shown)  # type: ignore[attr-defined]
    assert jobs.told(diagnose(join(shown))) == jobs.told(diagnose(job))


@FEW
@given(SEEDS, KINDS, st.integers(0, 7), st.integers(1, 6))
def test_clean_ranks_beside_it_do_not_change_the_culprit(
    seed: int, kind: Planted, rank: int, more: int
) -> None:
    """Ranks of groups of their own, that are not stuck."""
    job = play(Mesh(2, 2, 2), [Fault(kind, rank, 1)], np.random.default_rng(seed))
    clean = [
        jobs.changed(jobs.outside(100 + k, 99, 5, 0.1, more), node=f"m{k}") for k in range(more)
    ]
    assert jobs.told(diagnose(join([*views(job), *clean]))) == jobs.told(diagnose(job))


MESH = Mesh(4, 2, 4)
REDUCE = int((MESH.program[0] >= 0).sum()) - 3
"""Place of the replicas' reduction in the first stage's program."""


@pytest.mark.parametrize(
    ("kind", "call", "wanted"),
    [
        (Planted.HANG, 2, [("non-communication hang", ["5"])]),
        (Planted.STOP, 2, [("non-communication hang", ["5"])]),
        (Planted.CRASH, 2, [("crash", ["5"])]),
        (Planted.SIZE, REDUCE, [("mismatch", ["5"])]),
        (Planted.SKIP, REDUCE - 2, [("mismatch", ["5"])]),
        (Planted.SWAP, 0, [("deadlock", ["5"])]),
        (Planted.LINK, REDUCE + 1, [("communication hang", ["4", "5", "6", "7"])]),
    ],
)
def test_each_fault_has_its_verdict(
    kind: Planted, call: int, wanted: list[tuple[str, list[str]]]
) -> None:
    assert jobs.told(diagnose(play(MESH, [Fault(kind, 5, call)], np.random.default_rng(3)))) == (
        wanted
    )


def test_two_faults_are_two_suspects() -> None:
    faults = [Fault(Planted.HANG, 1), Fault(Planted.CRASH, 30)]
    got = jobs.told(diagnose(play(MESH, faults, np.random.default_rng(3))))
    assert got == [("crash", ["30"]), ("non-communication hang", ["1"])]


def test_nodes_that_do_not_report_do_not_hide_a_culprit_that_does() -> None:
    job = play(MESH, [Fault(Planted.HANG, 5)], np.random.default_rng(3), silent=[2])
    assert jobs.told(diagnose(job)) == [("non-communication hang", ["5"])]


def test_a_culprit_that_does_not_report_leaves_its_node_as_what_is_known() -> None:
    job = play(MESH, [Fault(Planted.HANG, 5)], np.random.default_rng(3), silent=[0])
    (verdict,) = diagnose(job)
    assert verdict.kind == "cannot say"
    assert "5" in verdict.names()


def test_every_verdict_says_what_would_refute_it() -> None:
    for kind in Planted:
        for verdict in diagnose(play(MESH, [Fault(kind, 5, REDUCE)], np.random.default_rng(0))):
            assert verdict.evidence
            assert verdict.rules_out
            assert verdict.refuted_by
            assert verdict.action
            assert verdict.numbers
            assert all(0 < s.confidence <= 1 for s in verdict.suspects)
            assert all(s.name for s in verdict.suspects)


def test_rank_0_saving_for_minutes_is_no_hang() -> None:
    shown = views(play(MESH, [Fault(Planted.HANG, 0)], np.random.default_rng(1), age=300.0))
    shown[0] = jobs.changed(shown[0], phase=Phase.CKPT)
    assert not diagnose(join(shown))


def test_more_than_one_node_is_needed_to_name_one() -> None:
    one = Mesh(2, 1, 4, per_node=8)
    faults = [Fault(Planted.HANG, r) for r in range(4)]
    (verdict,) = diagnose(play(one, faults, np.random.default_rng(1)))
    assert verdict.names(SuspectKind.NODE) == ()
