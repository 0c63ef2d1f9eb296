"""Which folders of tests a change asks for."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp", reason="import-linter, of `scripts/install dev`, brings it")

from tests.slices import ALWAYS, affected


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("ckptd/lay/syntax/parser.py", ["cli/reshard", "lay", "publish", "reshard"]),
        ("ckptd/publish/gone.py", ["publish", "testing"]),
        ("ckptd/publish/README.md", ["docs"]),
        ("plugins/ckptd_etcd/seat.py", ["plugins/etcd"]),
        ("tests/cli/monitor/test_watch.py", ["cli/monitor"]),
        ("tests/store/places.py", ["base", "checkpoint", "store"]),
    ],
)
def test_a_slice_and_what_imports_it(file: str, folders: list[str]) -> None:
    assert affected([file]) == [*(f"tests/{f}" for f in folders), *ALWAYS]


def test_what_all_share_is_tested_by_everything() -> None:
    assert affected(["ckptd/errors.py", "ckptd/lay/boxes.py"]) == ["tests"]
    assert affected([]) == []
