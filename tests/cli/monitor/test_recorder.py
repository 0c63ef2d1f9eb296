"""``ckptd recorder build``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Cli


@pytest.fixture(autouse=True)
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTD_BUILDS", str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_without_a_compiler_it_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = cli("recorder", "build")
    assert done.code == 1
    assert "needs a C++ compiler" in done.err
    assert "no-such-compiler" in done.err
