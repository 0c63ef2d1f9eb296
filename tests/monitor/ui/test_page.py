"""The web page in a real browser, before a real daemon: drawn, driven by keys, narrow, cut off.

Needs node, the distribution's chromium and ``tests/monitor/ui/install``; skips where they lack.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.monitor.daemon.history import History
from ckptd_simulated.feed import Feeder, PlantedAt, Simulation, mesh_for
from tests.authority import Authority, files
from tests.monitor.daemon.daemons import JOB, Running, fed, quick_settings, running
from tests.processes import PATIENCE_S, until

__all__ = ["files"]

HERE = Path(__file__).parent
MODULES = HERE.parents[2] / "build/ui"


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def _missing() -> str:
    if shutil.which("node") is None:
        return "node is not installed: apt-get install nodejs npm, then tests/monitor/ui/install"
    if _chromium() is None:
        return "chromium is not installed: apt-get install chromium"
    for name, wanted in json.loads((HERE / "package.json").read_text())["dependencies"].items():
        have = MODULES / "node_modules" / name / "package.json"
        if not have.exists() or json.loads(have.read_text())["version"] != wanted:
            return f"{name} {wanted} is not installed: run tests/monitor/ui/install"
    return ""


pytestmark = [
    # Two browsers at once make each other late, and the machine.
    pytest.mark.xdist_group("ui"),
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "all is there"),
]


@contextmanager
def many(daemon: Running, ranks: int) -> Iterator[None]:
    """Feed a daemon as forwarders do: a sheet for 32 nodes."""
    simulation = Simulation(JOB, mesh_for(ranks), nodes_per_sheet=32)
    feeder = Feeder(simulation, daemon.service.ingest.hand_in)
    try:
        until(lambda: len(daemon.service.rounds.last.job.ranks) == ranks, "nobody reports")
        yield
    finally:
        feeder.close()


def login(daemon: Running) -> str:
    return f"{daemon.url}/?token={daemon.token}"


@contextmanager
def script(name: str, *arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a node script while the block runs; its browser ends with it."""
    environment = {
        **os.environ,
        "CKPTD_UI": str(MODULES),
        "CKPTD_CHROMIUM": _chromium() or "",
        "HOME": str(home),
    }
    process = subprocess.Popen(
        ["node", str(HERE / name), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a script found; it must have met no problem."""
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert found.pop("problems") == [], found
    return found


@pytest.mark.parametrize("ranks", [16, 10240])
def test_the_map_of_ranks(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Daemon and simulation share the test's process: at a real job's pace they leave it some time.
    settings = replace(quick_settings(), period_s=1.0)
    with running(tmp_path / "history", settings=settings) as daemon, many(daemon, ranks):
        with script("map.cjs", login(daemon), str(ranks), home=tmp_path) as process:
            found = report(process)
    with capsys.disabled():
        print(
            f"\npage, {ranks} ranks: first paint {found['first_paint_ms']:.0f} ms, map drawn"
            f" {found['drawn_ms']:.0f} ms, updates {found['draw_ms']} ms,"
            f" longest task {found['longest_task_ms']:.0f} ms"
        )
    assert found["home"].startswith("Rank 0 · ")
    assert found["down"].startswith("Rank ")
    assert found["down"] != found["home"]
    number = found["down"].split()[1]
    assert found["panel"].startswith(f"Rank {number}")
    assert found["address"] == f"#/ranks/{number}"
    assert found["followed"] != found["panel"]
    assert found["focused"] == "map"
    assert found["arranged"] == ranks


def test_an_incident_opens_with_its_evidence(tmp_path: Path) -> None:
    with running(tmp_path / "history") as daemon, fed(daemon, 16, PlantedAt("stop", 5, 0.5)):
        until(lambda: daemon.service.rounds.last.open, "no incident opens")
        with script("incident.cjs", login(daemon), "5", home=tmp_path) as process:
            found = report(process)
    assert found["title"] == "Non-communication hang"
    assert found["document_title"].startswith("(1) ")
    assert re.fullmatch(
        r"Rank 5 on n1 has not moved for \d+ s: stopped by a signal or a debugger; 15 ranks wait\.",
        found["lead"],
    )
    cost = r"No step for \S+ s: \d+ rank-(minute|hour)s? of 16 ranks so far\."
    assert re.match(cost, found["cost"])
    here = f"ckptd incidents {JOB}-1 --job {JOB}"
    assert found["commands"] == [f"py-spy dump --pid {found['pid']}", here]
    # The lead is read a moment after the row.
    row, lead = (re.sub(r"for \d+ s", "for # s", found[name]) for name in ("row", "lead"))
    assert row == lead.rstrip(".")
    assert found["suspects"][0] == "rank 5"
    assert len(found["evidence"]) >= 1
    assert {"Suspects", "Evidence", "Rules out", "Would be refuted by", "What to do"} <= set(
        found["headings"]
    )
    assert "seen <b>by a test</b>" in found["acknowledged"]
    assert found["panel"].startswith("Rank 5")
    facts = dict(zip(found["facts"][::2], found["facts"][1::2], strict=True))
    assert int(facts["process id"]) > 0
    assert found["taken"] == f"Stack, taken for {JOB}-1"
    assert found["asked"] == "asked; its agent answers with its next reports"
    assert "Rank 5" in found["odd"]
    assert found["theme"] == "dark"
    assert all(n <= 0 for n in found["sideways"].values()), found["sideways"]


def test_progress_over_time_and_another_run_beside_it(tmp_path: Path) -> None:
    before = History(tmp_path / "before.sqlite")
    before.put_about("before")
    for k in range(100):
        before.put_round(time.time() - 3600 + k, {"step_max": 100 + 4 * k, "step_s_median": 0.5})
    before.close()
    with (
        running(tmp_path / "history.sqlite") as daemon,
        fed(daemon, 16, PlantedAt("stop", 5, 6.0)),
    ):
        until(lambda: daemon.service.rounds.last.open, "no incident opens")
        with script("progress.cjs", login(daemon), home=tmp_path) as process:
            found = report(process)
    assert found["charts"][:3] == ["Step time", "Own time of a step, outside collectives", "Step"]
    assert found["value"].endswith((" s", " ms"))
    assert found["happened"] == ["Non-communication hang"]
    assert found["label"].startswith("Step time: ")
    assert found["focused"] == "plot"
    assert found["zoomed"]
    assert found["dragged"]
    assert found["runs"][1].startswith("before, ")
    assert found["two"] == [JOB, "before"]
    assert found["usual"][1] == "500 ms"
    assert found["compared"][0] == "Step time by step"
    functions = found["functions"]
    assert functions["rising"] == [[100, 110, 120], [100, 0, 1, 2, 3], [1, 2]]
    # What is counted on starts again with a restart: nothing is said of the time between.
    assert functions["numbers"] == {
        "loss": [["loss", [[0, 4], [10, 3], [20, 3.5], [30, 2]]]],
        "rate": [["tokens a second", [[10, 20], [30, 30]]]],
    }
    assert functions["losses"] == [["val_loss", [[7, 2]], [[5, 4]]], None]
    # Ranks that load show step 0 for a moment; ten minutes of nothing, and a fall, part runs.
    assert functions["runs"] == [[5, 50, 100, 0, 100, 110, 120], [130, 140]]
    assert functions["gap"] == [1, 1, None, 2, 2]


def test_axe_finds_no_violation_and_nothing_sticks_out(tmp_path: Path) -> None:
    with running(tmp_path / "history") as daemon, fed(daemon, 64, PlantedAt("stop", 5, 3.0)):
        until(lambda: daemon.service.rounds.last.open, "no incident opens")
        with script("axe.cjs", login(daemon), "5", home=tmp_path) as process:
            found = report(process)
    assert found["violations"] == []
    assert found["looked"] == 4 * 9
    assert all(n <= 0 for n in found["sideways"].values()), found["sideways"]


def test_the_door_and_a_daemon_that_goes_away(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with running(tmp_path / "history") as daemon, fed(daemon, 16):
            port = daemon.port
            process = stack.enter_context(script("door.cjs", login(daemon), home=tmp_path))
            hear(process, "GONE")
        answer(process)
        hear(process, "BACK")
        with running(tmp_path / "history", port=port) as daemon, fed(daemon, 16):
            answer(process)
            found = report(process)
    assert "not the daemon's token" in found["refused"]
    assert "Connection lost since" in found["lost"]
    # Nothing on the page says that the job is well while nobody knows.
    assert found["pill"] == "connection lost"
    assert found["state"].startswith("StateNot knownconnection lost since ")
    assert (found["violations"], max(found["sideways"])) == ([], 0)
    assert found["again"] == "Healthy"
    assert found["back"] == "live"


def test_over_tls(tmp_path: Path, files: Path) -> None:
    Authority().put(files / "operator", "spiffe://example.org/ckptd/operator/me")
    with running(tmp_path / "history") as daemon, fed(daemon, 16):
        assert daemon.url.startswith("https://")
        with script("tls.cjs", login(daemon), home=tmp_path) as process:
            found = report(process)
    (cookie,) = found["cookies"]
    assert cookie["name"].startswith("__Host-ckptd_")
    assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
    assert found["trusted"] == "https:"


def hear(process: subprocess.Popen[str], wanted: str) -> None:
    """Wait for a line of a script."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip() == wanted, line


def answer(process: subprocess.Popen[str]) -> None:
    """Let a script go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
