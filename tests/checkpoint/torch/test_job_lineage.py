"""Steps that a program gives: those that grow, those that do not, and what it hears of these."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import RefusedError

pytestmark = pytest.mark.usefixtures("writing_thread")

RULES = [4, ckptd.Every(minutes=60), ckptd.Auto(mtbf_hours=1e6)]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpts")


@pytest.mark.parametrize("every", RULES, ids=["steps", "minutes", "auto"])
def test_a_loop_that_counts_from_1_in_each_epoch_is_refused(root: str, every: Any) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root, every=every) as ck:
        for step in range(1, 7):
            ck.save(step, state, force=step == 6)
        with pytest.raises(RefusedError) as caught:
            ck.save(1, state)
        assert (caught.value.kind, caught.value.found) == ("behind", "1")
        assert "across epochs" in (caught.value.hint or "")
        assert not ck.save(7, state)  # and goes on with the next step


@pytest.mark.parametrize("every", RULES, ids=["steps", "minutes", "auto"])
def test_a_loop_that_begins_at_1_after_a_load_is_refused(root: str, every: Any) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(6, state)
    with ckptd.Checkpointer(root, every=every) as ck:
        assert ck.load(state) == 6
        with pytest.raises(RefusedError, match="step 1 is earlier"):
            ck.save(1, state)


def test_what_is_refused_writes_nothing_and_later_steps_are_saved(root: str) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(5, state)
        with pytest.raises(RefusedError):
            ck.save(4, state, force=True)
        ck.save(6, state)
    with ckptd.Checkpointer(root) as ck:
        assert ck.latest() == 6
        assert ck.load(state, 5) == 5


def test_a_step_may_be_called_often_and_older_ones_loaded(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root, every=2) as ck:
        began = [s for s in (1, 1, 2, 2, 2, 3, 4, 4) if ck.save(s, state)]
        assert began == [2, 4]
        ck.wait()
        assert ck.load(state, 2) == 2
        assert [s for s in (2, 3, 4) if ck.save(s, state)] == [4]
    assert not caplog.records


def test_steps_that_go_back_before_anything_was_saved_are_told(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root, every=10) as ck:
        for step in (*range(1, 7), *range(1, 7)):
            assert not ck.save(step, state)
        told = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        assert len(told) == 1
        assert told[0].startswith("save(1) after save(6): steps went backwards")
        # What was rolled back in memory to a step after the last save may go on.
        assert ck.save(12, state)
        assert not ck.save(17, state)
        assert not ck.save(14, state)
        assert ck.save(20, state)


def test_a_step_that_stands_still_is_told_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root, every=2) as ck:
        for _ in range(500):
            ck.save(3, state)
    told = [r.message for r in caplog.records]
    assert told == ["save(3) was called 101 times: steps must increase for another save to be due"]
