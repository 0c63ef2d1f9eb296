"""`LocalStore` where there are no hard links: another way to one winner, or a refusal by name."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import ConflictError, RefusedError, StoreError
from ckptd.store import FaultSpec, StoreSpec
from ckptd.store.local import LocalStore
from ckptd.testing.racing import race_processes
from ckptd.testing.store import StoreContract
from tests.cli.running import Cli
from tests.servers import s3_url
from tests.store.places import (
    image_mounted,
    mounted,
    refuse_link,
    skip_without_disk,
    without_links,
)
from tests.store.test_local import leftovers
from tests.store.test_local_faults import FailingOs

CODES = ["ENOSYS", "EPERM", "EOPNOTSUPP", "EMLINK", "EINVAL"]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on no disk of this host: what the network and FUSE look like to the store."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class TestWithoutLinks(StoreContract):
    """The whole contract, in processes that have no hard links, on a disk of this host."""

    @pytest.fixture
    def spec(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreSpec:
        skip_without_disk(tmp_path)
        monkeypatch.setattr(os, "link", refuse_link)
        monkeypatch.setenv("PYTHONPATH", without_links(tmp_path / "site")["PYTHONPATH"])
        return StoreSpec(str(tmp_path / "root"))


@pytest.mark.forks  # what their interpreters import at their start is the subject
def test_processes_with_links_and_without_have_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_disk(tmp_path)
    site = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", without_links(site, most=2)["PYTHONPATH"])
    log = tmp_path / "log"
    spec = StoreSpec(str(tmp_path / "root")).wrapped(FaultSpec(inner=True, log=str(log)))
    keys = [f"a/{i}" for i in range(10)]
    results = race_processes(spec, keys, 4, 2)
    with LocalStore(tmp_path / "root") as store:
        for key, winners in zip(keys, results, strict=True):
            assert [store.get(key).decode()] == winners
    assert leftovers(tmp_path / "root") == []
    steps = [json.loads(line)["op"] for line in log.read_text().splitlines()]
    assert 0 < steps.count("os.rename-new") < steps.count("os.link")


@pytest.mark.parametrize("code", CODES)
def test_a_disk_without_links_has_one_winner(tmp_path: Path, code: str) -> None:
    skip_without_disk(tmp_path)
    store = LocalStore(tmp_path, system=FailingOs("link", getattr(errno, code)))
    store.put("commits/1", b"mine", create_only=True)
    with pytest.raises(ConflictError):
        store.put("commits/1", b"other", create_only=True)
    with pytest.raises(ConflictError):
        LocalStore(tmp_path).put("commits/1", b"other", create_only=True)
    assert store.get("commits/1") == b"mine"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("code", CODES)
def test_no_links_and_no_disk_is_refused(memory: Path, code: str) -> None:
    store = LocalStore(memory, system=FailingOs("link", getattr(errno, code)))
    with pytest.raises(RefusedError) as caught:
        store.put("commits/1", b"mine", create_only=True)
    assert caught.value.kind == "no-create-only"
    assert "no hard links" in caught.value.message
    assert caught.value.where == str(memory / "commits" / "1")
    assert "tmpfs" in str(caught.value.found)
    assert "s3://, gs://, az://" in str(caught.value.hint)
    assert not store.exists("commits/1")
    assert leftovers(memory) == []
    store.put("plain", b"needs no link")


class Neither(FailingOs):
    """Has neither links nor RENAME_NOREPLACE."""

    def link(self, path: str, target: str) -> None:
        refuse_link(path, target)


@pytest.mark.parametrize(
    ("code", "error"), [("EINVAL", RefusedError), ("ENOSYS", RefusedError), ("EIO", StoreError)]
)
def test_a_disk_without_either_is_refused(
    tmp_path: Path, code: str, error: type[StoreError | RefusedError]
) -> None:
    skip_without_disk(tmp_path)
    store = LocalStore(tmp_path, system=Neither("rename_new", getattr(errno, code)))
    with pytest.raises(error):
        store.put("a", b"mine", create_only=True)
    assert [*tmp_path.iterdir()] == []


def test_the_doctor_says_that_there_are_no_links(
    cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    result = cli("doctor", str(memory / "root"), "--quick", "--json")
    assert (result.code, result.error["kind"]) == (5, "no-create-only")
    assert "no hard links" in result.error["found"]
    assert "s3:// with If-None-Match, gs://, az://" in result.error["hint"]


# -- real mounts ---------------------------------------------------------------------------------


def refused(root: Path, found: str) -> None:
    """Check that `root` is refused by name, and that nothing stays."""
    store = LocalStore(root)
    with pytest.raises(RefusedError) as caught:
        store.put("commits/1", b"mine", create_only=True)
    assert caught.value.kind == "no-create-only"
    assert found in str(caught.value.found)
    assert not store.exists("commits/1")
    assert leftovers(root) == []


def test_a_disk_of_fat_has_one_winner(tmp_path: Path) -> None:
    with image_mounted("vfat", tmp_path, "vfat") as point:
        store = LocalStore(point / "root")
        store.put("commits/1", b"mine", create_only=True)
        with pytest.raises(ConflictError):
            store.put("commits/1", b"other", create_only=True)
        assert store.get("commits/1") == b"mine"
        assert leftovers(point) == []


def test_exfat_works_with_the_kernels_driver_and_is_refused_with_another(tmp_path: Path) -> None:
    in_kernel = "exfat" in Path("/proc/filesystems").read_text()
    with image_mounted("exfat", tmp_path, "exfat" if in_kernel else "exfat-fuse") as point:
        if not in_kernel:
            refused(point / "root", "EPERM: Operation not permitted; fuseblk")
            return
        store = LocalStore(point / "root")
        store.put("commits/1", b"mine", create_only=True)
        with pytest.raises(ConflictError):
            store.put("commits/1", b"other", create_only=True)


def test_a_mount_of_rclone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "behind").mkdir()
    point = tmp_path / "mount"
    command = ["rclone", "mount", "--daemon", "--vfs-cache-mode", "writes"]
    with mounted(point, [*command, f":local:{tmp_path / 'behind'}", str(point)]):
        refused(point / "root", "fuse.rclone")


@pytest.mark.s3
def test_a_mount_of_s3fs_is_refused(tmp_path: Path, s3_moto: dict[str, Any]) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{s3_moto['key']}:{s3_moto['secret']}")
    secret.chmod(0o600)
    point = tmp_path / "mount"
    options = f"passwd_file={secret},url={s3_moto['endpoint_url']},use_path_request_style"
    bucket = s3_url().split("/")[2]
    with mounted(point, ["s3fs", bucket, str(point), "-o", options]):
        refused(point / "root", "ENOTSUP: Operation not supported; fuse.s3fs")
