"""No bytes that atheris makes are answered by anything but a value or a typed error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzzing.targets import TARGETS

pytest.importorskip("atheris", reason="atheris has no build for this Python")
RUNS = 400
AN_HOUR_S = 3600


def _fuzzed(folder: Path, runs: str, *names: str) -> str:
    command = [sys.executable, "-m", "tests.fuzzing.guided", str(folder), runs, *names]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    begin = done.stderr.find("== Uncaught")
    found = sorted(p.name for p in (folder / "found").iterdir())
    assert not done.returncode, f"{found}\n{done.stderr[begin : begin + 4000]}"
    assert done.stdout.count("== ") == len(names or TARGETS)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_target_for_a_moment(tmp_path: Path) -> None:
    _fuzzed(tmp_path, str(RUNS))


@pytest.mark.long
@pytest.mark.timeout(2 * AN_HOUR_S)
@pytest.mark.parametrize("name", TARGETS)
def test_each_target_for_its_part_of_an_hour(
    name: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    said = _fuzzed(tmp_path, f"{AN_HOUR_S // len(TARGETS)}s", name)
    rounds = [line for line in said.splitlines() if " inputs in " in line]
    report(f"guided fuzz {'; '.join(rounds)}: none answered wrongly")
