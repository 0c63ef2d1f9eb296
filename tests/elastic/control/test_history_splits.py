from __future__ import annotations

import msgspec
import pytest

from ckptd.elastic.control.history import Splitter
from ckptd.elastic.control.states import Move, State
from ckptd.elastic.messages import Recovery


class Story:
    """Moves of a job, one after the other."""

    def __init__(self) -> None:
        self.splitter = Splitter(epoch=1000.0)
        self.state = State.PLAN
        self.go(0.0, State.RESHARD, 1)
        self.go(2.0, State.RUNNING, 1)

    def go(self, at: float, state: State, generation: int, **more: object) -> None:
        fields = {"level": 1, "step": 7, "reason": "a worker ended"} | more
        move = Move(at=at, before=self.state, state=state, generation=generation, **fields)  # type: ignore[arg-type]
        self.splitter.moved(move)
        self.state = state

    def last(self) -> Recovery:
        return self.splitter.recoveries[-1]


def parts(r: Recovery) -> float:
    first = r.detect + r.fence + r.plan + r.spawn + r.import_ + r.init + r.load
    return first + r.first_step + r.again + r.parked


def test_parts_add_up_and_the_slowest_node_counts() -> None:
    story = Story()
    story.splitter.made(9)
    story.go(10.0, State.FENCE, 2, detect_s=1.5)
    story.go(10.5, State.PLAN, 2)
    story.go(10.75, State.RESHARD, 3, level=0)
    story.splitter.marked(3, {"spawned": 0.1, "imported": 0.2})
    story.splitter.marked(3, {"spawned": 0.05, "imported": 0.5, "initialised": 0.6, "loaded": 0.8})
    story.go(11.5, State.RESUME, 3)
    story.go(12.0, State.RUNNING, 3)
    r = story.last()
    assert (r.before, r.after, r.level, r.cause, r.planned) == (1, 3, 0, "a worker ended", False)
    assert (r.detect, r.fence, r.plan, r.spawn) == (1.5, 0.5, 0.25, 0.1)
    assert r.import_ == pytest.approx(0.4)
    assert r.init == pytest.approx(0.1)
    assert r.load == pytest.approx(0.2)
    assert (r.total, r.at, r.steps_lost) == (3.5, 1012.0, 2)
    assert parts(r) == pytest.approx(r.total)
    assert msgspec.to_builtins(r)["from"] == 1


def test_marks_that_come_late_make_the_last_recovery_finer() -> None:
    story = Story()
    story.go(10.0, State.FENCE, 2)
    story.go(10.0, State.RESHARD, 3)
    story.go(12.0, State.RUNNING, 3)
    assert (story.last().first_step, story.last().steps_lost) == (2.0, None)
    story.splitter.marked(3, {"loaded": 1.5})
    assert (story.last().load, story.last().first_step) == (1.5, 0.5)
    assert len(story.splitter.recoveries) == 1


def test_a_fault_on_the_way_belongs_to_the_same_recovery() -> None:
    story = Story()
    story.go(10.0, State.FENCE, 2, planned=True)
    story.go(11.0, State.PLAN, 2, planned=True)
    story.go(12.0, State.RESHARD, 3, planned=True)
    story.go(15.0, State.FENCE, 4, reason="another one")
    story.go(16.0, State.PLAN, 4)
    story.go(16.0, State.RESHARD, 5)
    story.go(17.0, State.RUNNING, 5)
    r = story.last()
    assert (r.cause, r.planned, r.before, r.after) == ("a worker ended", False, 1, 5)
    assert (r.fence, r.plan, r.again, r.first_step, r.total) == (2.0, 1.0, 3.0, 1.0, 7.0)
    assert parts(r) == r.total


def test_a_pause_is_not_waiting() -> None:
    story = Story()
    story.go(10.0, State.SUSPECT, 1, planned=True)
    story.go(11.0, State.FENCE, 2, planned=True)
    story.go(12.0, State.PARKED, 2, planned=True)
    story.go(92.0, State.PLAN, 2, planned=True)
    story.go(92.0, State.RESHARD, 3, planned=True)
    story.go(93.0, State.RUNNING, 3)
    r = story.last()
    assert (r.planned, r.parked, r.total) == (True, 80.0, 82.0)


def test_the_first_start_and_the_end_are_no_recoveries() -> None:
    story = Story()
    story.go(10.0, State.FENCE, 2)
    story.go(11.0, State.ABORTED, 2)
    assert story.splitter.recoveries == ()


def test_only_the_last_hundred_are_kept() -> None:
    story = Story()
    for turn in range(150):
        at = 10.0 * (turn + 1)
        story.go(at, State.FENCE, 2 * turn + 2)
        story.go(at + 1, State.RESHARD, 2 * turn + 3)
        story.go(at + 2, State.RUNNING, 2 * turn + 3)
        story.splitter.marked(2 * turn + 3, {"loaded": 0.5})
    assert len(story.splitter.recoveries) == 100
    assert story.last().after == 301


def test_of_a_program_that_tells_of_no_step_the_time_until_it_counts_as_running_is_no_restart() -> (
    None
):
    story = Story()
    story.go(10.0, State.FENCE, 2)
    story.go(10.0, State.RESHARD, 3)
    story.splitter.marked(3, {"spawned": 0.5, "initialised": 2.0})
    story.go(40.0, State.RUNNING, 3, quiet_s=30.0)
    assert story.last().total == pytest.approx(2.0)
    assert parts(story.last()) == pytest.approx(2.0)
