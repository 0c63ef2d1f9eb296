"""What `LocalStore` promises beyond the contract: durability, hiding, modes, links, full disks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.errors import (
    CkptdError,
    NotFoundError,
    RefusedError,
    StoreError,
    UsageError,
)
from ckptd.store import open_store
from ckptd.store.local import LocalOptions, LocalStore
from ckptd.store.osio import Os, WatchedOs
from ckptd.testing.store import pattern
from ckptd.types import ByteRange
from tests.store.places import refuse_link

MIB = 1 << 20


def leftovers(root: Path) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names if name.startswith("~")]


def write(store: LocalStore, key: str, data: bytes | memoryview) -> None:
    with store.writer(key, len(data)) as writer:
        writer.write(memoryview(data))
        writer.commit()


# -- names ---------------------------------------------------------------------------------------


def test_relative_root_does_not_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("a", b"content")
    assert (tmp_path / "here" / "a").read_bytes() == b"content"
    assert store.describe().url == str(tmp_path / "here")


def test_home_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/x").url == str(tmp_path / "x")
    assert open_store(f"file://{tmp_path}/a%20b").url == str(tmp_path / "a%20b")
    with pytest.raises(UsageError, match="invalid local URL"):
        open_store("file://host/share")


def test_foreign_names_are_hidden(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/object", b"1")
    for name in ("~temporary.put", "with space", "ümlaut", "folder/~x", "folder/new\nline"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "bad folder").mkdir()
    (tmp_path / "bad folder" / "x").write_bytes(b"")
    (tmp_path / "only-leftovers").mkdir()
    (tmp_path / "only-leftovers" / "~x").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    assert [o.key for o in store.list()] == ["folder/object"]
    assert store.children() == ["folder/"]
    assert store.children("folder/") == ["object"]


def test_folders_and_fifos_are_no_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/object", b"1")
    os.mkfifo(tmp_path / "fifo")
    for key in ("folder", "fifo"):
        for call in (store.get, store.stat):
            with pytest.raises(NotFoundError):
                call(key)


def test_a_name_in_the_way_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", b"folder in the way"),
        lambda: store.put("a/b/c", b"object in the way"),
        lambda: store.writer("a/b/c", 1),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="in the way"):
            call()
    assert [o.key for o in store.list()] == ["a/b"]
    assert leftovers(tmp_path) == []


# -- links ---------------------------------------------------------------------------------------


@pytest.fixture
def escape(tmp_path: Path) -> Iterator[tuple[LocalStore, Path]]:
    """A store whose folder ``out`` and object ``leak`` are links to somewhere else."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "out").symlink_to(outside)
    (root / "leak").symlink_to(outside / "secret")
    with LocalStore(root) as store:
        yield store, outside


def test_links_out_of_the_root_are_refused(escape: tuple[LocalStore, Path]) -> None:
    store, outside = escape
    calls: list[Callable[[], object]] = [
        lambda: store.get("leak"),
        lambda: store.get("out/secret"),
        lambda: store.read_into("leak", 0, memoryview(bytearray(1))),
        lambda: store.stat("leak"),
        lambda: store.exists("out/secret"),
        lambda: store.local_path("leak"),
        lambda: store.open_file("leak"),
        lambda: store.put("out/new", b"x"),
        lambda: store.put("out/deep/new", b"x", create_only=True),
        lambda: store.writer("out/new", 1),
        lambda: store.delete(["out/secret"]),
        lambda: [*store.list("out/")],
        lambda: store.children("out/"),
        lambda: store.sweep("out/", older_than_s=0),
        lambda: store.sync("out/"),
    ]
    for call in calls:
        with pytest.raises(RefusedError) as caught:
            call()
        assert "a symbolic link leads out of the store" in caught.value.message
    assert [p.name for p in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_links_are_not_listed_and_replaced_by_a_put(escape: tuple[LocalStore, Path]) -> None:
    store, outside = escape
    assert [*store.list()] == []
    assert store.children() == []
    store.put("leak", b"mine")
    assert store.get("leak") == b"mine"
    write(store, "leak", b"also mine")
    store.delete(["leak"])
    assert (outside / "secret").read_bytes() == b"secret"


def test_links_inside_the_root_and_a_linked_root_work(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    store = LocalStore(tmp_path / "root")
    store.put("a/b", b"content")
    (tmp_path / "real" / "alias").symlink_to("a/b")
    assert store.get("alias") == b"content"
    assert [o.key for o in store.list()] == ["a/b"]


# -- permissions and groups ----------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "root")
        store.put("a/put", b"1")
        store.put("a/new", b"1", create_only=True)
        write(store, "a/written", b"1")
    finally:
        os.umask(before)
    for name in ("a/put", "a/new", "a/written"):
        assert stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) == 0o666 & ~umask
    for name in ("", "a"):
        assert stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) == 0o777 & ~umask


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another group needs root")
def test_setgid_and_group_of_the_root_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, -1, 12345)
    root.chmod(0o2775)
    store = LocalStore(root)
    store.put("a/b/c", b"1")
    write(store, "a/b/d", b"1")
    for name in ("a", "a/b", "a/b/c", "a/b/d"):
        assert (root / name).stat().st_gid == 12345
    for name in ("a", "a/b"):
        assert (root / name).stat().st_mode & stat.S_ISGID


