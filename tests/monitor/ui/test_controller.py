"""Orders on the page, in a real browser, before a real daemon and a real controller."""

from __future__ import annotations

from pathlib import Path

from tests.monitor.daemon.controllers import controller, nodes
from tests.monitor.daemon.daemons import running
from tests.monitor.ui.test_page import login, pytestmark, report, script
from tests.processes import until

__all__ = ["pytestmark"]


def test_an_order_asks_for_a_reason_and_is_carried_out(tmp_path: Path) -> None:
    with (
        controller(tmp_path / "log", 4) as address,
        running(tmp_path / "history", controller=lambda: address) as daemon,
        nodes(address, ["n0", "n1"]),
    ):
        elastic = daemon.service.responder
        assert elastic is not None
        until(lambda: (s := elastic.controller.status) and s.state == "running")
        with script("controller.cjs", login(daemon), home=tmp_path) as process:
            found = report(process)
        assert found["nodes"] == ["n0", "n1"]
        assert found["disabled"] == ["resume"]
        assert found["error"] == "Choose a node."
        assert found["submit"] == "Exclude n1"
        assert found["looks"]
        assert found["recoveries"] == found["recovered"] == 1
        assert "Diagnosis" not in found["tiles"]
        assert "Saved" in found["tiles"]
        assert found["empty"] == ["block", 1]
        assert found["emptyWide"] > 0.8
        for mesh, places in found["filled"].items():
            for apart, wide, high in places:
                assert apart, mesh
                assert wide <= 1, mesh
                assert high <= 645 or mesh == "1 1024 1", mesh
                assert wide > 0.6 or mesh == "2 4 2", mesh
        assert found["unknown"] == "Unknown page"
        assert max(found["wide"], found["sideways"]) <= 0
        status = elastic.controller.status
        assert status is not None
        assert "seen <b>by a test</b>" in status.recoveries[-1].cause
