from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.control.history import Goodput
from ckptd.elastic.control.states import Move, State


def move(at: float, before: State, state: State) -> Move:
    return Move(at=at, before=before, state=state, generation=1, level=1, step=0, reason="because")


def trained(told: bool = True) -> Goodput:
    """Return the account of a job that trains since second 5."""
    g = Goodput(0.0)
    g.moved(move(2.0, State.PLAN, State.RESHARD))
    g.moved(move(5.0, State.RESHARD, State.RUNNING))
    if told:
        g.committed(5.0)
    return g


def test_what_is_committed_is_useful_and_the_rest_is_lost() -> None:
    g = trained()
    g.committed(20.0)
    assert g.seconds(23.0)["training"] == 3.0
    g.moved(move(24.0, State.RUNNING, State.FENCE))
    g.moved(move(25.0, State.FENCE, State.PLAN))
    got = g.seconds(26.0)
    assert got == {
        "useful": 15.0,
        "training": 0.0,
        "saving": 0.0,
        "lost": 4.0,
        "restarting": 4.0,
        "waiting": 3.0,
        "parked": 0.0,
    }


def test_a_job_that_tells_nothing_loses_nothing_that_is_known() -> None:
    g = trained(told=False)
    g.moved(move(24.0, State.RUNNING, State.FENCE))
    assert (g.seconds(24.0)["useful"], g.seconds(24.0)["lost"]) == (19.0, 0.0)


@pytest.mark.parametrize("ends", [State.RUNNING, State.DONE])
def test_a_job_of_which_no_step_is_told_was_not_restarting_until_it_was_believed(
    ends: State,
) -> None:
    g = Goodput(0.0)
    g.moved(move(2.0, State.PLAN, State.RESHARD))
    g.moved(msgspec.structs.replace(move(32.0, State.RESHARD, ends), quiet_s=26.0))
    got = g.seconds(32.0)
    assert (got["restarting"], got["waiting"]) == (4.0, 2.0)
    assert got["useful" if ends is State.DONE else "training"] == 26.0


def test_saves_are_taken_out_of_what_they_held_up() -> None:
    g = trained()
    g.saving(2.0)
    g.committed(15.0)
    g.saving(100.0)
    g.committed(16.0)
    assert (g.seconds(16.0)["useful"], g.seconds(16.0)["saving"]) == (8.0, 3.0)


def test_a_planned_restart_loses_only_what_came_after_its_save() -> None:
    g = trained()
    g.moved(move(30.0, State.RUNNING, State.SUSPECT))
    g.committed(31.0)
    g.moved(move(31.5, State.SUSPECT, State.FENCE))
    g.moved(move(32.0, State.FENCE, State.PARKED))
    got = g.seconds(132.0)
    assert (got["useful"], got["lost"], got["restarting"], got["parked"]) == (26.0, 0.5, 3.5, 100.0)


def test_what_was_done_when_the_job_ended_in_good_order_is_useful() -> None:
    g = trained()
    g.moved(move(30.0, State.RUNNING, State.DONE))
    assert g.seconds(99.0)["useful"] == 25.0


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(list(State)[:7]), st.booleans())))
def test_each_second_is_in_one_kind(story: list[tuple[float, State, bool]]) -> None:
    g, now, state = Goodput(0.0), 0.0, State.PLAN
    for seconds, after, commits in story:
        now += seconds
        if commits:
            g.committed(now)
        g.moved(move(now, state, after))
        state = after
    assert sum(g.seconds(now).values()) == pytest.approx(now)


def test_a_change_that_is_told_late_leaves_no_negative_seconds() -> None:
    kept = trained()
    kept.committed(7.0)
    kept.moved(move(6.9, State.RUNNING, State.FENCE))
    assert min(kept.seconds(8.0).values()) >= 0.0
