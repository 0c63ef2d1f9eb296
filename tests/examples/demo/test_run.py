"""The demo from end to end, as a user starts it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from ckptd_demo.processes import read_rows
from ckptd_demo.report import (
    Check,
    Deed,
    Elastic,
    Found,
    Generation,
    Kill,
    LifeReport,
    Outage,
    Pace,
    Policy,
    PolicyLife,
    Report,
    Watched,
)
from ckptd_demo.spec import ProcessRow
from tests import programs
from tests.processes import PATIENCE_S, lives, until

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "demo.md"
MAIN = ("-c", "from ckptd.cli.main import main; main()")
CLI = (sys.executable, *MAIN)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run(*MAIN, "demo", *arguments, timeout=600, forking=True)


@pytest.mark.dist
@pytest.mark.timeout(640)
@pytest.mark.parametrize(
    "parts", [("save",), pytest.param(("watch", "save"), marks=pytest.mark.long)]
)
def test_the_demo(tmp_path: Path, parts: tuple[str, ...]) -> None:
    folder = tmp_path / "demo"
    only = [word for part in parts for word in ("--only", part)]
    done = _run("--dir", str(folder), "--quick", "--json", "--keep", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(_reported(folder)) >= 2 * (4 + 2 + 3)
    assert not any(map(lives, _reported(folder)))
    document = json.loads(done.stdout)
    assert (document.pop("verb"), document.pop("schema")) == ("demo", 1)
    report = msgspec.convert(document, Report)
    _check_lives(report)
    assert report.kill is not None
    assert report.kill.landed
    assert len(report.checks) >= 14
    assert report.relaid is not None
    assert report.relaid.identical
    assert report.pace is not None
    assert report.pace.complete == report.pace.saves > 6
    assert report.pace.ratio > 0
    if "watch" in parts:
        _check_watched(report)
    assert (folder / "resharded" / "ckptd.json").exists()
    assert all(check.ok for check in report.checks)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "report.json").read_bytes()) == document
    killed = folder / "checkpoints" / report.kill.file
    assert killed.exists()  # what the interrupted save left is there, and nothing refers to it
    commits = {path.name for path in (folder / "checkpoints" / "commits").iterdir()}
    assert commits == {
        f"{step:012d}-g{generation:08d}.json"
        for generation, life in enumerate(report.lives, 1)
        for step in life.saves
    }

    _check_next(report.next, "ls inspect verify diff inspect gc")


@pytest.mark.dist
def test_the_first_minute(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = _run("--dir", str(folder), "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    # Somebody who reads a file or a pipe sees that it goes on.
    assert re.search(r"(?m)^ +\d+\.\d s  resuming from step 5 on 3 ranks", done.stderr)
    assert "yes, 116 tensors" in done.stdout
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert report.kill is not None
    assert report.kill.landed
    first, second = report.lives
    assert (first.ranks, first.saves) == (4, [5])
    assert (second.ranks, second.resumed_from, second.last_step) == (3, 5, 20)
    assert second.gap is not None
    assert second.gap < 1e-4
    assert (report.relaid, report.pace, report.watched, report.elastic) == (None,) * 4
    assert len(report.checks) == 7
    assert not any(map(lives, _reported(folder)))
    _check_next(report.next, "ls inspect verify diff")


def _check_next(commands: list[str], wanted: str) -> None:
    """What the demo proposes to try works as it is printed."""
    verbs = []
    for command in commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "ckptd"
        done = programs.run(*MAIN, verb, *arguments)
        assert done.returncode == (1 if verb == "diff" else 0), done.stderr
        assert done.stdout
        verbs.append(verb)
    assert verbs == wanted.split()


def _check_watched(report: Report) -> None:
    assert report.watched is not None, report.watch_note
    assert [one.rank for one in report.watched.found] == [1, 2, 3]
    assert all(one.right for one in report.watched.found)
    assert all(one.after_s > 0 for one in report.watched.found)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(640)
def test_the_elastic_part(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = _run("--dir", str(folder), "--only", "elastic", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    del document["verb"], document["schema"]
    report = msgspec.convert(document, Report)
    assert report.reference is None
    _check_elastic(report)
    assert (folder / "elastic.png").read_bytes().startswith(b"\x89PNG")


def _check_elastic(report: Report) -> None:
    assert report.elastic is not None, report.elastic_note
    assert [deed.ranks for deed in report.elastic.deeds] == [4, 3, 4]
    assert report.elastic.violations == []
    assert len(report.elastic.lives) >= 4


def _check_lives(report: Report) -> None:
    first, second, third = report.lives
    assert [life.ranks for life in report.lives] == [4, 2, 3]
    assert first.saves == [5]
    assert (second.resumed_from, second.first_step, second.saves) == (5, 6, [10, 15])
    assert (third.resumed_from, third.first_step, third.saves) == (15, 16, [20, 25])
    for life in (second, third):
        assert life.tensors == life.tensors_by_diff > 100
        assert life.state_exact is True
        assert life.gap is not None
        assert life.gap < 1e-4


@pytest.mark.dist
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    process = subprocess.Popen(
        [*CLI, "demo", "--dir", str(folder), "--quick", "--only", "save"],
        stdout=subprocess.DEVNULL,
    )
    try:
        until(
            lambda: (
                process.poll() is not None or (folder / "runs" / "life-1" / "steps.jsonl").exists()
            )
        )
        assert process.poll() is None
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        # The demo, two torchruns, their five ranks, and what writes for four of them.
        assert len(pids) >= 12
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 130
        assert not any(map(lives, pids))
    finally:
        process.kill()
        process.wait()


@pytest.mark.dist
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = _run("--dir", str(tmp_path), "--json")
    assert done.returncode == 5
    assert json.loads(done.stderr)["error"]["hint"] == "name another: ckptd demo --dir DIR"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_guide_names_every_field() -> None:
    words = set(re.findall(r"`([a-z_]+)`", GUIDE.read_text()))
    saving, watching = (Report, LifeReport, Kill, Pace, Check), (Watched, Found)
    others = (Elastic, Deed, Generation, Policy, PolicyLife, Outage)
    for kind in (*saving, *watching, *others):
        missing = {field.name for field in msgspec.structs.fields(kind)} - words
        assert not missing, kind


def _reported(folder: Path) -> list[int]:
    """Return every rank and every writing process of the lives that saved."""
    paths = folder.glob("runs/*/processes.jsonl")
    rows = [row for path in paths for row in read_rows(path, ProcessRow)]
    return [pid for row in rows for pid in (row.pid, row.writer_pid) if pid is not None]
