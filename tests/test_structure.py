"""The shape of the tree: notes that are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda p: p.stem)
def test_modules_that_a_design_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text())
    bases = [ROOT, ROOT / "ckptd", ROOT / "ckptd/layout/lay"]
    assert [n for n in named if not any((base / n).exists() for base in bases)] == []
