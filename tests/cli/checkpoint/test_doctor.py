"""``ckptd doctor``: what it finds in good, lying and crippled stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.runtime.host import environment, mount_of, versions
from ckptd.checkpoint.tools.doctor import probe
from ckptd.elastic.nccl import SETTINGS
from ckptd.errors import StoreError, TransientStoreError
from ckptd.store import StoreSpec, register_store
from ckptd.store.base import Names
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.probe import SCRATCH, StoreCheck
from tests.cli.roots import rank_file
from tests.cli.running import Cli


def found(document: Any) -> dict[str, str]:
    return {c["name"]: c["status"] for c in document["checks"]}


def test_a_good_root(cli: Cli, root: str) -> None:
    before = sorted(p for p in Path(root).rglob("*"))
    document = cli.json("doctor", root)
    statuses = found(document)
    for name in ("root", "write", "create-only", "listing", "ranges"):
        assert statuses[name] == "ok", document
    assert {"durability", "space", "latency", "speed"} <= set(statuses)
    assert document["healthy"]
    assert "newest step 20 of generation 1" in document["checks"][0]["message"]
    assert sorted(p for p in Path(root).rglob("*")) == before, "nothing is left over"
    out = cli.good("doctor", root, "--quick").out
    assert out.rstrip().endswith("no problems found")
    assert "speed" not in out


def test_a_root_that_is_not_there_yet(cli: Cli, tmp_path: Path) -> None:
    document = cli.json("doctor", str(tmp_path / "new" / "root"), "--quick")
    assert found(document)["root"] == "info"
    assert document["healthy"]
    assert not (tmp_path / "new" / "root").exists()


def test_read_only_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    document = cli.json("doctor", str(tmp_path / "x"), "--read-only")
    assert set(found(document)) <= {"root", "durability", "space", "files"}
    assert list(tmp_path.iterdir()) == []


def test_without_a_root(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hush@localhost:1")
    document = cli.json("doctor")
    assert (document["root"], document["checks"]) == (None, [])
    assert document["versions"]["numpy"]
    assert document["environment"]["AWS_SECRET_ACCESS_KEY"] == "***"
    assert document["environment"]["AWS_ENDPOINT_URL"] == "http://***@localhost:1"
    assert "hush" not in cli.good("doctor").out


@pytest.mark.parametrize(
    ("version", "environ", "wanted"),
    [
        (None, {"NCCL_NVLS_ENABLE": "1"}, [("info", "no NCCL")]),
        ((2, 29, 3), {}, [("ok", "NCCL 2.29.3; a session sets TORCH_NCCL_ASYNC_ERROR_HANDLING=0")]),
        (
            (2, 25, 1),
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"},
            [
                ("warn", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1: PyTorch's watchdog ends the process"),
                ("warn", "NCCL 2.25.1 may hang when its communicators are aborted; 2.26.2 and"),
            ],
        ),
    ],
)
def test_what_recovery_in_process_wants_of_nccl(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...] | None,
    environ: dict[str, str],
    wanted: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr("ckptd.elastic.nccl.installed_version", lambda: version)
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    rows = cli.json("doctor")["recovery"]
    assert [row["status"] for row in rows] == [status for status, _ in wanted]
    for row, (status, text) in zip(rows, wanted, strict=True):
        assert row["message"].startswith(text)
        assert (status != "warn") or "; run: " in row["message"]


def test_a_root_that_lost_a_file(cli: Cli, root: str) -> None:
    rank_file(root, 20, 1).unlink()
    result = cli("doctor", root, "--quick", "--json")
    assert result.code == 1
    assert found(result.document)["root"] == "fail"
    assert not result.document["healthy"]


def test_a_damaged_marker(cli: Cli, root: str) -> None:
    Path(root, "ckptd.json").write_text("?")
    assert found(cli.json("doctor", root, "--quick", code=1))["root"] == "fail"


def test_a_store_that_cannot_decide_is_refused(cli: Cli) -> None:
    result = cli("doctor", "fsspec+memory://doctor", "--quick", "--json")
    assert (result.code, result.error["kind"]) == (5, "no-create-only")
    assert "neither link(2) nor create-only puts" in result.error["found"]
    assert found(result.document)["create-only"] == "fail"


# -- stores that are not what they say -------------------------------------------------------------


class LyingStore(MemoryStore):
    """Says that it decides races, and lets everybody win."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        super().put(key, data)


