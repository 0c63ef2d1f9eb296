"""The session for a machine with a GPU: what it leaves when checks hang, crash or are cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_session
from bench.gpu_session import AIMS, CALL_S, CHECKS, Record, collect, section, verdicts
from tests.processes import PATIENCE_S, lives, until
from tests.simdevice import run
from tests.simulated import ON_SIMULATED_DEVICES

ROOT = Path(gpu_session.ROOT)
SCRIPT = """
import json, os, signal, subprocess, sys, time
name, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
def write(**row):
    with open(out, "a") as file:
        file.write(json.dumps({"check": name, **row}) + "\\n")
if name in ("good", "hangs", "cut"):
    write(figures={"pid": os.getpid()})
if name == "hangs":
    left = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    mother = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}])"
    reader, writer = os.pipe()
    subprocess.run([sys.executable, "-c", mother], stdout=writer, start_new_session=True)
    write(figures={"orphan": int(os.read(reader, 20))})
if name in ("hangs", "cut"):
    time.sleep(600)
if name == "crashes":
    print("what was printed last", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "fails":
    write(failed="a reason")
    sys.exit("of its own")
if name == "exits":
    sys.exit(3)
"""
DRIVER = """
import sys
from pathlib import Path
from bench.gpu_session import Check, Session
here, names = Path(sys.argv[1]), sys.argv[2].split(",")
limits = {"hangs": 1.0, "late": 10000.0}
checks = {n: Check(1, limits.get(n, 60.0), n, "a thing" if n == "real" else "") for n in names}
session = Session(
    here / "out", here / "scratch", checks=checks, script=here / "script.py", simulated=True
)
session.run(names)
"""


def driver(folder: Path, *names: str) -> subprocess.Popen[bytes]:
    """Start a session of checks whose names say what they do.

    In a process of its own: a session ends whatever is below its process.
    """
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), ",".join(names)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


def test_checks_that_hang_crash_or_fail_are_lines_and_the_next_one_runs(tmp_path: Path) -> None:
    session = driver(tmp_path, "hangs", "crashes", "fails", "exits", "real", "late", "good")
    assert session.wait(PATIENCE_S) == 0
    found = collect(tmp_path / "out")
    ended = {name: (end["result"], end["why"]) for name, end in found.ends.items()}
    assert ended.pop("late")[0] == "skipped"  # nothing of a call is left for it
    assert ended == {
        "hangs": ("hung", "ended after 1 s"),
        "crashes": ("crashed", "signal SIGSEGV"),
        "fails": ("failed", "a reason"),
        "exits": ("failed", "status 3"),
        "real": ("skipped", "needs hardware: a thing"),
        "good": ("ok", ""),
    }
    assert "what was printed last" in found.ends["crashes"]["tail"]
    assert "of its own" in (tmp_path / "out/gpu.log").read_text()
    assert not lives(found.figures["hangs"]["pid"])
    assert not lives(found.figures["hangs"]["orphan"]), "left by a process that had ended"


def test_a_session_that_is_cut_off_leaves_what_was_known(tmp_path: Path) -> None:
    session = driver(tmp_path, "good", "cut")
    record = Record(tmp_path / "out/gpu.jsonl")
    try:
        until(lambda: "pid" in collect(tmp_path / "out").figures.get("cut", {}), "a figure")
    finally:
        session.kill()
        session.wait()
    found = collect(tmp_path / "out")
    os.kill(found.figures["cut"]["pid"], signal.SIGKILL)
    with record.path.open("ab") as file:
        file.write(b'{"check": "cut", "figu')  # as a line that was just written
    found = collect(tmp_path / "out")
    assert {name: end["result"] for name, end in found.ends.items()} == {"good": "ok", "cut": "cut"}
    assert "pid" in found.figures["cut"]


def test_what_is_ok_is_not_run_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu-call1.jsonl")
    for name, result in (("probe", "ok"), ("link", "hung")):
        record.write(check=name, event="begin")
        record.write(check=name, event="end", result=result, seconds=1.0, why="")
    options = gpu_session.parsed(["--call", "1", "--out", str(tmp_path), "--resume"])
    assert gpu_session.chosen(options)[:2] == ["link", "remap"]
    options = gpu_session.parsed(["--checks", "probe", "--out", str(tmp_path)])
    assert gpu_session.chosen(options) == ["probe"]
    with pytest.raises(SystemExit, match="no such checks: nonsense"):
        gpu_session.chosen(gpu_session.parsed(["--checks", "nonsense"]))


def test_each_aim_stands_beside_its_figure(tmp_path: Path) -> None:
    first, second = Record(tmp_path / "gpu-call1.jsonl"), Record(tmp_path / "gpu-call2.jsonl")
    first.write(check="save", event="begin")
    first.write(check="save", figures={"share_of_link": 0.97})
    first.write(check="save", figures={"memory_ratio_each_step": 1.5})
    first.write(check="save", event="end", result="ok", seconds=9.0, why="")
    second.write(check="recorder", event="begin")
    second.write(check="recorder", figures={"native_us": 0.5})
    second.write(check="session", event="begin")
    second.write(check="session", event="end", result="hung", seconds=9.0, why="")
    rows = {row[0]: row[3] for row in verdicts(collect(tmp_path))}
    assert [rows[aim.what] for aim in AIMS] == [
        "yes",
        "no",
        "not known: restore not run",
        "not known: session hung",
        "yes",
    ]
    text = section(collect(tmp_path))
    assert "| save |" in text
    assert "SIMULATED" not in text
    first.write(event="call", simulated=True)
    assert "SIMULATED" in section(collect(tmp_path))


def test_limits_fit_a_call_and_each_check_is_there() -> None:
    from bench import gpu_checks

    limits: Counter[int] = Counter()
    for check in CHECKS.values():
        limits[check.call] += int(check.limit_s)
    assert set(limits) == {1, 2, 3}
    assert max(limits.values()) <= CALL_S
    assert list(gpu_checks.CHECKS) == list(CHECKS)
    assert all(aim.check in CHECKS for aim in AIMS)


def test_wheels_are_of_all_that_is_imported_but_torch_and_numpy(tmp_path: Path) -> None:
    names = gpu_session.carried()
    assert {"msgspec", "zstandard", "cyclopts", "attrs", "rich-rst", "xxhash"} <= set(names)
    assert not {"torch", "numpy"} & set(names)
    (line,) = gpu_session.pinned(["msgspec"]).splitlines()
    assert line.startswith("msgspec==")
    assert "--hash=sha256:" in line
    for name in ("msgspec-9-cp312-cp312-linux.whl", "not_installed_here-1-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(name.partition("-")[0] + ".py", "")
    assert gpu_session.unpack(tmp_path, tmp_path / "site") == ["not_installed_here"]
    assert os.listdir(tmp_path / "site") == ["not_installed_here.py"]
    with pytest.raises(SystemExit, match="no wheels are in"):
        gpu_session.unpack(tmp_path / "site", tmp_path)


def called(folder: str, names: list[str]) -> dict[str, list[Any]]:
    """Call checks; return what each has reported."""
    from bench import gpu_checks

    record = Record(Path(folder) / "gpu.jsonl")
    out: dict[str, list[Any]] = {}
    for name in names:
        here = Path(folder) / name
        here.mkdir()
        one = gpu_checks.Run(name, record.path, here, simulated=True, gb=0.0, limit_s=60.0)
        before = len(record.rows())
        gpu_checks.call(name, one)
        out[name] = record.rows()[before:]
    return out


HERE = ["probe", "race", "save", "restore", "changes", "memory"]
"""Those whose figures are looked at; `test_all_calls_run` has all, as a session runs them."""


class TestOnASimulatedDevice:
    pytestmark = ON_SIMULATED_DEVICES

    @pytest.mark.timeout(600)
    def test_checks_run(self, tmp_path: Path) -> None:
        found = run(called, str(tmp_path), HERE, deadline_s=550.0)
        assert not [row for rows in found.values() for row in rows if "figures" not in row]
        figures = collect(tmp_path).figures
        assert figures["probe"]["lacking"] == []
        assert figures["race"]["raised"] == 0
        assert figures["save"]["bytes_are_right"]
        assert figures["restore"]["memory_from"] == ["memory"]
        assert figures["restore"]["files_wrong"] == 0
        found_changes = [v for k, v in figures["changes"].items() if k.startswith("changed_")]
        assert [f["bytes_are_right"] and f["damage_is_found"] for f in found_changes] == [True] * 6
        shares = [f["crossed_share"] for f in found_changes]
        assert shares == sorted(shares)
        assert shares[2] == pytest.approx(0.02, abs=0.001)  # two bytes of place, two of value
        assert figures["memory"]["clones"]["right"]
        assert figures["memory"]["locks"]["locked"] == 0

    @pytest.mark.long
    def test_all_calls_run(self, tmp_path: Path) -> None:
        names = ",".join(CHECKS)
        command = [sys.executable, "-m", "bench.gpu_session", "--checks", names, "--simulated"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--out", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout[-3000:]
        assert time.monotonic() - began < CALL_S
        ends = collect(tmp_path).ends
        skipped = {name for name, end in ends.items() if end["result"] != "ok"}
        assert skipped == {name for name, check in CHECKS.items() if check.needs}
