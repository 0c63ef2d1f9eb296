"""Members that make different calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from ckptd.monitor.job import CallFlag, JobView
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.rules.mismatch import P2P, minority, mismatches
from tests.monitor import jobs

LIMITS = HangLimits()


def _job(*members: dict[str, Any] | None, age: float = 0.1, **all_: Any) -> JobView:
    """Members of one group in call 4, each with what is special about its call; None is late."""
    size = len(members)
    views = []
    for rank, special in enumerate(members):
        if special is None:
            views.append(jobs.outside(rank, 7, 3, age, size))
        else:
            call = jobs.call(7, 4, jobs.NOW - age, **(all_ | special))
            views.append(jobs.inside(rank, 7, 4, age, size, calls=call))
    return jobs.job(*views)


def test_equal_calls() -> None:
    assert not list(mismatches(_job({}, {}, {}), LIMITS))
    assert not list(mismatches(jobs.job(jobs.view(0)), LIMITS))


@pytest.mark.parametrize("special", [{"op": 9}, {"bytes": 4}, {"dtype": 3}, {"root": 2}])
def test_the_minority_is_named(special: dict[str, Any]) -> None:
    got = jobs.told(mismatches(_job({}, special, {}, {}), LIMITS))
    assert got == [("mismatch", ["1"])]


def test_first_version_two_ranks_that_disagree_name_nobody_before_a_strict_majority() -> None:
    """Two of four came and differ: whichever came first would have been called right."""
    early = _job({}, {"bytes": 4}, None, None)
    assert not list(mismatches(early, LIMITS))
    assert jobs.told(mismatches(_job({}, {"bytes": 4}, {"bytes": 4}, None), LIMITS)) == []
    three = _job({}, {"bytes": 4}, {"bytes": 4}, {"bytes": 4})
    assert jobs.told(mismatches(three, LIMITS)) == [("mismatch", ["0"])]
    (late,) = mismatches(_job({}, {"bytes": 4}, None, None, age=0.6), LIMITS)
    assert [s.confidence for s in late.suspects if s.target == "rank"] == [0.5, 0.5]


def test_a_tie_names_both() -> None:
    (verdict,) = mismatches(_job({}, {"op": 2}), LIMITS)
    assert set(verdict.names()) == {"0", "1"}
    assert max(s.confidence for s in verdict.suspects) == 0.5


def test_a_member_whose_call_is_not_told_any_more_has_no_vote() -> None:
    """The call passed, as with another reduction, and this rank's window has gone beyond it."""
    views = [
        jobs.inside(r, 7, 4, 0.1, 4, calls=jobs.call(7, 4, jobs.NOW - 0.1, **special))
        for r, special in enumerate([{}, {"op": 9}, {}])
    ]
    beyond = jobs.outside(3, 7, 40, 0.1, 4)
    (verdict,) = mismatches(jobs.job(*views, beyond), LIMITS)
    assert verdict.names() == ("1",)
    assert 0.5 < verdict.suspects[-1].confidence < 0.95


def test_sizes_may_differ_where_they_are_variable() -> None:
    job = _job({}, {"bytes": 4}, {}, flags=CallFlag.VARIABLE)
    assert not list(mismatches(job, LIMITS))
    job = _job({}, {"op": 4}, {}, flags=CallFlag.VARIABLE)
    assert jobs.told(mismatches(job, LIMITS)) == [("mismatch", ["1"])]


def test_the_same_call_of_another_step_is_a_desync() -> None:
    job = _job({}, {}, {"step": 12}, step=11)
    assert jobs.told(mismatches(job, LIMITS)) == [("desync", ["2"])]


def _from_lines(
    *lines: list[int], age: float, trainers: Collection[int] = (), **other: Any
) -> JobView:
    """Members whose calls 1, 2, ... come from these lines; the last one goes on for `age`.

    Those that are `trainers` have made a step more at each call from line 1.
    """
    views = []
    most = max(len(each) for each in lines)
    for rank, each in enumerate(lines):
        rows = [
            jobs.call(7, seq, jobs.NOW - age - 1, jobs.NOW - age - 0.9, site=line, **other)
            for seq, line in enumerate(each, 1)
        ]
        if rank in trainers:
            for row, step in zip(rows, np.cumsum(np.array(each) == 1), strict=True):
                row["step"] = step
        if len(each) == most:
            rows[-1]["end"] = np.nan
            views.append(
                jobs.inside(rank, 7, most, age, len(lines), calls=jobs.calls(*rows), moved=0.0)
            )
        else:
            views.append(jobs.outside(rank, 7, len(each), age, len(lines), calls=jobs.calls(*rows)))
    return jobs.job(*views)