class LinklessStore(LocalStore):
    """A file system without hard links."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        if create_only:
            raise StoreError("writing failed: not permitted", kind="permission", where=key)
        super().put(key, data)


class ShakyStore(MemoryStore):
    """Fails in the middle of a race for a reason that says nothing about races."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        if create_only:
            raise TransientStoreError("reset", found="ECONNRESET")
        super().put(key, data)


class LaggingStore(MemoryStore):
    """Lists what was there before the last put."""

    def children(self, prefix: str = "") -> Names:
        names = super().children(prefix)
        return names[:-1] if "list/" in prefix else names


class ForgetfulStore(MemoryStore):
    """Returns the first version of what was replaced."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        if not self.exists(key):
            super().put(key, data, create_only=create_only)


class DeniedStore(MemoryStore):
    """May be read only."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        raise StoreError("writing failed: not permitted", kind="permission", where=key)


def opened_as(kind: Any, url: str) -> list[StoreCheck]:
    scheme = kind.__name__.lower()
    register_store(scheme, lambda u, _: kind(u.partition("://")[2]), replace=True)
    return list(probe(StoreSpec(f"{scheme}://{url}"), speed=False))


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (LyingStore, "create-only", "8 of 8 writers got the answer"),
        (LinklessStore, "create-only", "not permitted"),
        (ShakyStore, "write", "the race broke off: reset"),
        (LaggingStore, "listing", "a store with consistent_list must not lag"),
        (ForgetfulStore, "write", "a get returns other bytes"),
        (DeniedStore, "write", "not permitted"),
    ],
)
def test_what_is_found(tmp_path: Path, kind: Any, name: str, words: str) -> None:
    failed = [c for c in opened_as(kind, str(tmp_path / "x")) if c.status == "fail"]
    assert [c.name for c in failed] == [name]
    assert words in failed[0].message
    left = kind(str(tmp_path / "x")).list()
    assert [o.key for o in left if o.key.startswith(SCRATCH)] == []


def test_a_lying_store_is_refused_by_the_verb(cli: Cli, tmp_path: Path) -> None:
    opened_as(LyingStore, "unused")
    result = cli("doctor", f"lyingstore://{tmp_path}", "--quick")
    assert result.code == 5
    assert "8 of 8 writers" in result.err


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that announces a store and does not load."""
    info = tmp_path / "broken_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckptd.stores]\nbroken = no_such_module:open\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("broken_plugin")
def test_a_broken_plugin_is_named(cli: Cli) -> None:
    document = cli.json("doctor", code=1)
    (plugin,) = document["plugins"]
    assert plugin["scheme"] == "broken"
    assert plugin["origin"].startswith("broken-store 1.0")
    assert "no_such_module" in plugin["message"]
    assert "fail  plugin       broken://" in cli("doctor").out


# -- the machine -----------------------------------------------------------------------------------


def test_mounts(tmp_path: Path) -> None:
    assert mount_of("/proc/self").kind == "proc"  # type: ignore[union-attr]
    mount = mount_of(tmp_path / "not" / "there")
    assert mount is not None
    assert os.path.ismount(mount.point)
    if Path("/dev/shm").is_dir():
        assert mount_of("/dev/shm/x").kind in ("tmpfs", "overlay")  # type: ignore[union-attr]


def test_versions_and_environment() -> None:
    assert versions()["ckptd"]
    assert "cores" in environment()
