"""Files behind descriptors: shifted, packed, replaced, missing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.load.files import LocalFiles
from ckptd.errors import CorruptError, StoreError
from ckptd.store.base import FaultSpec, OpenFile, Store, Wrapper
from ckptd.store.memory import MemoryStore, forget_memory

KEY = "data/000000000001-g00000001-0001/r00000.safetensors"
HEADER, BODY = b"h" * 16, bytes(range(100))
ENTRY = FileEntry(KEY, 0, len(HEADER), len(BODY))


class Segments(Wrapper):
    """Objects lie somewhere in memory files, as snapshots in an arena do."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultSpec())
        self.shift = 4096
        self.fd = self.segment()
        self.opens = 0

    def segment(self) -> int:
        fd = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
        os.pwrite(fd, HEADER + BODY, self.shift)
        return fd

    def open_file(self, key: str) -> OpenFile | None:
        self.inner.stat(key)
        self.opens += 1
        return None if self.fd < 0 else OpenFile(os.dup(self.fd), self.shift)


@pytest.fixture
def store() -> Iterator[Segments]:
    memory = MemoryStore("localfiles")
    memory.put(KEY, HEADER + BODY)
    segments = Segments(memory)
    yield segments
    if segments.fd >= 0:
        os.close(segments.fd)
    forget_memory("localfiles")


def taken(files: LocalFiles, start: int = 0, length: int = len(BODY)) -> bytes:
    view = memoryview(bytearray(length))
    files.read(0, start, view)
    return bytes(view)


def test_a_memory_file_with_a_shift(store: Segments) -> None:
    told: list[tuple[str, int]] = []
    with LocalFiles(store, [ENTRY], lambda key, n: told.append((key, n))) as files:
        assert taken(files) == BODY
        assert taken(files, 90, 10) == BODY[90:]
        assert files.identity([0])
        with pytest.raises(CorruptError) as caught:
            taken(files, 95, 10)
    assert (caught.value.kind, caught.value.key) == ("truncated", KEY)
    assert caught.value.found == f"{len(HEADER) + len(BODY)} bytes"
    assert told == [(KEY, 100), (KEY, 10)]
    assert store.opens == 1


def test_memory_that_cannot_be_shortened_is_not_copied(store: Segments) -> None:
    with LocalFiles(store, [ENTRY]) as files:
        assert files.memory(0) is None
        with files.touching(0, 0, 10) as found:
            assert found is None
    fcntl.fcntl(store.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    counted: list[tuple[str, int]] = []
    with LocalFiles(store, [ENTRY], lambda key, n: counted.append((key, n))) as files:
        found = files.memory(0)
        assert found is not None
        with files.touching(0, 90, 100, count=True) as part:
            assert part is not None
        os.pwrite(store.fd, b"now", store.shift + len(HEADER))
        assert found.tobytes() == b"now" + BODY[3:]
        assert counted == [(KEY, 10)]
    assert part[90:].tobytes() == BODY[90:]  # its mapping lives as long as it does


def test_what_lies_in_memory_need_not_be_read_ahead(store: Segments) -> None:
    """Neither memory files nor those of tmpfs say that they are in the page cache."""
    with LocalFiles(store, [ENTRY]) as files:
        assert files.is_cached(0, 0, len(BODY))


def test_memory_that_is_too_short_is_not_touched(store: Segments) -> None:
    fcntl.fcntl(store.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    long = FileEntry(KEY, 0, len(HEADER), len(BODY) + 4096)
    with LocalFiles(store, [long]) as files:
        assert files.memory(0) is None
        with pytest.raises(CorruptError) as caught:
            taken(files, 0, long.data_bytes)
    assert caught.value.kind == "truncated"


def test_what_has_no_descriptor_is_read_through_the_store(store: Segments) -> None:
    os.close(store.fd)
    store.fd = -1
    with LocalFiles(store, [ENTRY]) as files:
        assert files.identity([0]) == b""
        assert taken(files, 5, 20) == BODY[5:25]


def test_ranks_agree_when_they_open_the_same_bytes(store: Segments) -> None:
    def identity() -> bytes:
        with LocalFiles(store, [ENTRY]) as files:
            return files.identity([0])

    first = identity()
    assert first == identity()
    store.shift = 0
    assert first != identity()
    store.shift = 4096
    old, store.fd = store.fd, store.segment()
    assert first != identity()
    os.close(old)
    store.inner.delete([KEY])
    assert identity() not in (b"", first)  # missing: a read will say so


def test_a_file_stays_the_one_that_was_verified(store: Segments) -> None:
    """Closed while idle, and then another one of the same name: its bytes were never looked at."""
    with LocalFiles(store, [ENTRY]) as files:
        assert taken(files) == BODY
        with files._lock:
            files._close_idle(0)
        assert taken(files) == BODY
        assert store.opens == 2
        with files._lock:
            files._close_idle(0)
        old, store.fd = store.fd, store.segment()
        os.close(old)
        with pytest.raises(CorruptError) as caught:
            taken(files)
    assert ("is missing" in caught.value.message, caught.value.key) == (True, KEY)


def test_errors_name_the_file(store: Segments, tmp_path: Path) -> None:
    writing = os.open(tmp_path / "only-for-writing", os.O_WRONLY | os.O_CREAT)
    os.close(store.fd)
    store.fd = writing
    with LocalFiles(store, [ENTRY]) as files:
        with pytest.raises(StoreError) as caught:
            taken(files)
        assert caught.value.key == KEY
        store.inner.delete([KEY])
    with LocalFiles(store, [ENTRY]) as files, pytest.raises(CorruptError) as missing:
        taken(files)
    assert ("is missing" in missing.value.message, missing.value.key) == (True, KEY)
