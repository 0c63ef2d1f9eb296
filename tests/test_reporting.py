"""The budget of CPU seconds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import reporting
from tests.reporting import over_budget


def test_a_folder_above_its_budget_is_named_and_one_without_is_not() -> None:
    spent = {"tests/lay": 50.4, "tests/store": 49.0, "tests": 900.0, "tests/docs": 80.0}
    allowed = {"lay": 50, "store": 50}
    assert over_budget(spent, allowed) == ["tests/lay: 50 CPU s, 50 allowed"]
    assert over_budget({}, allowed) == []


def test_a_slower_machine_may_spend_more() -> None:
    assert over_budget({"tests/lay": 59.0}, {"lay": 50}, slower=1.2) == []
    assert over_budget({"tests/lay": 61.0}, {"lay": 50}, slower=1.2) == [
        "tests/lay: 61 CPU s, 60 allowed"
    ]


def test_what_workers_counted_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_paces", paces := [])
    reporting.pytest_testnodedown(SimpleNamespace(workeroutput={"pace": [reporting.pace()]}))
    reporting.pytest_testnodedown(SimpleNamespace())  # one that was killed
    assert [seconds > 0 for seconds in paces] == [True]
