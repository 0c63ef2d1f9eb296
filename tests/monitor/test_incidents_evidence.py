from __future__ import annotations

import numpy as np

from ckptd.monitor.incidents import WantedEvidence, calls_text, suspected_ranks
from ckptd.monitor.report import EvidenceReport, GroupInfo, Stack
from ckptd.monitor.verdict import VerdictKind
from ckptd_simulated.job import Fault, Mesh, Planted, play
from tests.monitor.test_incidents import verdict

MESH = Mesh(2, 2, 4)
JOB = play(MESH, [Fault(Planted.HANG, 5, 1)], np.random.default_rng(0))


def test_suspects_and_some_that_wait_are_asked_for_once_a_minute() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.HANG, 5)], JOB, 0.0)
    ranks = evidence.orders(range(16))
    assert 5 in ranks
    assert len(ranks) == 3
    evidence.want([verdict(VerdictKind.HANG, 5)], JOB, 30.0)
    assert evidence.orders(range(16)) == ()
    evidence.want([verdict(VerdictKind.HANG, 5)], JOB, 61.0)
    assert evidence.orders(range(16)) == ranks


def test_each_agent_is_told_of_its_own_ranks() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.HANG, 5, 12)], JOB, 0.0)
    assert evidence.orders(range(8, 16)) == (12,) or 12 in evidence.orders(range(8, 16))
    assert 5 in evidence.orders(range(8))


def test_what_does_not_stand_still_needs_no_stacks() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.SLOW_RANK, 5)], JOB, 0.0)
    assert evidence.orders(range(16)) == ()


def test_a_crash_wants_what_it_and_two_others_have_printed() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.CRASH, 5)], JOB, 0.0)
    assert evidence.orders(range(16)) == (0, 1, 5)


def test_of_many_suspects_some_are_asked() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.HANG, *range(16))], JOB, 0.0)
    assert len(evidence.orders(range(16))) <= 10


def test_what_was_found_is_kept_for_a_while() -> None:
    evidence = WantedEvidence()
    stacks = {5: Stack(text="a", how="py-spy")}
    evidence.take(EvidenceReport(job="j", source="s", number=0, stacks=stacks, logs={6: "x"}), 0.0)
    evidence.forget(60.0, 0)
    assert (evidence.stacks, evidence.logs) == (stacks, {6: "x"})
    evidence.forget(500.0, 0)
    assert (evidence.stacks, evidence.logs) == ({}, {})


def test_of_the_next_generation_a_rank_is_another_process() -> None:
    evidence = WantedEvidence()
    evidence.want([verdict(VerdictKind.HANG, 5)], JOB, 0.0)
    assert 5 in evidence.orders(range(16))
    stacks = {5: Stack(text="of the first process", how="py-spy")}
    evidence.take(EvidenceReport(job="j", source="s", number=0, stacks=stacks), 1.0)
    evidence.forget(2.0, 1)
    assert evidence.stacks == {}
    evidence.want([verdict(VerdictKind.HANG, 5)], JOB, 3.0)
    assert 5 in evidence.orders(range(16))
    evidence.take(EvidenceReport(job="j", source="s", number=1, stacks=stacks), 4.0)
    evidence.forget(5.0, 1)
    assert evidence.stacks == stacks


def test_a_verdict_without_ranks_suspects_those_inside_its_groups() -> None:
    group = int(JOB.ranks["pending_group"][JOB.ranks["pending_group"] != 0][0])
    inside = JOB.ranks["rank"][JOB.ranks["pending_group"] == group].tolist()
    assert suspected_ranks(verdict(VerdictKind.COMM_HANG, groups=(group,)), JOB) == inside
    assert suspected_ranks(verdict(VerdictKind.HANG, 3), JOB) == [3]


def test_calls_are_told_as_text() -> None:
    group, op = int(JOB.calls["group"][0]), int(JOB.calls["op"][0])
    rank = int(JOB.ranks["rank"][JOB.calls["row"][0]])
    names = {group: GroupInfo.of((0, 1), "x", "tp")}
    text = calls_text(JOB, [rank, 999], {op: "all_reduce"}, names)
    assert list(text) == [rank]
    assert "tp #" in text[rank]
    assert "all_reduce" in text[rank]
    names = {group: GroupInfo.of((0, 1), "1", "undefined")}
    assert "group 1 of ranks 0, 1 #" in calls_text(JOB, [rank], {}, names)[rank]
    assert calls_text(JOB, [rank], {}, {})[rank].count("\n") == text[rank].count("\n")
