"""The budget of CPU seconds."""

from __future__ import annotations

from tests.reporting import over_budget


def test_a_folder_above_its_budget_is_named_and_one_without_is_not() -> None:
    spent = {"tests/lay": 50.4, "tests/store": 49.0, "tests": 900.0, "tests/docs": 80.0}
    allowed = {"lay": 50, "store": 50}
    assert over_budget(spent, allowed) == ["tests/lay: 50 CPU s, 50 allowed"]
    assert over_budget({}, allowed) == []
