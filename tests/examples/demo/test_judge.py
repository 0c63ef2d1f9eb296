from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ckptd_demo.judge import checks_of, gaps, largest_gap, same_samples, state_differences
from ckptd_demo.report import Kill, LifeReport, Pace, Relaid
from ckptd_demo.spec import StateRow, StepRow


def _rows(*losses: float, first: int = 1) -> list[StepRow]:
    return [StepRow(s, loss, (s, s + 100), 0.1, 0.0) for s, loss in enumerate(losses, first)]


REFERENCE = _rows(4.0, 2.0, 1.0, 0.5)


def test_gap_is_relative_to_the_reference() -> None:
    assert gaps(_rows(2.002, 1.0, first=2), REFERENCE) == pytest.approx({2: 1e-3, 3: 0.0})


def test_largest_gap_looks_at_the_steps_asked_for() -> None:
    rows = _rows(2.0, 1.01, 0.6, first=2)
    assert largest_gap(rows, REFERENCE, range(2, 4)) == pytest.approx(1e-2)
    assert largest_gap(rows, REFERENCE, range(2, 5)) == pytest.approx(2e-1)


def test_a_missing_step_leaves_no_gap() -> None:
    assert largest_gap(_rows(2.0, 1.0, first=2), REFERENCE, range(2, 5)) is None
    assert largest_gap(_rows(4.0, 2.0, 1.0, 0.5, 0.2), REFERENCE, range(1, 6)) is None


def test_a_loss_that_is_no_number_is_an_infinite_gap() -> None:
    assert largest_gap(_rows(4.0, math.nan), REFERENCE, range(1, 3)) == math.inf


def test_same_samples_compares_order_too() -> None:
    assert same_samples(_rows(9.0, 9.0, first=2), REFERENCE)
    swapped = [StepRow(1, 4.0, (101, 1), 0.1, 0.0)]
    assert not same_samples(swapped, REFERENCE)
    assert not same_samples([], REFERENCE)
    assert not same_samples(_rows(0.1, first=9), REFERENCE)


SAVED = StateRow("saved", 10, 8, {"a": "1", "b": "2"}, "p")


@pytest.mark.parametrize(
    ("loaded", "differing"),
    [
        (msgspec.structs.replace(SAVED, event="loaded"), []),
        (msgspec.structs.replace(SAVED, tensors={"a": "1", "b": "3"}), ["b"]),
        (msgspec.structs.replace(SAVED, tensors={"a": "1"}), ["b"]),
        (msgspec.structs.replace(SAVED, tensors={"a": "1", "b": "2", "c": "4"}), ["c"]),
        (
            msgspec.structs.replace(SAVED, plain="q"),
            ["schedule, hyperparameters or data position"],
        ),
        (None, ["no report of a load"]),
    ],
    ids=["alike", "value", "lost", "extra", "plain", "no load"],
)
def test_state_differences(loaded: StateRow | None, differing: list[str]) -> None:
    assert state_differences(SAVED, loaded) == differing


def test_states_without_tensors_prove_nothing() -> None:
    empty = msgspec.structs.replace(SAVED, tensors={})
    assert state_differences(empty, empty) == ["no tensors at all"]
    assert state_differences(None, empty) == ["no report of the saved state"]


FIRST = LifeReport(
    name="life 1",
    ranks=4,
    layout="FSDP2 2 x TP 2",
    first_step=1,
    last_step=31,
    saves=[10, 20],
    end="killed",
    resumed_from=None,
    expected_from=None,
    gap=0.0,
    gap_steps=20,
    ids_equal=True,
    state_exact=None,
    tensors=0,
    tensors_by_diff=0,
    nbytes=0,
    differing=[],
    seconds=1.0,
)
SECOND = msgspec.structs.replace(
    FIRST,
    name="life 2",
    first_step=21,
    last_step=80,
    resumed_from=20,
    expected_from=20,
    gap=1e-6,
    state_exact=True,
    tensors=212,
    tensors_by_diff=212,
)


RELAID = Relaid(20, "TP 2 x PP 2", "/tmp/demo/resharded", SECOND.tensors, True)
PACE = Pace(2, "FSDP2 2", 24, 24, 0.2, 0.21)


def _failed(
    second: LifeReport = SECOND,
    *,
    landed: bool = True,
    relaid: Relaid = RELAID,
    pace: Pace = PACE,
) -> list[str]:
    checks = checks_of([FIRST, second], landed, relaid, pace, 80)
    return [check.what for check in checks if not check.ok]


@pytest.mark.parametrize("change", [{"identical": False}, {"tensors": 0}])
def test_a_reshard_and_back_has_to_give_the_same(change: dict[str, Any]) -> None:
    (failed,) = _failed(relaid=msgspec.structs.replace(RELAID, **change))
    assert "resharded to TP 2 x PP 2 and back" in failed


@pytest.mark.parametrize("change", [{"complete": 23}, {"complete": 0, "saves": 0}])
def test_every_snapshot_has_to_be_whole(change: dict[str, Any]) -> None:
    (failed,) = _failed(pace=msgspec.structs.replace(PACE, **change))
    assert "a save at every step" in failed


def test_all_checks_hold_for_a_good_run() -> None:
    assert _failed() == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gap": 2e-3}, "loss gap"),
        ({"gap": None}, "loss gap"),
        ({"gap": math.inf}, "loss gap"),
        ({"ids_equal": False}, "sample ids"),
        ({"state_exact": False}, "bit-exact"),
        ({"state_exact": None}, "bit-exact"),
        ({"tensors_by_diff": 211}, "ckptd diff"),
        ({"tensors": 0, "tensors_by_diff": 0}, "state bit-exact"),
        ({"resumed_from": 10, "first_step": 11}, "resumed from step 20"),
        ({"resumed_from": None, "first_step": 1}, "resumed from step 20"),
        ({"first_step": 22}, "resumed from step 20"),
        ({"last_step": 79}, "last step"),
    ],
    ids=str,
)
def test_each_promise_is_a_check(change: dict[str, object], text: str) -> None:
    failed = _failed(msgspec.structs.replace(SECOND, **change))
    assert len(failed) == 1
    assert text in failed[0]


def test_a_kill_outside_the_window_is_a_failure() -> None:
    assert _failed(landed=False) == ["killed between the first data byte and the commit"]


KILL = Kill(30, 1, 2, 7, 8, "data/x/r00002.safetensors", 100, 50, False, False, False, False)


@pytest.mark.parametrize(
    ("change", "landed"),
    [
        ({}, True),
        ({"data_bytes_seen": 0}, False),
        ({"commit_before": True}, False),
        ({"commit_at": True}, False),
        ({"commit_after": True}, False),
        ({"commit_end": True}, False),
    ],
    ids=str,
)
def test_kill_landed(change: dict[str, object], landed: bool) -> None:
    assert msgspec.structs.replace(KILL, **change).landed is landed
