"""Reading ahead is a hint: it fills the page cache, and what it cannot read is not its business."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.load import files as readahead
from ckptd.checkpoint.load.files import LocalFiles, read_ahead
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from tests.processes import PATIENCE_S

KEY = "data/000000000001-g00000001-0001/r00000.safetensors"
BYTES = 10 << 20


def entry(path: str = KEY) -> FileEntry:
    return FileEntry(path, 0, data_start=4096, data_bytes=BYTES)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    file = tmp_path / KEY
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(4096) + np.arange(BYTES, dtype=np.uint8).tobytes())
    return LocalStore(tmp_path)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no page count as in the page cache, even one just written."""
    monkeypatch.setattr(readahead, "is_cached", lambda fd, *at: False)


def alive() -> bool:
    return any(t.name == "ckptd-read-ahead" for t in threading.enumerate())


@pytest.mark.usefixtures("cold")
def test_reads_every_byte_of_every_file_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    done = threading.Event()
    read = LocalFiles.read

    def watched(self: LocalFiles, file: int, start: int, view: memoryview) -> None:
        read(self, file, start, view)
        seen.append((file, start, len(view)))
        if start + len(view) == BYTES and file == 1:
            done.set()

    monkeypatch.setattr(LocalFiles, "read", watched)
    with read_ahead(store, [entry(), entry()]):
        assert done.wait(PATIENCE_S)
    for file in (0, 1):
        mine = [(start, n) for f, start, n in seen if f == file]
        assert [s for s, _ in mine] == list(range(0, BYTES, 4 << 20))
        assert sum(n for _, n in mine) == BYTES
    assert not alive()


@pytest.mark.usefixtures("cold")
def test_ends_with_the_block(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        time.sleep(0.01)

    monkeypatch.setattr(LocalFiles, "read", slow)
    many = [entry()] * 100_000
    with read_ahead(store, many):
        assert begun.wait(PATIENCE_S)
    assert not alive()


def test_what_is_in_the_page_cache_is_not_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalFiles(store, [entry()]) as files:
        if not files.is_cached(0, 0, BYTES):
            pytest.skip("this file system does not say what is in the page cache")
        seen: list[int] = []
        monkeypatch.setattr(LocalFiles, "read", lambda s, f, at, v: seen.append(at))
        asked: list[int] = []
        known = readahead.is_cached
        monkeypatch.setattr(
            readahead, "is_cached", lambda fd, *at: asked.extend(at) or known(fd, *at)
        )
        with read_ahead(store, [entry()]):
            deadline = time.monotonic() + 20
            while alive() and time.monotonic() < deadline:
                time.sleep(0.005)
        assert asked[-1] == 4096 + BYTES - 1
        assert seen == []
        with files.use(0) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if files.is_cached(0, 0, BYTES):
            pytest.skip("this file system keeps what it has")
    with read_ahead(store, [entry()]):
        deadline = time.monotonic() + 20
        while alive() and time.monotonic() < deadline:
            time.sleep(0.005)
    assert 0 in seen


@pytest.mark.parametrize("path", ["data/000000000001-g00000001-0001/r00009.safetensors"])
def test_a_missing_file_is_left_to_the_reads_that_follow(store: LocalStore, path: str) -> None:
    with read_ahead(store, [entry(path)]):
        pass
    assert not alive()


def test_a_short_file_is_left_to_the_reads_that_follow(store: LocalStore) -> None:
    short = FileEntry(KEY, 0, data_start=4096, data_bytes=BYTES * 4)
    with read_ahead(store, [short]):
        time.sleep(0.05)
    assert not alive()


@pytest.mark.usefixtures("cold")
def test_stops_at_half_of_the_memory(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(readahead, "available_bytes", lambda: 16 << 20)
    monkeypatch.setattr(LocalFiles, "read", lambda s, f, at, v: seen.append(len(v)))
    with read_ahead(store, [entry()] * 10):
        deadline = time.monotonic() + 20
        while alive() and time.monotonic() < deadline:
            time.sleep(0.005)
    assert 0 < sum(seen) <= 8 << 20


def test_other_stores_and_no_files_start_nothing(store: LocalStore) -> None:
    with read_ahead(MemoryStore("ahead"), [entry()]):
        assert not alive()
    with read_ahead(store, []):
        assert not alive()
