"""Circles of waits that one rank explains: it left calls out, or took another order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.monitor.job import CallFlag, JobView
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import HangLimits, Learned
from ckptd.monitor.rules.mismatch import P2P
from ckptd.monitor.verdict import Verdict, VerdictKind
from tests.monitor import jobs

Call = tuple[int, int]
"""Group, and line."""


def stand_still(
    streams: list[list[Call]],
    members: dict[int, set[int]],
    messages: tuple[int, ...] = (),
    kept: int = 1 << 20,
    begun: tuple[int, ...] = (),
) -> JobView:
    """Let each rank make its calls, one after the other, until none gets on.

    Calls of groups in `messages` are from one rank to another. So many of each rank are `kept`.
    Calls of groups in `begun` do not hold their caller up.
    """
    world = len(streams)
    entered = [dict.fromkeys([g for g in members if r in members[g]], 0) for r in range(world)]
    at, inside = [0] * world, [False] * world
    moves = True
    while moves:
        moves = False
        for rank, stream in enumerate(streams):
            if at[rank] == len(stream):
                continue
            group = stream[at[rank]][0]
            if not inside[rank]:
                entered[rank][group] += 1
                inside[rank] = moves = True
            if all(entered[other][group] >= entered[rank][group] for other in members[group]):
                at[rank], inside[rank], moves = at[rank] + 1, False, True
    views = []
    for rank, stream in enumerate(streams):
        made, seqs = [], dict.fromkeys(members, 0)
        for number, (group, line) in enumerate(stream[: at[rank] + inside[rank]]):
            seqs[group] += 1
            start = jobs.NOW - 60 - 0.1 * (len(stream) - number)
            end = np.nan if inside[rank] and number == at[rank] else start + 0.01
            op = {"op": int(P2P[0])} if group in messages else {}
            op |= {"flags": int(CallFlag.ASYNC)} if group in begun else {}
            made.append(jobs.call(group, seqs[group], start, end, site=line, **op))
        pending = stream[at[rank]][0] if inside[rank] else 0
        rows = {g: (len(members[g]), n, n - (g == pending)) for g, n in entered[rank].items()}
        waits = {
            "pending_group": pending,
            "pending_seq": seqs.get(pending, 0),
            "pending_since": jobs.NOW - 50 if pending else np.nan,
        }
        views.append(
            jobs.view(
                rank,
                world,
                calls=jobs.calls(*made[-kept:]),
                groups=jobs.groups(rows),
                moved=jobs.NOW - 50,
                **waits,
            )
        )
    return jobs.job(*views)


def circle(job: JobView) -> Verdict | None:
    gone = np.zeros(len(job.ranks), bool)
    told = [v for v in hangs(job, HangLimits(), Learned(), gone) if v.kind is VerdictKind.DEADLOCK]
    return told[0] if told else None


def program(rank: int, members: dict[int, set[int]], step: list[int]) -> list[Call]:
    """One step's calls; each line of the program is in one group, of those that the rank is in."""
    return [(g, 10 + line) for line, g in enumerate(step) if rank in members[g]]


BOTH = {7: {0, 1, 2, 3}, 8: {0, 1, 2, 3}}
HALF = {7: {0, 1, 2, 3}, 8: {2, 3}}


@pytest.mark.parametrize("members", [BOTH, HALF])
@pytest.mark.parametrize("fault", ["skip", "order"])
def test_the_one_that_left_calls_out_is_named_with_its_line(
    members: dict[int, set[int]], fault: str
) -> None:
    streams = [program(r, members, [8, 7, 7]) * 9 for r in range(4)]
    four = program(2, members, [8, 7, 7])
    odd = four[:1] if fault == "skip" else [four[1], four[0], four[2]]
    streams[2][12:15] = odd
    verdict = circle(stand_still(streams, members))
    assert verdict is not None
    assert verdict.names() == ("2",)
    assert "rank 2 went from the call at" in verdict.evidence[0]
    assert verdict.suspects[0].confidence > 0.8


PIPELINE = {1: {0, 1}, 2: {1, 2}, 3: {2, 3}, 9: {0, 1, 2, 3}}


def test_a_stage_that_leaves_its_pipeline_for_a_call_of_all_is_named() -> None:
    """The others wait for its messages, one for another, where they often have."""
    streams = [program(r, PIPELINE, [1, 2, 3, 3, 2, 1]) * 9 for r in range(4)]
    streams[2] = [*streams[2][:16], (9, 99), *streams[2][16:]]
    verdict = circle(stand_still(streams, PIPELINE, messages=(1, 2, 3)))
    assert verdict is not None
    assert verdict.names() == ("2",)


MESH = {1: {0, 1}, 2: {2, 3}, 3: {0, 2}, 4: {1, 3}, 9: {0, 1, 2, 3}}


