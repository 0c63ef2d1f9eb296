"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.roots import make_root


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A root with steps 10 and 20 of generation 1."""
    return make_root(tmp_path / "root")
