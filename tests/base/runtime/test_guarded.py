"""Files that are touched where they are mapped, while somebody shortens them."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ckptd.base.runtime import guarded
from ckptd.base.runtime.guarded import GuardedMapping
from tests.processes import PATIENCE_S, until

SIZE = 3 * 4096 + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(np.arange(SIZE, dtype=np.uint16).astype(np.uint8).tobytes())
    return found


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    found = os.open(path, os.O_RDONLY)
    yield found
    os.close(found)


@pytest.fixture
def mapping(fd: int) -> GuardedMapping:
    found = GuardedMapping.of(fd, 16, SIZE - 16)
    if found is None:
        pytest.skip("this filesystem gives no leases")
    return found


def test_bytes_are_given_where_they_lie(mapping: GuardedMapping, path: Path) -> None:
    for _ in range(2):
        with mapping.touching(4000, 9000) as data:
            assert data is not None
            assert data[4000:9000].tobytes() == path.read_bytes()[4016:9016]


def resident(mapping: GuardedMapping) -> int:
    """Return the bytes of a mapping that count as memory of this process."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= mapping._address < int(bounds[2], 16)
        elif here and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def test_pages_are_memory_of_the_process_only_while_they_are_touched(
    mapping: GuardedMapping,
) -> None:
    """A load grew by the size of the checkpoint, and the kernel ends the largest process first."""
    with mapping.touching(0, SIZE - 16) as data:
        assert data is not None
        assert resident(mapping) >= SIZE - 16
    assert resident(mapping) == 0


def test_who_shortens_the_file_waits_and_later_ranges_are_read(
    mapping: GuardedMapping, path: Path
) -> None:
    """Without the lease the last line of the block would be the end of the process."""
    done = threading.Event()

    def shorten() -> None:
        os.truncate(path, 5)
        done.set()

    thread = threading.Thread(target=shorten, daemon=True)
    with mapping.touching(0, 100) as data:
        assert data is not None
        thread.start()
        until(lambda: not mapping._is_leased())
        assert not done.wait(0.3)
        with mapping.touching(0, 100) as more:
            assert more is None  # or it would wait for longer and longer
        assert data[-1] == (SIZE - 1) % 256
    assert done.wait(PATIENCE_S)
    with mapping.touching(0, 100) as data:
        assert data is None


def test_pages_that_came_too_slowly_are_read(
    mapping: GuardedMapping, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not wait for ever: a lease that somebody wants may be gone by then."""
    threads = []

    def slow(start: int, end: int) -> bool:
        threads.append(threading.Thread(target=os.truncate, args=(path, 5), daemon=True))
        threads[0].start()
        until(lambda: not mapping._is_leased())
        return True

    monkeypatch.setattr(mapping, "_populate", slow)
    with mapping.touching(0, 100) as data:
        assert data is None
    threads[0].join(PATIENCE_S)
    assert path.stat().st_size == 5


def test_what_is_open_for_writing_is_read(
    mapping: GuardedMapping, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with path.open("r+b"), mapping.touching(0, 100) as data:
        assert data is None
    with mapping.touching(0, 100) as data:
        assert data is None  # not asked for each range
    monkeypatch.setattr(guarded, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 2))
    with mapping.touching(0, 100) as data:
        assert data is not None


def test_what_is_too_short_or_not_of_a_disk_is_read(fd: int) -> None:
    assert GuardedMapping.of(fd, 16, SIZE) is None
    memory = os.memfd_create("memory")
    os.truncate(memory, SIZE)
    assert GuardedMapping.of(memory, 0, SIZE) is None
    os.close(memory)
    assert GuardedMapping.of(-1, 0, 10) is None
