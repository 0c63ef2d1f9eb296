"""What no verdict may do, in small jobs of any shape with any one fault."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.monitor.job import JobView, RankView, join
from ckptd.monitor.rules.diagnose import diagnose
from ckptd.monitor.verdict import SuspectKind, Verdict, VerdictKind
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor import jobs

MESHES = st.builds(
    Mesh,
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([1, 2, 4, 8]),
    micro=st.integers(1, 3),
).filter(lambda m: m.ranks > 1)
SEEDS = st.integers(0, 2**32)
SOME = settings(max_examples=40)


def _length(mesh: Mesh, rank: int) -> int:
    return int((mesh.program[mesh.place[1][rank]] >= 0).sum())


@st.composite
def faulty(draw: st.DrawFn, kinds: st.SearchStrategy[Planted]) -> tuple[Mesh, Fault]:
    """A job, and one fault at any call of any rank."""
    mesh = draw(MESHES)
    rank = draw(st.integers(0, mesh.ranks - 1))
    return mesh, Fault(draw(kinds), rank, draw(st.integers(0, _length(mesh, rank) - 1)))


ANY = st.sampled_from(Planted)
STANDING = st.sampled_from([Planted.HANG, Planted.STOP])


@SOME
@given(faulty(st.sampled_from([Planted.HANG, Planted.STOP, Planted.CRASH, Planted.LINK])), SEEDS)
def test_the_culprit_is_always_among_those_named(planted: tuple[Mesh, Fault], seed: int) -> None:
    mesh, fault = planted
    verdicts = diagnose(play(mesh, [fault], np.random.default_rng(seed)))
    named = [name for verdict in verdicts for name in verdict.names()]
    assert str(fault.rank) in named
    if fault.kind is not Planted.LINK:
        assert named == [str(fault.rank)]


@SOME
@given(MESHES, SEEDS, st.data())
def test_of_several_hung_ranks_only_hung_ones_are_named_and_one_at_least(
    mesh: Mesh, seed: int, data: st.DataObject
) -> None:
    """Another may hang where it would not have come yet; one rank is left to wait for them."""
    most = min(4, mesh.ranks - 1)
    ranks = data.draw(st.sets(st.integers(0, mesh.ranks - 1), min_size=1, max_size=most))
    faults = [
        Fault(Planted.HANG, r, data.draw(st.integers(0, _length(mesh, r) - 1))) for r in ranks
    ]
    (verdict,) = diagnose(play(mesh, faults, np.random.default_rng(seed)))
    assert verdict.kind is VerdictKind.HANG
    assert set(verdict.names()) <= {str(r) for r in ranks}
    assert verdict.names()


@SOME
@given(faulty(STANDING), SEEDS, st.data())
def test_whoever_is_silent_no_other_rank_is_said_to_hang(
    planted: tuple[Mesh, Fault], seed: int, data: st.DataObject
) -> None:
    """Nobody who reports is blamed for what a silent one does; a culprit who reports is found."""
    mesh, fault = planted
    silent = data.draw(st.sets(st.integers(0, mesh.nodes - 1), max_size=mesh.nodes - 1))
    job = play(mesh, [fault], np.random.default_rng(seed), silent=sorted(silent))
    for verdict in diagnose(job):
        if verdict.kind is VerdictKind.CANNOT_SAY:
            heard = {int(r) for r in job.ranks["rank"]}
            assert not {int(n) for n in verdict.names()} & heard
        else:
            assert jobs.told([verdict]) == [("non-communication hang", [str(fault.rank)])]
            assert fault.rank // mesh.per_node not in silent


def _shifted(view: RankView, seconds: float) -> RankView:
    calls = view.calls.copy()
    calls["start"] += seconds
    calls["end"] += seconds
    return jobs.changed(
        view,
        at=view.at + seconds,
        heartbeat=view.heartbeat + seconds,
        moved=view.moved + seconds,
        pending_since=view.pending_since + seconds,
        calls=calls,
    )


def _same(one: Verdict) -> tuple[object, ...]:
    suspects = {(s.target, s.name, s.confidence) for s in one.suspects}
    return one.kind, suspects, one.groups


@SOME
@given(faulty(ANY), SEEDS, st.randoms(use_true_random=False))
def test_clocks_of_nodes_do_not_matter(
    planted: tuple[Mesh, Fault], seed: int, dice: random.Random
) -> None:
    """However many minutes they are apart."""
    mesh, fault = planted
    job = play(mesh, [fault], np.random.default_rng(seed))
    shown = views(job)
    apart = {view.node: dice.uniform(-3600, 3600) for view in shown}
    moved = join([_shifted(view, apart[view.node]) for view in shown])
    assert [_same(v) for v in diagnose(moved)] == [_same(v) for v in diagnose(job)]


def _renumbered(job: JobView, number: list[int]) -> JobView:
    """The same job, whose rank r is called number[r]; in the order of the new numbers."""
    members = {g: tuple(number[r] for r in ranks) for g, ranks in job.members.items()}
    shown = [jobs.changed(view, rank=number[view.rank], members=members) for view in views(job)]
    return join(sorted(shown, key=lambda view: view.rank))


@SOME
@given(faulty(ANY), SEEDS, st.randoms(use_true_random=False))
def test_numbers_of_ranks_do_not_matter(
    planted: tuple[Mesh, Fault], seed: int, dice: random.Random
) -> None:
    mesh, fault = planted
    job = play(mesh, [fault], np.random.default_rng(seed))
    number = list(range(mesh.ranks))
    dice.shuffle(number)
    wanted = sorted(
        (str(v.kind), sorted(str(number[int(n)]) for n in v.names()), v.names(SuspectKind.NODE))
        for v in diagnose(job)
    )
    got = sorted(
        (str(v.kind), sorted(v.names()), tuple(v.names(SuspectKind.NODE)))
        for v in diagnose(_renumbered(job, number))
    )
    assert [(k, r, sorted(n)) for k, r, n in got] == [(k, r, sorted(n)) for k, r, n in wanted]


@SOME
@given(faulty(STANDING), SEEDS, st.floats(0, 29.9))
def test_nothing_is_said_before_the_floor(
    planted: tuple[Mesh, Fault], seed: int, age: float
) -> None:
    mesh, fault = planted
    assert not diagnose(play(mesh, [fault], np.random.default_rng(seed), age=age))
