"""Memory that one read after another receives into."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest

from ckptd.base.runtime.spare import SpareMemory
from ckptd.errors import StoreError

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the mark of MADV_FREE is Linux's")


def lazily_free(mapping: mmap.mmap) -> int:
    """Return the bytes of a mapping that the kernel may take."""
    import ctypes

    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= start < int(bounds[2], 16)
        elif here and line.startswith("LazyFree:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@linux
def test_what_is_kept_the_kernel_may_take() -> None:
    spare = SpareMemory()
    mapping, memory = spare.take(5 * MIB)
    memory[:] = 7
    beside = lazily_free(mapping)  # the kernel joins mappings of one kind that lie side by side
    spare.give_back(mapping, 5 * MIB)
    assert lazily_free(mapping) >= beside + 5 * MIB
    again, memory = spare.take(5 * MIB)
    assert again is mapping
    memory[:] = 9
    assert lazily_free(mapping) <= beside, "what is written to is not taken"
    assert memory.min() == memory.max() == 9


@linux
@pytest.mark.parametrize(("wanted", "same"), [(1, True), (6 * MIB, True), (6 * MIB + 1, False)])
def test_it_fits_or_goes(wanted: int, same: bool) -> None:
    spare = SpareMemory()
    mapping, _ = spare.take(5 * MIB)  # of three huge pages
    spare.give_back(mapping, 5 * MIB)
    found, memory = spare.take(wanted)
    assert len(memory) == wanted
    assert (found is mapping) is same
    other, _ = spare.take(1)
    assert other is not mapping, "one that is in use, or was too small, is not given"


def test_without_the_mark_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_FREE", raising=False)
    spare = SpareMemory()
    mapping, _ = spare.take(MIB)
    spare.give_back(mapping, MIB)
    assert spare.take(MIB)[0] is not mapping


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(StoreError, match="read buffer") as caught:
        SpareMemory().take(1 << 60)
    assert caught.value.kind == "no-space"
