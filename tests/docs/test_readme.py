"""README.md: its first program is short, runs as it stands, and goes on where it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests import programs
from tests.processes import PATIENCE_S

README = Path(__file__).parents[2] / "README.md"


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _again(folder: Path, program: str) -> None:
    """Run it as a fork of a process that has PyTorch: what it imports has been seen to be quiet."""
    code = "import runpy, warnings; warnings.simplefilter('error'); "
    code += f"runpy.run_path({program!r}, run_name='__main__')"
    done = programs.run("-c", code, cwd=folder, forking=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_program_goes_on_where_it_ended(tmp_path: Path) -> None:
    program = re.findall(r"(?ms)^```python\n(.*?)^```$", README.read_text())[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    seeds = "import numpy, random\nnumpy.random.seed(1), random.seed(1), torch.manual_seed(1)\n"
    seeded = program.replace("model = ", f"{seeds}model = ", 1)
    (tmp_path / "first.py").write_text(seeded)
    _run(tmp_path, "first.py")
    _again(tmp_path, "first.py")
    listed = _run(tmp_path, "-m", "ckptd", "ls", "checkpoints")
    assert re.findall(r"(?m)^\W*(\d+)\b", listed) == ["180", "190", "200"]
    once = seeded.replace("start + 101", "start + 201").replace('"checkpoints"', '"once"')
    (tmp_path / "once.py").write_text(once)
    _again(tmp_path, "once.py")
    _run(tmp_path, "-m", "ckptd", "diff", "checkpoints", "once")  # exits with 1 where they differ
