"""The rules at work: what is measured, what is chosen, what is said."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.records import Generation
from ckptd.checkpoint.root.auto import ENOUGH
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.torch.schedule import Cadence, SignalWatch, StepTimes
from tests.checkpoint.root.test_auto_lives import history
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")


def cadence(rule: Any, lives: list[Generation] | None = None) -> Cadence:
    return Cadence(rule, Agreement(LocalBoard(), 5.0), SignalWatch(()), lambda: lives or [])


def test_rules_by_step_never_ask_anybody() -> None:
    board = LocalBoard(1, 4)
    rule = Cadence(ckptd.Every(steps=3), Agreement(board, 5.0), SignalWatch(()), list)
    before = dict(board._values)
    last = None
    for step in range(1, 10):
        if rule.due(step, last):
            last = step
    assert last == 9
    assert board._values == before  # and nobody was waited for: there is no rank 0


def test_a_measured_save_gives_a_choice_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    rule = cadence(ckptd.Auto(mtbf_hours=3.0))
    assert rule.choice is None
    rule.measured(30.0, 60.0)
    first = rule.choice
    assert first is not None
    assert first.mtbf.source == "as given"
    rule.measured(1.0, 5.0)  # the first save is never typical
    assert rule.choice is not None
    assert rule.choice.cost.total_s == 1.0
    rule.measured(1.05, 5.0)
    rule.measured(1.1, 5.0)
    told = [r.message for r in caplog.records]
    assert len(told) == 2
    assert told[0] == str(first)
    assert "a save costs 1 s (1 s in the call, 0 ms in slower steps)" in told[1]


def test_the_failure_rate_is_the_given_one_then_the_measured_then_the_published() -> None:
    lives = history([3600.0] * ENOUGH, world=1)
    for auto, records, source, hours in [
        (ckptd.Auto(mtbf_hours=3.0), lives, "as given", 3.0),
        (ckptd.Auto(nodes=2048), lives, f"measured over {ENOUGH} earlier lives of this job", 1.44),
        (ckptd.Auto(nodes=2048), lives[:4], "2048 nodes, one failure in 264 d each", 3.09),
        (ckptd.Auto(), [], "1 node, one failure in 264 d each", 6334.6),
    ]:
        rule = cadence(auto, records)
        rule.due(1, None)
        rule.measured(1.0, 1.0)
        assert rule.choice is not None
        assert rule.choice.mtbf.source == source
        assert rule.choice.mtbf.seconds / 3600.0 == pytest.approx(hours, rel=0.01)


class Told(SignalWatch):
    """A launcher's word."""

    failures = (7200.0, 12.0)


@pytest.mark.parametrize(
    ("auto", "source", "seconds"),
    [
        (ckptd.Auto(), "measured by the controller", 7200.0),
        (ckptd.Auto(mtbf_hours=3.0), "as given", 10800.0),
    ],
)
def test_the_controller_knows_restarts_and_failures(
    auto: ckptd.Auto, source: str, seconds: float
) -> None:
    told = Told(())
    rule = Cadence(auto, Agreement(LocalBoard(), 5.0), told, list)
    rule.due(1, None)
    rule.measured(1.0, 1.0)
    assert rule.choice is not None
    assert (rule.choice.mtbf.source, rule.choice.mtbf.seconds) == (source, seconds)
    assert rule.choice.restart_s == 12.0
    # What it learns later counts as well; what it does not know is found as ever.
    told.failures = 0.0, 0.0
    rule.measured(1.0, 1.0)
    assert rule.choice.restart_s == 0.0
    assert rule.choice.mtbf.source != "measured by the controller"


def test_with_near_tiers_the_root_is_needed_less_often() -> None:
    auto = ckptd.Auto(mtbf_hours=1.0, beyond_near=0.1)
    board = Agreement(LocalBoard(), 5.0)
    rule = Cadence(auto, board, SignalWatch(()), list, near=True)
    rule.measured(1.0, 1.0)
    assert rule.choice is not None
    assert rule.choice.mtbf.seconds == pytest.approx(36000.0)


def test_auto_saves_at_once_and_then_by_what_it_measured(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1000)}
    with ckptd.Checkpointer(str(tmp_path), every=ckptd.Auto(mtbf_hours=1000.0)) as ck:
        handle = ck.save(1, state)
        assert handle is not None
        assert not ck.save(2, state)
        handle.durable()
        assert not ck.save(3, state)
        choice = ck.cadence
    assert choice is not None
    assert choice.cost.blocked_s > 0.0
    assert choice.cost.durable_s > 0.0  # less, where a save is durable before its call returns
    assert choice.interval_s >= choice.cost.durable_s


def test_auto_makes_no_save_while_one_drains(tmp_path: Path) -> None:
    auto = ckptd.Auto(mtbf_hours=1e-9, max_minutes=1e-6)
    state = {"x": torch.zeros(1 << 18)}
    with ckptd.Checkpointer(str(tmp_path), every=auto, storage=ckptd.Storage(throttle=2e6)) as ck:
        handles = []
        step, end = 0, time.monotonic() + PATIENCE_S
        # A busy machine may take seconds to write the first one.
        while step < 300 or len(handles) < 2:
            assert time.monotonic() < end
            step += 1
            time.sleep(0.005)
            if handle := ck.save(step, state):
                assert all(h.done for h in handles)
                handles.append(handle)


def test_a_save_that_ends_while_it_is_looked_at_is_counted() -> None:
    class Ending(SaveTracker):
        @property
        def done(self) -> bool:
            """Tell what was so when it was asked, and end."""
            before = super().done
            self.advance("durable")
            return before

    rule = cadence(None)
    rule.saved(Ending(3, 1, "a", 0), 0.1)
    assert [rule.durable_step(), rule.durable_step()] == [None, 3]


def test_an_unreadable_history_is_told_and_the_published_rate_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> list[Generation]:
        raise ckptd.StoreError("the store is away")

    rule = Cadence(ckptd.Auto(nodes=1), Agreement(LocalBoard(), 5.0), SignalWatch(()), broken)
    rule.measured(1.0, 1.0)
    assert "the store is away" in caplog.text
    assert rule.choice is not None


@given(
    calm=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=40),
    slow=st.lists(st.floats(1.4, 1.6), max_size=40),
    evaluation=st.booleans(),
)
def test_what_draining_costs_is_how_much_slower_steps_are(
    calm: list[float], slow: list[float], evaluation: bool
) -> None:
    times, now = StepTimes(), 0.0
    times.leave(now)
    steps = [(d, False) for d in calm] + [(d, True) for d in slow]
    if evaluation and len(slow) >= 3:
        steps.append((500.0, True))
    for seconds, draining in steps:
        now += seconds
        times.call(now, draining)
        now += 7.0  # the call itself
        times.leave(now)
    count = sum(draining for _, draining in steps)
    assert 0.3 * count <= times.inflation_s() + 1e-6 <= 0.7 * count + 1e-5
    assert times.inflation_s() == 0.0
    assert times.usual_s == pytest.approx(1.0, abs=0.101)


def test_steps_that_nobody_saw_without_a_save_cost_nothing() -> None:
    times = StepTimes()
    assert times.usual_s is None
    times.leave(0.0)
    times.call(5.0, True)
    assert times.usual_s == 5.0
    assert times.inflation_s() == 0.0
