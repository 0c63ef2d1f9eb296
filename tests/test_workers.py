"""What a run does around its tests: worlds of ranks never run side by side, no file is left."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import PATIENCE_S

RANKS = """
import pytest

@pytest.mark.dist
@pytest.mark.parametrize("number", range(6))
def test_ranks(number):
    pass
"""
PLAIN = """
import tempfile
import pytest

@pytest.mark.parametrize("number", range(6))
def test_plain(number):
    if number == 3:
        tempfile.mkdtemp(prefix="forgotten-")
"""


def _no_part(folder: str, names: list[str]) -> list[str]:
    """Return what is left out of a copy of this folder: tests, data, and conftests below."""
    below = Path(folder) != Path(__file__).parent
    modules = [n for n in names if n.endswith(".py") and not n.startswith("test_")]
    kept = {n for n in modules if not (below and n == "conftest.py")}
    return [n for n in names if n not in kept and not Path(folder, n).is_dir()]


def test_rank_tests_of_a_file_share_a_worker_and_a_file_that_is_left_fails_the_run(
    tmp_path: Path,
) -> None:
    here = Path(__file__).parent
    shutil.copytree(here, tmp_path / "tests", ignore=_no_part)
    shutil.copy(here.parent / "pyproject.toml", tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"tests/test_ranks_{name}.py").write_text(RANKS)
    (tmp_path / "tests/test_plain.py").write_text(PLAIN)
    leftovers = tmp_path / "tests/leftovers.py"  # nobody removes that file, however long it waits
    impatient = leftovers.read_text().replace("_PATIENCE_S = 60.0", "_PATIENCE_S = 1.0")
    assert impatient != leftovers.read_text()
    leftovers.write_text(impatient)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-n", "2", "--dist", "loadgroup"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "left behind in the folder for temporary files" in run.stdout
    assert len(re.findall("^forgotten-", run.stdout, re.MULTILINE)) == 1
    passed = re.findall(r"^\[(gw\d)\].* PASSED (\S+)", run.stdout, re.MULTILINE)
    assert len(passed) == 18
    for name in ("one", "two"):
        assert len({worker for worker, test in passed if f"test_ranks_{name}" in test}) == 1
    assert {worker for worker, _ in passed} == {"gw0", "gw1"}
    assert "18 passed" in run.stdout