USUAL = [1, 2, 3] * 4
LEFT_OUT = [*USUAL[:4], *USUAL[5:]]


def test_a_call_that_was_left_out_shows_where_the_group_stands_still() -> None:
    shifted = _from_lines(USUAL, USUAL, LEFT_OUT, USUAL, age=60.0)
    assert jobs.told(mismatches(shifted, LIMITS)) == [("desync", ["2"])]
    twice = _from_lines(LEFT_OUT, LEFT_OUT, USUAL, LEFT_OUT, age=60.0)
    assert jobs.told(mismatches(twice, LIMITS)) == [("desync", ["2"])]


def test_nothing_is_said_of_lines_while_the_group_goes_on() -> None:
    """A member that is late is no news, and one that is early neither."""
    assert not list(mismatches(_from_lines(USUAL, USUAL, LEFT_OUT, USUAL, age=1.0), LIMITS))


def test_first_version_two_lines_of_one_call_made_a_desync_of_a_right_program() -> None:
    """`if rank == 0: barrier(); work(); if rank: barrier()`, and the job stands still elsewhere."""
    ordinary, main = [1, 1, 5, 1, 1, 5, 1, 1], [1, 1, 6, 1, 1, 6, 1]
    assert not list(mismatches(_from_lines(ordinary, main, ordinary, age=60.0), LIMITS))
    assert not list(mismatches(_job({}, {}, {"site": 9}, site=8, age=60.0), LIMITS))


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rounds", [1, 3])
def test_first_version_ranks_that_take_turns_were_a_desync(
    steps: int, world: int, rounds: int
) -> None:
    """Each saves in its turn, between barriers of two lines, and the last takes its time."""
    lines = [
        [1] * steps + [5 if turn == rank else 6 for _ in range(rounds) for turn in range(world)]
        for rank in range(world)
    ]
    lines[-1].pop()
    assert not list(mismatches(_from_lines(*lines, age=60.0), LIMITS))


def test_first_version_a_trainer_beside_a_generator_was_a_desync() -> None:
    """Steps of an optimizer are counted where there is one; some make several in a round."""
    counted = CallFlag.COUNTED
    assert not list(
        mismatches(_job({"step": 4}, {"step": -1}, {"step": -1}, flags=counted), LIMITS)
    )
    assert not list(mismatches(_job({"step": 4}, {"step": 1}, flags=counted, age=60.0), LIMITS))
    # Whoever says in which step it is, says so to all who do.
    mixed = _job({"step": 4}, {"step": 9, "flags": counted}, {"step": 4}, {"step": 5})
    assert jobs.told(mismatches(mixed, LIMITS)) == [("desync", ["3"])]


def test_first_version_rounds_of_generators_beside_trainers_were_a_desync() -> None:
    """Of two against two, a generator was compared with the other one: rounds repeat themselves."""
    every = [1, 2, 3, 2, 4] * 4
    lines = [every, every, every[:-2], every]
    counted = CallFlag.COUNTED
    for trainers in ((0, 1), (2, 3), (0, 2)):
        job = _from_lines(*lines, age=60.0, trainers=trainers, flags=counted, step=-1)
        assert not list(mismatches(job, LIMITS))


def test_a_call_that_one_of_two_left_out() -> None:
    shifted = _from_lines(USUAL, LEFT_OUT, age=60.0)
    assert jobs.told(mismatches(shifted, LIMITS)) == [("desync", ["0", "1"])]


@pytest.mark.parametrize("op", P2P.tolist())
def test_first_version_two_ends_of_a_message_were_compared(op: int) -> None:
    """`send` in one branch and `recv` in the other, of stages in different steps."""
    job = _job({"site": 1, "step": 4}, {"site": 2, "step": 3, "bytes": 9}, op=op, age=60.0)
    assert not list(mismatches(job, LIMITS))


def test_the_first_call_that_differs_is_told_and_once() -> None:
    views = []
    for rank in range(3):
        rows = [jobs.call(7, s, jobs.NOW - 1, jobs.NOW - 0.9, bytes=s) for s in range(1, 6)]
        for row in rows[2:]:
            row["bytes"] += rank == 1
        views.append(jobs.view(rank, 3, calls=jobs.calls(*rows)))
    (verdict,) = mismatches(jobs.job(*views), LIMITS)
    assert verdict.numbers["sequence number"] == 3


def test_minority() -> None:
    assert minority(np.array([1, 1, 1]), 3) is None
    assert minority(np.array([1, 1, 2]), 4) is None
    odd = minority(np.array([1, 2, 1]), 3)
    assert odd is not None
    assert odd.tolist() == [False, True, False]
