"""How checkpoints are named, and what is held while one is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.checkpoint.cli.address import CheckpointAddress, held, needs_step, opened
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc
from ckptd.checkpoint.root.leases import leases
from ckptd.errors import NotFoundError, StoreError, UsageError
from ckptd.store.local import LocalStore
from tests.cli.roots import cut, make_root, put, values
from tests.cli.running import Cli


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("run", CheckpointAddress("run")),
        ("run@10", CheckpointAddress("run", 10)),
        ("run@000000000010", CheckpointAddress("run", 10)),
        ("run@10-g2", CheckpointAddress("run", 10, 2)),
        ("run@000000000010-g00000002", CheckpointAddress("run", 10, 2)),
        ("run@latest", CheckpointAddress("run")),
        ("run@5@latest", CheckpointAddress("run@5")),
        ("run@5@10", CheckpointAddress("run@5", 10)),
        ("s3://user@host/run", CheckpointAddress("s3://user@host/run")),
        ("s3://bucket/run@10", CheckpointAddress("s3://bucket/run", 10)),
        ("run@10-g", CheckpointAddress("run@10-g")),
        ("run@ten", CheckpointAddress("run", "ten")),
        ("run@v1.2-rc_3", CheckpointAddress("run", "v1.2-rc_3")),
        ("s3://user@host/run@prod", CheckpointAddress("s3://user@host/run", "prod")),
        ("run@prod@latest", CheckpointAddress("run@prod")),
        ("run@-prod", CheckpointAddress("run@-prod")),
        ("run@\u0661", CheckpointAddress("run@\u0661")),  # a digit of another script
        ("@10", CheckpointAddress("@10")),
    ],
)
def test_parsing(text: str, wanted: CheckpointAddress) -> None:
    assert CheckpointAddress.of(text) == wanted


def test_some_verbs_want_a_step() -> None:
    assert needs_step("run@3").step == 3
    with pytest.raises(UsageError, match="no step given"):
        needs_step("run")


@pytest.fixture
def forked(tmp_path: Path) -> str:
    """A root whose generation 2 went back to step 10 and saved step 20 again."""
    root = make_root(tmp_path / "root", (10, 20, 30))
    with opened(root) as catalogue:
        catalogue.rollback(10)
        put(catalogue.store, cut(values(5)), 20)
    return root


@pytest.mark.parametrize(
    ("suffix", "step", "generation"),
    [("", 20, 2), ("@latest", 20, 2), ("@20", 20, 2), ("@20-g1", 20, 1), ("@30-g1", 30, 1)],
)
def test_finding(cli: Cli, forked: str, suffix: str, step: int, generation: int) -> None:
    document = cli.json("inspect", forked + suffix)
    assert (document["step"], document["generation"]) == (step, generation)


def test_what_no_longer_counts_is_named_with_its_generation(cli: Cli, forked: str) -> None:
    result = cli("inspect", f"{forked}@30")
    assert result.code == 4
    assert "abandoned line (step 30 of generation 1)" in result.err
    assert cli("inspect", f"{forked}@30-g2").code == 4


def test_an_empty_root_has_no_newest(cli: Cli, tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        Catalogue(store).create_or_open()
    result = cli("inspect", str(tmp_path), "--json")
    assert (result.code, result.error["message"]) == (4, "no checkpoint counts here")


def test_a_checkpoint_that_is_read_is_not_deleted(root: str) -> None:
    with opened(root) as catalogue:
        with held(catalogue, CommitName(10, 1), "test") as commit:
            assert commit.step == 10
            assert [p.step for p in plan_gc(catalogue, 1).kept] == [10, 20]
        assert not leases(catalogue)
        assert [p.step for p in plan_gc(catalogue, 1).kept] == [20]


class ReadOnlyStore(LocalStore):
    """A folder that may be read only: root, who runs tests, ignores permissions."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        raise StoreError("writing failed: not permitted", kind="permission", where=key)


def test_a_root_that_nobody_may_write_to_can_be_read(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ReadOnlyStore(root) as store:
        with held(Catalogue(store), CommitName(10, 1), "test") as commit:
            assert commit.step == 10
        assert "not permitted" in capsys.readouterr().err
        with pytest.raises(NotFoundError), held(Catalogue(store), CommitName(11, 1), "test"):
            pass


def test_a_full_disk_can_be_read(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    class FullStore(LocalStore):
        def put(self, key: str, data: bytes, **_: Any) -> None:
            raise StoreError("no space left", kind="no-space", where=key)

    with FullStore(root) as store:
        with held(Catalogue(store), CommitName(10, 1), "test") as commit:
            assert commit.step == 10
        assert "no space left" in capsys.readouterr().err
