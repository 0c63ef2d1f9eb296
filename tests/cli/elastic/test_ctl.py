"""``ckptd ctl`` against a real controller: what a person sees, and what orders do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptd.elastic.cli.ctl import _show
from ckptd.elastic.messages import NodeRow, Status
from ckptd.elastic.policy import Shape
from tests.cli.running import COMMAND
from tests.elastic.controlled import ControllerProcess, controlled, pretended, status_when
from tests.processes import PATIENCE_S, until


def ctl(controller: ControllerProcess, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "ctl", *args, "--job", controller.job, "--log", controller.log]
    environ = {**os.environ, **controller.environ}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ, check=False
    )


def test_status_and_orders(tmp_path: Path) -> None:
    with (
        controlled(tmp_path, "--nodes", "1:2", "--set", "grow_s=0") as c,
        pretended(2, c.seat) as nodes,
    ):
        with c.operator() as operator:
            status_when(operator, lambda s: s.state == "running" and s.world == 2)
        out = ctl(c, "exclude", "n1", "--wait", "--json")
        assert out.returncode == 0, out.stderr
        document = json.loads(out.stdout)
        assert (document["verb"], document["state"]) == ("ctl order", "running")
        assert document["generation"] > 1
        shown = ctl(c, "status").stdout
        assert "job j: running" in shown
        assert "left out" in shown
        assert "in use" in shown
        refused = ctl(c, "drain", "n9")
        assert refused.returncode == 5
        assert "n9" in refused.stderr
        stopped = ctl(c, "stop", "--reason", "enough", "--wait")
        assert stopped.returncode == 0, stopped.stderr
        until(lambda: all(node.bye for node in nodes), "goodbye")
        assert c.wait() == 130


def test_why_explains_the_layout_and_a_later_controller_knows_it(tmp_path: Path) -> None:
    sets = [f"--set={name}" for name in ("gather_s=1", "patience_s=1", "grow_s=600")]
    options = ("--nodes", "1:3", "--slots", "2", "--layout", "pp=1,dp=6", "--pp", "2")
    with controlled(tmp_path, *options, *sets) as c, pretended(3, c.seat):
        with c.operator() as operator:
            status_when(operator, lambda s: s.state == "running" and s.world == 3)
        assert ctl(c, "exclude", "n1", "--wait", "--reason", "a new fan").returncode == 0
        out = ctl(c, "why")
        assert out.returncode == 0, out.stderr
        shown = out.stdout
        assert "fewer replicas, 3 to 2: nothing else changes" in shown
        assert "- n1, left out: a new fan" in shown
        table = shown.partition("LAYOUT ")[2]
        assert table.index("pp=1 dp=2 tp=1  100.0 %") < table.index("pp=2 dp=1 tp=1")
        before = json.loads(ctl(c, "why", "--json").stdout)
        assert before["verb"] == "ctl why"
        assert [row["ranks"] for row in before["nodes"]] == [[0], [], [1]]
        assert {one["cost"] - one["idle"] > 0 for one in before["candidates"]} == {True}
        c.kill()
        c.start()
        with c.operator() as operator:
            status_when(operator, lambda s: s.state == "running")
        after = json.loads(ctl(c, "why", "--json").stdout)
        kept = ("generation", "shape", "why", "candidates", "chosen_at")
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
        assert [row["out_why"] for row in after["nodes"]] == [""] * 3  # the log keeps no reason


def test_an_order_by_which_the_job_ends_is_not_carried_out(tmp_path: Path) -> None:
    sets = [f"--set={name}_s=0" for name in ("grow", "nodes", "patience")]
    with (
        controlled(tmp_path, "--nodes", "2", *sets) as c,
        pretended(2, c.seat),
    ):
        with c.operator() as operator:
            status_when(operator, lambda s: s.state == "running")
        out = ctl(c, "exclude", "n1", "--wait")
        assert out.returncode in (4, 5), out.stdout  # the controller may have ended as well
        assert c.wait() == 76


def test_without_a_controller(tmp_path: Path) -> None:
    nobody = ControllerProcess(tmp_path)
    out = ctl(nobody, "status", "--json")
    assert out.returncode == 4
    assert "no controller of this job was found" in json.loads(out.stderr)["error"]["message"]


def test_slots_that_are_out_of_use_are_shown_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = (NodeRow(name="a", up=True, slots=1, sick=("slot 0: the device fails: lost",)),)
    shape = Shape(1, 2, 1)
    some: dict[str, Any] = {
        "job": "j",
        "state": "running",
        "reason": "",
        "generation": 1,
        "step": 0,
    }
    _show(Status(**some, since=0.0, at=0.0, shape=shape, world=2, planned=shape, nodes=rows))
    assert "- a: slot 0: the device fails: lost (out of use)\n" in capsys.readouterr().out
