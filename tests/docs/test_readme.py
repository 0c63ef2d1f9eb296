"""README.md: its first program runs as it stands there, and goes on where it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.processes import PATIENCE_S

README = Path(__file__).parents[2] / "README.md"


def _run(program: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "first.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "first.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_program_goes_on_where_it_ended(tmp_path: Path) -> None:
    program = re.findall(r"(?ms)^```python\n(.*?)^```$", README.read_text())[0]
    seeded = program.replace("model = ", "torch.manual_seed(1)\nmodel = ", 1)
    assert _run(seeded, tmp_path / "twice").startswith("steps 1 to 100, loss 0.")
    second = _run(seeded, tmp_path / "twice")
    assert second.startswith("steps 101 to 200, loss 0.")
    once = _run(seeded.replace("start + 101", "start + 201"), tmp_path / "once")
    assert once.partition("loss")[2] == second.partition("loss")[2]
