"""Processes that ended and nodes that are silent."""

from __future__ import annotations

import pytest

from ckptd.monitor.job import AgentView, CallFlag, Phase
from ckptd.monitor.rules.crash import crashes
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.verdict import SuspectKind
from tests.monitor import jobs

LIMITS = HangLimits()


@pytest.mark.parametrize(
    ("code", "how"), [(-9, "signal 9"), (1, "exit code 1"), (None, "cause unknown")]
)
def test_a_process_that_ended(code: int | None, how: str) -> None:
    job = jobs.job(*(jobs.view(r) for r in range(3)), jobs.view(3, alive=False, exit_code=code))
    (verdict,) = crashes(job, LIMITS)
    assert verdict.names() == ("3",)
    assert how in verdict.suspects[-1].detail


def test_a_job_that_is_done_is_no_crash() -> None:
    done = [jobs.view(r, alive=False, exit_code=0, phase=Phase.EXIT) for r in range(4)]
    assert not list(crashes(jobs.job(*done), LIMITS))


def test_who_ended_with_an_error_beside_a_signal_followed_it() -> None:
    ends = {0: 1, 1: -11, 2: 1}
    views = [jobs.view(r, alive=False, exit_code=c) for r, c in ends.items()]
    (verdict,) = crashes(jobs.job(*views, jobs.view(3)), LIMITS)
    assert verdict.names() == ("1",)
    assert verdict.numbers["ended"] == 3


def test_a_node_of_which_half_ended_is_named() -> None:
    views = [jobs.view(r, 8, alive=r >= 4, exit_code=-9 if r < 4 else None) for r in range(8)]
    (verdict,) = crashes(jobs.job(*views), LIMITS)
    assert verdict.names(SuspectKind.NODE) == ("n0",)


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        (AgentView("n1", 3, False), ("n1",)),
        (AgentView("n1", 2, False), None),
        (AgentView("n1", 9, True), None),
        (AgentView("n1", 9, None), None),
    ],
)
def test_a_node_is_silent_only_if_a_peer_says_so_too(
    agent: AgentView, named: tuple[str, ...] | None
) -> None:
    verdicts = list(crashes(jobs.job(jobs.view(0), agents=[agent]), LIMITS))
    assert (verdicts[0].names(SuspectKind.NODE) if verdicts else None) == named


def test_who_was_ended_by_the_launcher_followed_another() -> None:
    ends = {0: -15, 1: 7, 2: -15}
    views = [jobs.view(r, alive=False, exit_code=c) for r, c in ends.items()]
    (verdict,) = crashes(jobs.job(*views, jobs.view(3)), LIMITS)
    assert verdict.names() == ("1",)
    ended_by_hand = [jobs.view(r, alive=False, exit_code=-15) for r in range(3)]
    (verdict,) = crashes(jobs.job(*ended_by_hand), LIMITS)
    assert len(verdict.names()) == 3


def test_who_ended_in_a_call_or_after_it_failed_had_lost_a_peer() -> None:
    failed = jobs.calls(
        jobs.call(7, 4, jobs.NOW - 1, jobs.NOW, flags=CallFlag.FAILED),
        jobs.call(8, 4, jobs.NOW - 1, jobs.NOW),
    )
    inside = jobs.calls(jobs.call(7, 4, jobs.NOW - 1))
    fine = jobs.calls(jobs.call(7, 3, jobs.NOW - 1, jobs.NOW))
    views = [
        jobs.view(r, alive=False, exit_code=1, calls=calls)
        for r, calls in enumerate((failed, inside, fine, failed))
    ]
    (verdict,) = crashes(jobs.job(*views), LIMITS)
    assert verdict.names() == ("2",)


@pytest.mark.parametrize("after", [0, -6])
def test_who_ended_otherwise_after_its_call_failed_had_lost_a_peer_too(after: int) -> None:
    """A program that catches the error and leaves, and a library that aborts."""
    failed = jobs.calls(jobs.call(7, 4, jobs.NOW - 1, jobs.NOW, flags=CallFlag.FAILED))
    fine = jobs.calls(jobs.call(7, 3, jobs.NOW - 1, jobs.NOW))
    ends = [(after, failed), (1, fine), (after, failed)]
    views = [jobs.view(r, alive=False, exit_code=c, calls=made) for r, (c, made) in enumerate(ends)]
    (verdict,) = crashes(jobs.job(*views), LIMITS)
    assert verdict.names() == ("1",)
    (verdict,) = crashes(jobs.job(*views[::2]), LIMITS)
    assert verdict.names() == ("0", "2")
