"""What stands still, one verdict after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptd.monitor.job import AgentView, CallFlag, JobView, Phase, RankView
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import HangLimits, Learned, learn
from ckptd.monitor.rules.mismatch import P2P
from ckptd.monitor.verdict import SuspectKind, Verdict
from tests.monitor import jobs


def _told(job: JobView, learned: Learned | None = None) -> list[Verdict]:
    gone = np.zeros(len(job.ranks), bool)
    return list(hangs(job, HangLimits(), learned or Learned(), gone))


def _late(rank: int = 3, idle: float = 40.0, **other: object) -> list[RankView]:
    """Three ranks wait for a fourth."""
    late = jobs.outside(rank, 7, 9, idle, 4, **other)
    return [late if r == rank else jobs.inside(r, 7, 10, 41.0, 4) for r in range(4)]


def test_no_rank_and_no_group() -> None:
    assert not _told(jobs.job())
    assert not _told(jobs.job(jobs.view(0)))


@pytest.mark.parametrize(
    ("other", "detail"),
    [
        ({}, "Python runs"),
        ({"process_state": "T"}, "stopped"),
        ({"process_state": "D"}, "kernel"),
        ({"process_state": "Z"}, "zombie"),
        ({"heartbeat": 900.0, "answers": True}, "GIL"),
        ({"heartbeat": 900.0, "answers": False}, "neither"),
    ],
)
def test_a_rank_outside_communication(other: dict[str, object], detail: str) -> None:
    (verdict,) = _told(jobs.job(*_late(**other)))
    assert jobs.told([verdict]) == [("non-communication hang", ["3"])]
    assert detail in verdict.suspects[-1].detail
    assert verdict.numbers["waiting"] == 3


def test_it_takes_the_limit() -> None:
    assert not _told(jobs.job(*_late(idle=29.0)))


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.COMPILE, Phase.EVAL, Phase.CKPT])
def test_a_phase_of_long_pauses_is_no_hang(phase: Phase) -> None:
    assert not _told(jobs.job(*_late(phase=phase)))


def test_a_rank_that_nobody_waits_for_is_left_alone() -> None:
    assert not _told(jobs.job(*(jobs.outside(r, 7, 9, 500.0, 4) for r in range(4))))


def test_a_node_whose_ranks_hang_is_named() -> None:
    views = [
        jobs.outside(r, 7, 9, 40.0, 8) if r < 4 else jobs.inside(r, 7, 10, 40.0, 8)
        for r in range(8)
    ]
    (verdict,) = _told(jobs.job(*views))
    assert verdict.names(SuspectKind.NODE) == ("n0",)
    assert len(verdict.names()) == 4


def _chain(last: RankView) -> JobView:
    """Rank 0 waits for 1 in group 1, 1 for 2 in group 2; what rank 2 does is given."""
    first = jobs.inside(0, 1, 5, 40.0, 2, world=3)
    between = jobs.inside(
        1, 2, 5, 40.0, 2, world=3, groups=jobs.groups({1: (2, 4, 4), 2: (2, 5, 4)})
    )
    return jobs.job(first, between, last)


def test_who_waits_is_not_blamed_though_others_wait_for_it() -> None:
    last = jobs.outside(2, 2, 4, 40.0, 2, world=3)
    assert jobs.told(_told(_chain(last))) == [("non-communication hang", ["2"])]


def _circle(age: float = 40.0) -> list[RankView]:
    """Ranks 0 and 1 make two calls in opposite order; 2 waits for 1."""
    rows = jobs.groups({1: (2, 5, 4), 2: (2, 4, 4)})
    other = jobs.groups({1: (2, 4, 4), 2: (2, 5, 4), 3: (2, 4, 4)})
    return [
        jobs.inside(0, 1, 5, age, 2, world=3, groups=rows),
        jobs.inside(1, 2, 5, age, 2, world=3, groups=other),
        jobs.inside(2, 3, 5, age, 2, world=3),
    ]


def test_a_circle_is_a_deadlock_and_who_hangs_on_it_is_not_in_it() -> None:
    (verdict,) = _told(jobs.job(*_circle()))
    assert jobs.told([verdict]) == [("deadlock", ["0", "1"])]
    assert verdict.groups == (1, 2)
    assert not _told(jobs.job(*_circle(29.0)))


def test_in_a_circle_a_rank_whose_call_does_not_hold_it_up_may_hang_elsewhere() -> None:
    """Rank 1 began to receive early, and then hangs in its own work."""
    views = _circle()
    row = jobs.call(2, 5, jobs.NOW - 40.0, flags=CallFlag.ASYNC)
    (verdict,) = _told(jobs.job(views[0], jobs.changed(views[1], calls=row), views[2]))
    assert jobs.told([verdict]) == [("deadlock", ["0", "1"])]
    assert ["hold" in s.detail for s in verdict.suspects if s.target is SuspectKind.RANK] == [
        False,
        True,
    ]
    assert "1 of them may hang elsewhere" in verdict.evidence[-1]
    (plain,) = _told(jobs.job(*_circle()))
    assert plain.suspects[0].confidence > verdict.suspects[0].confidence


def test_a_call_that_all_entered_is_communication() -> None:
    (verdict,) = _told(jobs.job(*(jobs.inside(r, 7, 10, 40.0 + r, 4) for r in range(4))))
    assert jobs.told([verdict], SuspectKind.GROUP) == [("communication hang", [f"{7:016x}"])]
    assert verdict.numbers["since last arrival s"] == pytest.approx(40.0)


def test_first_version_a_call_ages_from_its_last_arrival() -> None:
    """Rank 3 came back from a rightful pause a moment ago; the others entered long before."""
    views = [jobs.inside(r, 7, 10, 500.0 if r < 3 else 0.1, 4) for r in range(4)]
    assert not _told(jobs.job(*views))


def test_a_member_whom_the_call_let_go_has_arrived_too() -> None:
    """Its arrival is the last one, and starts the clock."""
    row = jobs.call(7, 10, jobs.NOW - 1.0, jobs.NOW - 0.5)
    gone_on = jobs.outside(3, 7, 10, 0.5, 4, calls=row)
    views = [jobs.inside(r, 7, 10, 500.0, 4) for r in range(3)]
    assert not _told(jobs.job(*views, gone_on))


def test_a_stopped_process_in_a_complete_call_is_the_cause() -> None:
    views = [jobs.inside(r, 7, 10, 40.0, 4) for r in range(4)]
    views[2] = jobs.changed(views[2], process_state="T")
    assert jobs.told(_told(jobs.job(*views))) == [("non-communication hang", ["2"])]


def test_who_waits_for_a_silent_rank_cannot_say() -> None:
    members = {7: (0, 1, 2, 3)}
    views = [jobs.inside(r, 7, 10, 40.0, 4, members=members) for r in range(3)]
    assert jobs.told(_told(jobs.job(*views))) == [("cannot say", ["3"])]
    assert not _told(jobs.job(*(jobs.inside(r, 7, 10, 20.0, 4) for r in range(3))))


def test_a_silent_node_is_named_with_what_its_machine_answers() -> None:
    members = {7: (0, 1, 2, 3)}
    views = [jobs.inside(r, 7, 10, 40.0, 4, members=members) for r in range(3)]
    job = replace(jobs.job(*views), agents=(AgentView("n9", 5, True),))
    (verdict,) = _told(job)
    assert verdict.names(SuspectKind.NODE) == ("n9",)
    assert "its machine answers another node" in verdict.evidence[1]
    assert sum(s.confidence for s in verdict.suspects) <= 0.5


def test_a_silent_rank_is_not_suspected_where_a_reporting_one_explains_all() -> None:
    views = _late()
    assert jobs.told(_told(jobs.job(*views[1:]))) == [("non-communication hang", ["3"])]


def test_beside_a_known_culprit_silent_ranks_are_not_suspected() -> None:
    """They may wait for it themselves."""
    other = jobs.inside(9, 8, 3, 40.0, 4, members={8: (9, 10, 11, 12)})
    assert jobs.told(_told(jobs.job(other))) == [("cannot say", ["10", "11", "12"])]
    assert jobs.told(_told(jobs.job(*_late(), other))) == [("non-communication hang", ["3"])]


MESSAGE = int(P2P[0])


def _open_receive(state: str, idle: float, **other: Any) -> list[RankView]:
    """Rank 0 has begun a receive 40 s ago; rank 1, which is to send, computes as long."""
    receive = jobs.calls(jobs.call(7, 1, jobs.NOW - 40, **({"op": MESSAGE} | other)))
    first = jobs.inside(0, 7, 1, 40.0, 2, calls=receive, process_state=state, moved=jobs.NOW - idle)
    return [first, jobs.outside(1, 7, 0, 40.0, 2, process_state="R")]


def test_a_receive_that_was_begun_early_holds_nobody_up_who_computes() -> None:
    assert _told(jobs.job(*_open_receive("S", 40.0)))
    assert not _told(jobs.job(*_open_receive("R", 40.0)))
    assert not _told(jobs.job(*_open_receive("S", 0.5)))


def test_a_collective_holds_its_caller_up_whatever_else_its_process_does() -> None:
    assert _told(jobs.job(*_open_receive("R", 0.5, op=1)))


def test_two_receives_that_were_begun_early_are_no_circle_while_their_ranks_compute() -> None:
    """Each has begun to receive from the other, and computes what it will send."""

    def both(state: str, age: float) -> JobView:
        views = []
        for rank, (mine, other) in enumerate(((1, 2), (2, 1))):
            receive = jobs.calls(jobs.call(mine, 1, jobs.NOW - age, op=MESSAGE))
            rows = jobs.groups({mine: (2, 1, 0), other: (2, 0, 0)})
            views.append(
                jobs.inside(rank, mine, 1, age, 2, calls=receive, groups=rows, process_state=state)
            )
        return jobs.job(*views)

    assert jobs.told(_told(both("S", 40.0)))[0][0] == "deadlock"
    assert not _told(both("R", 40.0))
    assert jobs.told(_told(both("R", 601.0)))[0][0] == "deadlock"


def test_a_rank_that_does_something_is_told_as_one() -> None:
    (verdict,) = _told(jobs.job(*_late(process_state="R")))
    assert "computes, reads or writes" in verdict.suspects[-1].detail
    assert (verdict.numbers["runs"], verdict.numbers["cannot run"]) == (1, 0)
    assert verdict.numbers["engine s"] == 600.0
    known = replace(jobs.job(*_late(process_state="R")), timeouts={7: 1800.0, 8: 5.0})
    assert _told(known)[0].numbers["engine s"] == 1800.0


def test_where_in_the_program_it_was_last_seen() -> None:
    def place(**call: int) -> str:
        views = _late()
        made = jobs.calls(jobs.call(7, 9, jobs.NOW - 45, jobs.NOW - 40, **call))
        views[3] = jobs.changed(views[3], calls=made)
        texts = {5: "train.py:12", 1: "all_reduce"}
        job = replace(jobs.job(*views), texts=texts, group_names={7: "dp"})
        (verdict,) = _told(job)
        return verdict.place

    assert place(site=5) == "train.py:12"
    assert place(site=0) == "all_reduce in dp"
    (verdict,) = _told(jobs.job(*_late()))
    assert verdict.place == ""


# --- on a device ----------------------------------------------------------------------------------


def _on_device(
    rank: int, flags: int, age: float = 40.0, ended: float = np.nan, **other: Any
) -> RankView:
    """A rank that has enqueued call 10 of group 7 and two more, and ended call 9 `ended` s ago."""
    rows = [jobs.call(7, seq, jobs.NOW - age, flags=flags) for seq in (10, 11, 12)]
    if not np.isnan(ended):
        rows.insert(0, jobs.call(7, 9, jobs.NOW - age, jobs.NOW - ended))
    usual: dict[str, Any] = {"calls": jobs.calls(*rows), "groups": jobs.groups({7: (4, 12, 9)})}
    return jobs.inside(rank, 7, 10, age, 4, **(usual | other))


def _usual(seconds: float = 1.0) -> Learned:
    """What is known when such a call has ended once, so long after it was enqueued."""
    at = jobs.NOW - 100.0
    made = jobs.calls(jobs.call(7, 9, at - seconds, at))
    return learn(
        Learned(), jobs.job(*(jobs.outside(r, 7, 9, 1.0, 4, calls=made) for r in range(4)))
    )


def test_a_device_that_has_not_come_to_a_call_is_the_cause() -> None:
    views = [_on_device(r, CallFlag.QUEUED if r == 2 else 0) for r in range(4)]
    (verdict,) = _told(jobs.job(*views), _usual())
    assert jobs.told([verdict]) == [("non-communication hang", ["2"])]
    assert "has not reached the call" in verdict.suspects[0].detail
    assert (verdict.numbers["hung"], verdict.numbers["inside"]) == (1, 3)
    assert "a broken link" in verdict.rules_out[0]


def test_the_queue_before_a_first_call_may_be_long() -> None:
    """As of replays of graphs between two all-reduces that are minutes apart."""

    def told(*ages: float, queued: int = 1, **settings: Any) -> list[list[tuple[str, list[str]]]]:
        flags = [CallFlag.QUEUED if r < queued else 0 for r in range(4)]
        jobs_of = [[_on_device(r, flags[r], age) for r in range(4)] for age in ages]
        return [jobs.told(_told(replace(jobs.job(*v), **settings))) for v in jobs_of]

    first = [("non-communication hang", ["0"])]
    assert told(40.0, 599.0, 601.0) == [[], [], first]  # after which a backend gives up
    assert told(601.0, 1801.0, timeouts={7: 1800.0}) == [[], first]
    nobody_waits = [("cannot say", ["0", "1", "2", "3"])]
    assert told(40.0, 599.0, 601.0, queued=4) == [[], [], nobody_waits]


def test_a_queue_that_is_as_long_as_it_was_is_none() -> None:
    views = [_on_device(r, CallFlag.QUEUED if r == 2 else 0) for r in range(4)]
    assert not _told(jobs.job(*views), _usual(10.0))  # 5 times as long is too long


def test_a_device_that_ends_calls_comes_to_the_others() -> None:
    def told(age: float, ended: float) -> list[Verdict]:
        views = [_on_device(r, CallFlag.QUEUED if r == 2 else 0, age, ended) for r in range(4)]
        return _told(jobs.job(*views), _usual())

    assert not told(200.0, 5.0)
    assert jobs.told(told(200.0, 40.0)) == [("non-communication hang", ["2"])]
    assert jobs.told(told(601.0, 5.0)) == [("non-communication hang", ["2"])]


def test_a_call_that_all_devices_have_come_to_hangs_itself() -> None:
    (verdict,) = _told(jobs.job(*(_on_device(r, 0) for r in range(4))))
    assert jobs.told([verdict])[0][0] == "communication hang"


def test_a_rank_that_no_longer_looks_says_nothing_of_its_device() -> None:
    views = [_on_device(r, CallFlag.QUEUED if r == 2 else 0) for r in range(4)]
    views[2] = jobs.changed(views[2], heartbeat=jobs.NOW - 40.0)
    assert jobs.told(_told(jobs.job(*views)))[0][0] == "communication hang"


def _unseen(rank: int, idle: float, seq: int = 9, flags: int = CallFlag.UNSEEN) -> RankView:
    at = jobs.NOW - idle
    return jobs.outside(
        rank, 7, seq, idle, 4, calls=jobs.calls(jobs.call(7, seq, at, at, flags=flags))
    )


def test_an_end_that_is_not_known_is_not_taken_for_one() -> None:
    """Three ranks wait for a fourth, which may still be in its last call."""
    views = [jobs.inside(r, 7, 10, 41.0, 4) for r in range(3)]
    (sure,) = _told(jobs.job(*views, _unseen(3, 40.0, flags=0)))
    (verdict,) = _told(jobs.job(*views, _unseen(3, 40.0)))
    assert jobs.told([sure]) == jobs.told([verdict]) == [("non-communication hang", ["3"])]
    assert verdict.suspects[0].confidence < sure.suspects[0].confidence
    assert "1 of them may still be in their last call" in verdict.evidence[-1]
    assert sure.rules_out
    assert not verdict.rules_out


def test_nobody_moves_and_ends_are_not_known() -> None:
    def all_of(idle: float, flags: int = CallFlag.UNSEEN) -> list[Verdict]:
        return _told(jobs.job(*(_unseen(r, idle, flags=flags) for r in range(4))))

    (verdict,) = all_of(5000.0)
    assert jobs.told([verdict]) == [("cannot say", ["0", "1", "2", "3"])]
    assert sum(s.confidence for s in verdict.suspects) <= 1
    assert verdict.numbers["unseen"] == 4
    assert not all_of(300.0)  # a backend gives up by itself later than that
    assert not all_of(5000.0, flags=0)
    moving = [_unseen(r, 5000.0 if r else 10.0) for r in range(4)]
    assert not _told(jobs.job(*moving))
