"""Forked children and the objects of their parents: real forks, all of them in `tests.forked`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.forked import ACTIONS, SOME, WORKS


def run(folder: Path, *which: str) -> list[dict[str, Any]]:
    done = programs.run("-m", "tests.forked", folder, *which)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was not as it is to be: a child that was refused or inert, a parent unharmed."""
    out = []
    for one in found:
        uses = one["action"] in ("use", "pool", "loader")
        wanted = "done" if not uses else "worked" if one["object"] in WORKS else "forked"
        if (one["child"], one["code"], one["parent"]) != (wanted, 0, "fine"):
            out.append(one)
    return out


def test_children_are_refused_and_their_parents_unharmed(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert not wrong(found)
    assert len({one["object"] for one in found}) == 14
    assert len(found) == 13 * len(SOME) + len(ACTIONS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_object_and_every_action(tmp_path: Path) -> None:
    found = run(tmp_path, "all")
    assert not wrong(found)
    assert len(found) == 14 * len(ACTIONS)
