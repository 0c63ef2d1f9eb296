"""Crashes that follow from a call which a backend gave up after its time-out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.monitor.job import CallFlag, JobView, RankView
from ckptd.monitor.rules.crash import crashes
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.verdict import SuspectKind, Verdict
from tests.monitor import jobs

T = 10.0


def ended(job: JobView, timeout: float = T) -> Verdict:
    timeouts = dict.fromkeys(job.group_ids.tolist(), timeout) if timeout else {}
    (verdict,) = crashes(replace(job, timeouts=timeouts), HangLimits())
    return verdict


def gave_up(
    rank: int, spent: float = T, code: int = 1, *, group: int = 7, **other: Any
) -> RankView:
    """A rank that came to call 4 and ended after `spent` seconds in it, half a second ago."""
    call = jobs.call(
        group, 4, jobs.NOW - 0.5 - spent, jobs.NOW - 0.5, flags=CallFlag.FAILED, site=3
    )
    rows = jobs.groups({group: (3, 4, 3)})
    return jobs.view(rank, 3, alive=False, exit_code=code, calls=call, groups=rows, **other)


def elsewhere(rank: int, *more: Any, **other: Any) -> RankView:
    """A rank that never came to call 4."""
    calls = jobs.calls(jobs.call(7, 3, jobs.NOW - 12, jobs.NOW - 11, site=5), *more)
    entered = int(calls["seq"].max())
    rows = jobs.groups({7: (3, entered, entered)})
    return jobs.outside(rank, 7, 3, 11, 3, calls=calls, **({"groups": rows} | other))


@pytest.mark.parametrize(
    "third",
    [
        elsewhere(1),
        elsewhere(1, alive=False, exit_code=-15),  # its launcher has ended it by now
        # It came when the others had given up, and failed since they were gone.
        elsewhere(
            1,
            jobs.call(7, 4, jobs.NOW - 0.4, jobs.NOW - 0.3, flags=CallFlag.FAILED),
            alive=False,
            exit_code=1,
        ),
    ],
)
def test_who_was_waited_for_is_named_and_not_who_gave_up(third: RankView) -> None:
    lost = gave_up(2, spent=T - 0.3)  # its peer had closed the connection
    verdict = ended(jobs.job(gave_up(0), third, lost))
    assert verdict.names() == ("1",)
    assert "by its time-out of 10 s" in verdict.evidence[0]
    assert any("then rank 0 was in call 4" in line for line in verdict.evidence)
    assert verdict.numbers["age s"] == pytest.approx(T)


def test_a_process_that_its_backend_has_aborted_shows_who_was_waited_for_too() -> None:
    """As NCCL's watchdog does: the call never ends."""
    call = jobs.call(7, 4, jobs.NOW - T - 2)
    rows = jobs.groups({7: (3, 4, 3)})
    views = [jobs.view(r, 3, alive=False, exit_code=-6, calls=call, groups=rows) for r in (0, 2)]
    assert ended(jobs.job(views[0], elsewhere(1), views[1])).names() == ("1",)
    assert ended(jobs.job(views[0], elsewhere(1), views[1]), timeout=600.0).names() == ("0", "2")


def test_a_call_that_all_had_entered_names_no_rank() -> None:
    verdict = ended(jobs.job(*(gave_up(r) for r in range(3))))
    assert verdict.names() == ()
    assert len(verdict.names(SuspectKind.GROUP)) == 1
    assert "all its members had entered it" in verdict.evidence[1]


@pytest.mark.parametrize("spent", [0.1, T / 2])
def test_a_call_that_failed_sooner_was_not_given_up(spent: float) -> None:
    verdict = ended(jobs.job(gave_up(0, spent), elsewhere(1), gave_up(2, spent)))
    assert verdict.names() == ("0", "2")
    assert ended(jobs.job(gave_up(0), elsewhere(1)), timeout=0.0).names() == ("0",)


@pytest.mark.parametrize("code", [-9, -11, 3])
def test_a_rank_that_ended_by_itself_stays_the_cause(code: int) -> None:
    verdict = ended(jobs.job(gave_up(0), elsewhere(1, alive=False, exit_code=code), gave_up(2)))
    assert verdict.names() == ("1",)
    assert "call" not in verdict.evidence[0]


@settings(max_examples=60)
@given(
    st.integers(2, 9),
    st.data(),
    st.floats(T, 30 * T),
)
def test_of_any_job_exactly_those_are_named_that_did_not_come(
    world: int, data: st.DataObject, spent: float
) -> None:
    absent = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world - 1))
    ends = data.draw(st.lists(st.sampled_from([None, -15]), min_size=world, max_size=world))
    shift = data.draw(st.floats(0, 5))
    views = []
    for rank in range(world):
        if rank in absent:
            end = {} if ends[rank] is None else {"alive": False, "exit_code": ends[rank]}
            view = elsewhere(rank, **end)
        else:
            view = gave_up(rank, spent)
        groups, calls = view.groups.copy(), view.calls.copy()
        groups["size"] = world
        calls["start"] -= shift
        calls["end"] -= shift
        views.append(jobs.changed(view, world=world, groups=groups, calls=calls))
    order = data.draw(st.permutations(range(world)))
    verdict = ended(jobs.job(*(views[i] for i in order)))
    assert set(verdict.names()) == {str(r) for r in absent}


def test_who_waited_for_another_group_is_not_named() -> None:
    """Rank 1 is missed in one group, and waits for rank 2 in another."""
    first = gave_up(0)
    calls = jobs.call(8, 4, jobs.NOW - T)
    rows = jobs.groups({7: (2, 3, 3), 8: (2, 4, 3)})
    waits = jobs.view(1, 3, alive=False, exit_code=-15, calls=calls, groups=rows)
    idle = jobs.view(2, 3, groups=jobs.groups({8: (2, 3, 3)}), moved=jobs.NOW - 20)
    groups = first.groups.copy()
    groups["size"] = 2
    verdict = ended(jobs.job(jobs.changed(first, groups=groups), waits, idle))
    assert verdict.names() == ("2",)
    assert not np.isnan(verdict.numbers["age s"])