# -- leftovers -----------------------------------------------------------------------------------


OLD, NEW = (f"~{digit * 24}.put" for digit in "01")


def test_an_object_that_the_system_gives_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the kernel gives 2 GiB at most, and a network file system what it has."""
    store, whole = LocalStore(tmp_path), pattern(100_000)
    store.put("a", whole)
    once = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: once(fd, count // 2, at))
    assert store.get("a") == whole
    assert store.get("a", ByteRange(7, 70_000)) == whole[7:70_000]


def test_sweep_takes_old_leftovers_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "a" / OLD).write_bytes(b"")
    (tmp_path / "a" / NEW).write_bytes(b"")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / OLD).write_bytes(b"")
    for path in tmp_path.rglob(OLD):
        os.utime(path, (1e9, 1e9))
    assert store.sweep(older_than_s=3600) == [f"a/{OLD}", f"gone/{OLD}"]
    assert leftovers(tmp_path) == [NEW]
    assert not (tmp_path / "gone").exists()
    assert store.get("a/b") == b"1"


def test_sweep_leaves_what_others_name_alike(tmp_path: Path) -> None:
    for name in ("~", "~$thesis.docx", f"{OLD}.txt", "~0.put"):
        (tmp_path / name).write_bytes(b"")
    assert LocalStore(tmp_path).sweep(older_than_s=0) == []
    assert len(leftovers(tmp_path)) == 4


def test_sweep_keeps_to_its_prefix(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / OLD).write_bytes(b"")
    assert store.sweep("a/", older_than_s=0) == [f"a/{OLD}"]
    assert leftovers(tmp_path) == [OLD]


def test_a_sweep_that_is_not_deep(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "theirs" / "empty").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "theirs"):
        (folder / OLD).write_bytes(b"")
    assert store.sweep(older_than_s=0, deep=False) == [OLD]
    assert (tmp_path / "theirs" / "empty").is_dir()
    assert leftovers(tmp_path) == [OLD]


# -- durability ----------------------------------------------------------------------------------


def steps(store: LocalStore) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    store.watch(lambda point, path: seen.append((point, path)))
    return seen


def test_order_of_a_create_only_put(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = LocalStore(root)
    seen = steps(store)
    store.put("commits/1", b"record", create_only=True)
    assert [point for point, _ in seen] == [
        *["os.mkdir", "os.fsync-folder"] * 2,  # the root in its parent, the folder in the root
        *["os.open", "os.pwrite", "os.fsync"],  # whole and durable before it has its name
        *["os.link", "os.unlink", "os.fsync-folder"],
    ]
    assert [path for point, path in seen if point == "os.fsync-folder"] == [
        str(tmp_path),
        str(root),
        str(root / "commits"),
    ]


def test_a_folder_of_another_writer_is_made_durable_too(tmp_path: Path) -> None:
    """It may have come to its mkdir and not yet to its fsync when we return from our put."""
    (tmp_path / "commits").mkdir()
    store = LocalStore(tmp_path)
    seen = steps(store)
    store.put("commits/1", b"")
    store.put("commits/2", b"")
    parents = [path for point, path in seen if point == "os.fsync-folder"]
    assert parents == [str(tmp_path), *[str(tmp_path / "commits")] * 2]


def test_order_of_a_writer_and_sync(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    seen = steps(store)
    write(store, "data/x/file", pattern(MIB))
    assert seen[-1][0] == "os.fdatasync"
    del seen[:]
    store.sync("data/")
    below = [str(tmp_path / "data"), str(tmp_path / "data" / "x")]
    assert [path for _, path in seen] == below  # the name of data is durable since it was made
    another = LocalStore(tmp_path)
    seen = steps(another)
    another.sync("data/")
    assert [path for _, path in seen] == [*below, str(tmp_path)]


def test_a_put_makes_the_names_beside_it_durable(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "data/file", pattern(MIB))
    seen = steps(store)
    store.put("data/manifest", b"{}")
    assert seen[-1] == ("os.fsync-folder", str(tmp_path / "data"))


def test_a_delete_is_durable_on_return(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/c", b"")
    store.put("a/x", b"")
    seen = steps(store)
    store.delete(["a/b/c"])
    assert [point for point, _ in seen[-2:]] != []
    assert seen[-1] == ("os.fsync-folder", str(tmp_path / "a"))


@pytest.mark.parametrize("device", [8, 0])
def test_what_is_fleeting_is_flushed_only_off_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    """A file server, device 0 here, may lose power while the process at work lives on."""
    monkeypatch.setattr(os, "major", lambda number: device)
    store = LocalStore(tmp_path)
    store.fleeting("leases/")
    seen = steps(store)
    store.put("leases/1", b"x")
    assert store.get("leases/1") == b"x"
    store.delete(["leases/1"])
    assert not (tmp_path / "leases").exists()
    assert bool([point for point, _ in seen if "sync" in point]) is (device == 0)
    for key in ("leases2/1", "leases/below/1", "1"):  # nothing else is
        del seen[:]
        store.put(key, b"x")
        assert [path for point, path in seen if point == "os.fsync-folder"][-1] == str(
            (tmp_path / key).parent
        )
        assert "os.fsync" in [point for point, _ in seen]


def test_a_file_system_without_folder_fsync_is_let_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not for folders")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = LocalStore(tmp_path)
    store.put("a/b", b"1", create_only=True)
    assert store.get("a/b") == b"1"


# -- direct and buffered I/O give the same bytes -------------------------------------------------


def aligned(data: bytes, shift: int) -> memoryview:
    """Copy `data` to an address `shift` bytes past a page boundary."""
    area = mmap.mmap(-1, len(data) + shift + 1)
    area[shift : shift + len(data)] = data
    return memoryview(area)[shift : shift + len(data)]


@pytest.mark.parametrize("shift", [0, 1, 8, 4095])
@pytest.mark.parametrize("head", [0, 1, 4096, 70_000])
@pytest.mark.parametrize("tail", [0, 1, 4095, 4097])
def test_every_alignment_of_memory_and_file(
    tmp_path: Path, shift: int, head: int, tail: int
) -> None:
    data = pattern(head + 3 * MIB + tail)
    store = LocalStore(tmp_path, LocalOptions(block_bytes=MIB, threads=3))
    with store.writer("a", len(data)) as writer:
        writer.write(memoryview(data)[:head])
        writer.write(aligned(data[head : head + 3 * MIB], shift))
        writer.write(memoryview(data)[head + 3 * MIB :])
        writer.commit()
    assert (tmp_path / "a").read_bytes() == data


def test_writers_that_share_memory_keep_their_bytes(tmp_path: Path) -> None:
    """What is gathered lies in blocks that writers hand on, also those that give up."""
    data = [pattern(5 * MIB + n) for n in range(6)]
    store = LocalStore(tmp_path, LocalOptions(block_bytes=MIB, threads=2))
    for given_up in (True, False):
        writers = [store.writer(f"{n}", len(d)) for n, d in enumerate(data)]
        for at in range(0, 6 * MIB, 300_001):
            for writer, whole in zip(writers, data, strict=True):
                writer.write(memoryview(whole)[at : at + 300_001])
        for writer in writers:
            if given_up:
                writer.abort()
            else:
                writer.commit()
    assert [(tmp_path / f"{n}").read_bytes() for n in range(6)] == data


def test_a_closed_store_keeps_no_memory_of_writers(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    data = pattern(MIB)
    store = LocalStore(tmp_path, LocalOptions(block_bytes=16 * MIB, threads=1))
    with store.writer("a", 64 * MIB) as writer:
        for _ in range(64):
            writer.write(data[:1])
            writer.write(memoryview(data)[1:])  # at no page: it is gathered
        writer.commit()
    before = resident()
    store.close()
    assert resident() < before - 12 * MIB


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("direct_reads", [True, False])
def test_every_alignment_of_a_read(tmp_path: Path, cached: bool, direct_reads: bool) -> None:
    data = pattern(5 * MIB + 1234)
    store = LocalStore(tmp_path, LocalOptions(direct_reads=direct_reads))
    store.put("a", data)
    ranges = [(0, len(data)), (4096, 2 * MIB), (4097, 2 * MIB), (4 * MIB, MIB + 1234), (0, 1)]
    for start, count in ranges:
        for shift in (0, 1):
            if not cached:
                with (tmp_path / "a").open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            view = aligned(bytes(count), shift)
            store.read_into("a", start, view)
            assert view == data[start : start + count]


@pytest.mark.parametrize("where", ["flag", "read"])
@pytest.mark.parametrize("start", [0, 5])
def test_reads_where_nothing_may_pass_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, start: int
) -> None:
    """Some file systems refuse O_DIRECT when it is set, others when a read comes."""
    data = pattern(3 * MIB)
    store = LocalStore(tmp_path)
    store.put("a", data)
    set_flags, read = fcntl.fcntl, os.preadv
    refused: list[str] = []

    def fcntl_(fd: int, command: int, flags: int = 0) -> int:
        if where == "flag" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(where)
            raise OSError(errno.EINVAL, "refused")
        return set_flags(fd, command, flags)

    def preadv(fd: int, views: list[memoryview], at: int, how: int = 0) -> int:
        if how:
            raise OSError(errno.EAGAIN, "not in the page cache")
        if where == "read" and set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(where)
            raise OSError(errno.EINVAL, "refused")
        return read(fd, views, at)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "preadv", preadv)
    view = aligned(bytes(2 * MIB), 0)
    store.read_into("a", start, view)
    assert view == data[start : start + 2 * MIB]
    assert refused == [where]


def test_writing_on_a_kernel_without_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(mmap, "mmap", Plain)
    store = LocalStore(tmp_path)
    write(store, "a", b"1" * (MIB + 1))
    assert store.get("a") == b"1" * (MIB + 1)


def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("a", pattern(100_000))
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        found = real(fd)
        os.truncate(tmp_path / "a", 50_000)
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(CkptdError) as caught:
        store.get("a")
    assert caught.value.kind == "truncated"


def test_a_mapped_object_survives_its_replacement(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "a", b"old" * 10_000)
    path = store.local_path("a")
    assert path is not None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        write(store, "a", b"new")
        assert mapped[:3] == b"old"
        assert mapped[-3:] == b"old"


# -- the seam itself -----------------------------------------------------------------------------


def test_every_system_call_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign that misses a step proves less than it says."""
    seen: list[str] = []
    store = LocalStore(tmp_path / "root")
    store.watch(lambda point, path: seen.append(point))
    store.put("a/b", b"1")
    store.put("a/c", b"1", create_only=True)
    write(store, "a/d", pattern(MIB + 1))
    store.sync("a/")
    store.delete(["a/b", "a/c", "a/d"])
    monkeypatch.setattr(os, "link", refuse_link)
    monkeypatch.setattr(os, "major", lambda device: 8)  # a disk, wherever the test runs
    store.put("a/e", b"1", create_only=True)
    calls = {n.replace("_", "-") for n, v in vars(Os).items() if callable(v) and n[0] != "_"}
    assert {p.removeprefix("os.") for p in seen} == calls
    assert {n for n in vars(Os) if n[0] != "_"} == {n for n in vars(WatchedOs) if n[0] != "_"}
