"""What the kernel and the disk do to `LocalStore`: errors, short writes, lost replies, no space."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import CkptdError, ConflictError, StoreError, TransientStoreError, UsageError
from ckptd.store.local import LocalOptions, LocalStore
from ckptd.store.osio import Os
from ckptd.testing.store import pattern
from tests.processes import PATIENCE_S
from tests.store.test_local import MIB, leftovers, write

# -- what the kernel says ------------------------------------------------------------------------


class FailingOs(Os):
    """Fails one kind of call with one errno, after doing it or instead."""

    def __init__(self, point: str, code: int, *, after: bool = False) -> None:
        self._point = point
        self._code = code
        self._after = after

    def __getattribute__(self, name: str) -> object:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name != self._point:
            return found

        def fail(*arguments: object) -> object:
            if self._after:
                found(*arguments)
            raise OSError(self._code, os.strerror(self._code))

        return fail


FAILURES = [
    (errno.ENOSPC, StoreError, "no-space"),
    (errno.EDQUOT, StoreError, "no-space"),
    (errno.EIO, StoreError, "store"),
    (errno.EACCES, StoreError, "permission"),
    (errno.EROFS, StoreError, "permission"),
    (errno.ESTALE, TransientStoreError, "store-transient"),
    (errno.ETIMEDOUT, TransientStoreError, "store-transient"),
]


@pytest.mark.parametrize(("code", "kind_of_error", "kind"), FAILURES)
@pytest.mark.parametrize("point", ["open", "pwrite", "fsync", "replace", "fsync_folder", "mkdir"])
def test_a_failing_put_is_told_and_leaves_nothing(
    tmp_path: Path, point: str, code: int, kind_of_error: type[CkptdError], kind: str
) -> None:
    store = LocalStore(tmp_path, system=FailingOs(point, code))
    with pytest.raises(kind_of_error) as caught:
        store.put("a/b", b"12345")
    assert caught.value.kind == kind
    assert caught.value.where is not None
    assert str(tmp_path / "a") in caught.value.where
    assert leftovers(tmp_path) == []
    if kind == "no-space":
        assert caught.value.wanted == "5 bytes"
        assert "bytes free" in str(caught.value.found)


@pytest.mark.parametrize(("code", "kind_of_error", "kind"), FAILURES)
@pytest.mark.parametrize("point", ["open", "fallocate", "pwrite", "fdatasync"])
def test_a_failing_writer_is_told_and_leaves_nothing(
    tmp_path: Path, point: str, code: int, kind_of_error: type[CkptdError], kind: str
) -> None:
    store = LocalStore(tmp_path, system=FailingOs(point, code))
    data = pattern(20 * MIB + 5)
    with pytest.raises(kind_of_error) as caught:
        write(store, "a/b", data)
    assert caught.value.kind == kind
    assert caught.value.where == str(tmp_path / "a" / "b")
    if kind == "no-space":
        assert caught.value.wanted == f"{len(data)} bytes"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_replacing_put_that_fails_keeps_the_old_object(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a/b", b"old")
    for point in ("open", "pwrite", "fsync", "replace"):
        with pytest.raises(StoreError):
            LocalStore(tmp_path, system=FailingOs(point, errno.EIO)).put("a/b", b"new")
    assert LocalStore(tmp_path).get("a/b") == b"old"


def test_a_lost_reply_to_link_is_our_own_success(tmp_path: Path) -> None:
    """NFS repeats a link whose reply was lost and then reports EEXIST for what it did itself."""
    for code in (errno.EEXIST, errno.EIO, errno.ETIMEDOUT):
        store = LocalStore(tmp_path, system=FailingOs("link", code, after=True))
        store.put(f"commits/{code}", b"mine", create_only=True)
        assert store.get(f"commits/{code}") == b"mine"
        with pytest.raises(ConflictError):
            LocalStore(tmp_path).put(f"commits/{code}", b"other", create_only=True)
    assert leftovers(tmp_path) == []


def test_a_link_that_fails_is_no_success(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, system=FailingOs("link", errno.EIO))
    with pytest.raises(StoreError):
        store.put("a", b"mine", create_only=True)
    assert not store.exists("a")
    assert leftovers(tmp_path) == []


def test_a_leftover_that_stays_does_not_fail_a_won_race(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, system=FailingOs("unlink", errno.EIO))
    store.put("a", b"mine", create_only=True)
    assert store.get("a") == b"mine"
    assert len(leftovers(tmp_path)) == 1
    assert [o.key for o in store.list()] == ["a"]


class StingyOs(Os):
    """Takes at most `most` bytes at a time, as a disk that fills up or a signal makes it."""

    def __init__(self, most: int) -> None:
        self._most = most

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        return super().pwrite(fd, data[: self._most], offset, path)


@pytest.mark.parametrize("most", [1000, 4096, 5000, 100_000])
@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_continued(tmp_path: Path, most: int, direct: bool) -> None:
    store = LocalStore(tmp_path, LocalOptions(direct=direct), system=StingyOs(most))
    data = pattern(1_000_003)
    store.put("put", data)
    write(store, "written", data)
    assert store.get("put") == data
    assert store.get("written") == data


class UnalignedRefusingOs(Os):
    """Knows no O_DIRECT after all, as some file systems only tell at the first write."""

    def __init__(self) -> None:
        self.refused = 0
        self._lock = threading.Lock()

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            with self._lock:
                self.refused += 1
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().pwrite(fd, data, offset, path)


def test_a_file_system_without_direct_writes(tmp_path: Path) -> None:
    system = UnalignedRefusingOs()
    store = LocalStore(tmp_path, system=system)
    data = pattern(20 * MIB + 7)
    write(store, "a", data)
    assert store.get("a") == data
    refused = system.refused
    assert refused > 0
    write(store, "b", data)
    assert store.get("b") == data
    assert system.refused == refused, "the device is asked only once"


def test_einval_that_is_not_about_alignment_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, system=FailingOs("pwrite", errno.EINVAL))
    with pytest.raises(StoreError):
        write(store, "a", pattern(MIB))


class HangingOs(Os):
    def __init__(self) -> None:
        self.go = threading.Event()

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        self.go.wait(PATIENCE_S)
        return super().pwrite(fd, data, offset, path)


def test_a_hung_disk_ends_in_an_error(tmp_path: Path) -> None:
    system = HangingOs()
    store = LocalStore(tmp_path, LocalOptions(stall_s=0.2), system=system)
    try:
        with pytest.raises(TransientStoreError) as caught:
            write(store, "a", pattern(MIB))
        assert caught.value.kind == "stalled"
    finally:
        system.go.set()
    store.close()


def test_a_closed_store_takes_no_more_blocks(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = store.writer("a", 32 * MIB)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        writer.write(memoryview(pattern(32 * MIB)))
    writer.abort()
    assert [*tmp_path.iterdir()] == []


# -- a disk that is really full ------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=64", "ckptd-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk(small_disk: Path, direct: bool) -> None:
    store = LocalStore(small_disk / "root", LocalOptions(direct=direct))
    write(store, "data/fits", pattern(4 * MIB))
    with pytest.raises(StoreError) as caught:
        write(store, "data/does-not", pattern(6 * MIB))
    error = caught.value
    assert (error.kind, error.wanted) == ("no-space", f"{6 * MIB} bytes")
    assert error.where == str(small_disk / "root" / "data" / "does-not")
    assert "ENOSPC" in str(error.found)
    assert not store.exists("data/does-not")
    assert store.get("data/fits") == pattern(4 * MIB)
    write(store, "data/fits-too", pattern(3 * MIB))  # what was begun has been given back


class NoPreallocationOs(Os):
    def fallocate(self, fd: int, size: int, path: str) -> None:
        pass


def test_a_disk_that_fills_up_while_it_is_written(small_disk: Path) -> None:
    store = LocalStore(small_disk, LocalOptions(block_bytes=MIB), system=NoPreallocationOs())
    with pytest.raises(StoreError) as caught:
        write(store, "a", pattern(12 * MIB))
    assert caught.value.kind == "no-space"
    assert [*small_disk.iterdir()] == []
    with pytest.raises(StoreError) as caught:
        store.put("b", pattern(12 * MIB))
    assert (caught.value.kind, caught.value.wanted) == ("no-space", f"{12 * MIB} bytes")
    assert [*small_disk.iterdir()] == []


def test_a_disk_without_free_inodes(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    with pytest.raises(StoreError) as caught:
        for i in range(100):
            store.put(f"many/{i}", b"")
    assert caught.value.kind == "no-space"
