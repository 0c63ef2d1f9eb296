"""The table of late parts: each is there, and each is asked for in one place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from ckptd.parts import PARTS, part

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_there(name: str) -> None:
    assert part(name) is not None


def test_every_part_is_asked_for_in_one_slice() -> None:
    """Two slices that use one part would each own its protocol."""
    users = Counter(
        name
        for slice_ in (ROOT / "ckptd").iterdir()
        for name in {
            name
            for path in slice_.rglob("*.py")
            for name in re.findall(r'\bpart\("([\w-]+)"\)', path.read_text())
        }
    )
    assert users == dict.fromkeys(PARTS, 1)


def test_no_slice_is_its_own_part() -> None:
    for path in (ROOT / "ckptd").rglob("*.py"):
        for name in re.findall(r'\bpart\("([\w-]+)"\)', path.read_text()):
            assert PARTS[name].split(".")[1] != path.relative_to(ROOT).parts[1], path