def mesh(rank: int, rounds: int) -> list[Call]:
    """Rounds of two calls within a pair, and one across."""
    pair, across = 1 + rank // 2, 3 + rank % 2
    return [(pair, 10), (pair, 11), (across, 12), (pair, 13), (across, 14)] * rounds


def test_of_ranks_that_do_the_same_one_is_named_though_a_round_is_all_that_is_known() -> None:
    streams = [mesh(r, 1) for r in range(4)]
    streams[0] = [*streams[0][:3], (9, 99), *streams[0][3:]]
    verdict = circle(stand_still(streams, MESH))
    assert verdict is not None
    assert verdict.names() == ("0",)


def test_who_is_alone_in_the_first_call_of_a_group_is_named_by_the_last_calls_alone() -> None:
    """Of rounds that are longer than what is known of a rank, no way shows again."""
    lines = [(1, line) for line in range(10, 34)] + [(3, 40), (3, 41)]
    streams = [[(g + (r // 2 if g == 1 else r % 2), n) for g, n in lines * 12] for r in range(4)]
    streams[0] = [*streams[0][:289], (9, 99), *streams[0][289:]]
    verdict = circle(stand_still(streams, MESH, kept=16))
    assert verdict is not None
    assert verdict.names() == ("0",)


def test_who_strayed_is_named_less_surely_where_others_may_hang_elsewhere() -> None:
    streams = [mesh(r, 9) for r in range(4)]
    streams[0] = [*streams[0][:18], (9, 99), *streams[0][18:]]
    sure = circle(stand_still(streams, MESH))
    unsure = circle(stand_still(streams, MESH, begun=(1, 2, 3, 4)))
    assert sure is not None
    assert unsure is not None
    assert sure.names() == unsure.names() == ("0",)
    assert unsure.suspects[0].confidence < sure.suspects[0].confidence
    assert any("may hang elsewhere" in line for line in unsure.evidence)


def test_one_that_strayed_and_may_hang_elsewhere_is_not_named_alone() -> None:
    streams = [mesh(r, 9) for r in range(4)]
    streams[0] = [*streams[0][:18], (9, 99), *streams[0][18:]]
    verdict = circle(stand_still(streams, MESH, begun=(9,)))
    assert verdict is not None
    assert set(verdict.names()) == {"0", "1", "2", "3"}


def test_a_rank_with_a_program_of_its_own_is_not_named_for_that() -> None:
    """Which of them strayed does not show: the last one alone has ever made such calls."""
    streams = [mesh(r, 1) for r in range(3)]
    streams.append([(4, 50), (2, 51), (4, 52)])
    verdict = circle(stand_still(streams, MESH))
    assert verdict is None or verdict.names() != ("3",)


def test_of_stages_that_send_to_each_other_none_is_named_alone() -> None:
    streams = [program(r, PIPELINE, [1, 2, 3, 3, 2, 1]) * 9 for r in range(4)]
    streams[2] = [*streams[2][:16], (2, 98), *streams[2][16:]]
    verdict = circle(stand_still(streams, PIPELINE, messages=(1, 2, 3)))
    assert verdict is None or len(verdict.names()) != 1


def test_without_lines_a_majority_in_all_groups_together_tells() -> None:
    streams = [[(g, 0) for g, _ in program(r, BOTH, [8, 7, 7]) * 9] for r in range(4)]
    del streams[1][13:15]
    verdict = circle(stand_still(streams, BOTH))
    assert verdict is not None
    assert verdict.names() == ("1",)


def test_of_two_that_always_take_another_order_both_are_named() -> None:
    """It is new to both: nothing tells which of them is wrong."""
    both = {7: {0, 1}, 8: {0, 1}}
    verdict = circle(stand_still([[(7, 1), (8, 2)], [(8, 2), (7, 1)]], both))
    assert verdict is not None
    assert set(verdict.names()) == {"0", "1"}


@settings(max_examples=150)
@given(st.integers(3, 6), st.data())
def test_whoever_strays_nobody_else_is_named_alone(world: int, data: st.DataObject) -> None:
    """Of any loop with any groups, and one rank that once leaves out some of its calls."""
    everybody = set(range(world))
    groups = {
        7: everybody,
        8: data.draw(st.sets(st.integers(0, world - 1), min_size=2)),
        9: data.draw(st.sets(st.integers(0, world - 1), min_size=2)),
    }
    step = [*data.draw(st.lists(st.sampled_from([7, 8, 9]), min_size=1, max_size=5)), 7]
    streams = [program(r, groups, step) * 8 for r in range(world)]
    culprit = data.draw(st.integers(0, world - 1))
    length = len(streams[culprit]) // 8
    first = data.draw(st.integers(4 * length, 6 * length))
    kept = streams[culprit]
    streams[culprit] = kept[:first] + kept[first + data.draw(st.integers(1, max(length - 1, 1))) :]
    verdict = circle(stand_still(streams, groups))
    if verdict is not None and len(verdict.names()) == 1:
        assert verdict.names() == (str(culprit),)
