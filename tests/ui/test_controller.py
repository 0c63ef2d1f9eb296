"""Orders on the page, in a real browser, before a real daemon and a real controller."""

from __future__ import annotations

from pathlib import Path

from tests.daemon.controllers import controller, nodes
from tests.daemon.daemons import running, until
from tests.ui.test_page import login, pytestmark, report, script

__all__ = ["pytestmark"]


def test_an_order_asks_for_a_reason_and_is_carried_out(tmp_path: Path) -> None:
    with (
        controller(tmp_path / "log", 4) as address,
        running(tmp_path / "history", controller=lambda: address) as daemon,
        nodes(address, ["n0", "n1"]),
    ):
        elastic = daemon.service.elastic
        assert elastic is not None
        until(lambda: (s := elastic.controller.status) and s.state == "running")
        with script("controller.cjs", login(daemon), home=tmp_path) as process:
            found = report(process)
        assert found["nodes"] == ["n0", "n1"]
        assert found["disabled"] == ["resume"]
        assert found["error"] == "Choose a node."
        assert found["recoveries"] == 1
        assert max(found["wide"], found["sideways"]) <= 0
        status = elastic.controller.status
        assert status is not None
        assert "seen <b>by a test</b>" in status.recoveries[-1]["cause"]
