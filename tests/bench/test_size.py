"""`bench/size.py --budget`: a slice that is too large, or has no budget, fails the check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = """\
# The house

| above | 1 |

## Budgets

| slice | code lines at most |
|---|---|
| ground | 3 |
| store | 2 |

## Considered

| lay | 7 |
"""
CODE = '"""Words."""\n\n# a comment\nx = 1\ny = (\n    2\n)\n'  # four lines of code


def budget(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "bench/size.py", root, "--budget"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose ground and store have two lines of code each."""
    for folder in ("docs/design", "ckptd/store/net", "ckptd/events", "ckptd/store/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/design/house.md").write_text(PAGE)
    for name in ("errors", "events/event", "store/base", "store/net/server"):
        (tmp_path / f"ckptd/{name}.py").write_text('"""Words."""\n\nx = 1\n')
    return tmp_path


def test_slices_within_their_budgets(tree: Path) -> None:
    done = budget(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| ground | 2 | 3 |" in done.stdout
    assert "| store | 2 | 2 |" in done.stdout


def test_a_slice_above_its_budget_is_named(tree: Path) -> None:
    (tree / "ckptd/store/net/server.py").write_text(CODE)
    done = budget(tree)
    assert done.returncode == 1
    assert done.stderr == "store: 5 code lines, 3 above its budget of 2\n"


def test_slices_and_budgets_are_the_same(tree: Path) -> None:
    """A new slice is not free, and a slice that is gone leaves no row."""
    (tree / "ckptd/store").rename(tree / "ckptd/lay")
    done = budget(tree)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "lay: has no budget in docs/design/house.md",
        "store: has a budget in docs/design/house.md, and no code",
    ]
