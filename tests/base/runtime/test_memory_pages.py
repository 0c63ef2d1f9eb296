"""Writes that the kernel counts, of pages that it may move."""

from __future__ import annotations

import fcntl
import mmap
import struct
from collections.abc import Iterable

import numpy as np
import pytest

from ckptd.base.runtime import memory as machine
from ckptd.base.runtime.memory import PAGE, Count, Pages


def test_a_page_that_loses_its_protection_as_it_is_moved_is_protected_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel moves pages when it likes: here its loss is made, the rest is the kernel's."""
    if (pages := Pages.of_this_process()) is None:
        pytest.skip("this kernel does not count writes")
    memory = mmap.mmap(-1, 16 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = np.frombuffer(memory, np.uint8).ctypes.data
    memory[:] = b"\1" * len(memory)
    inner = at, at + len(memory)
    pages.register(inner)
    lost = inner[0] + 3 * PAGE, inner[0] + 4 * PAGE
    protect, losses = pages._protect, [lost]

    def losing(ranges: Iterable[tuple[int, int]], others: Iterable[Count]) -> None:
        protect(ranges, others)
        for start, end in losses:
            asked = bytearray(struct.pack("=3Q", start, end - start, 0))
            fcntl.ioctl(pages._fault, machine._UFFDIO_WRITEPROTECT, asked)
        losses.clear()

    monkeypatch.setattr(pages, "_protect", losing)
    count = pages.count([inner])
    assert not losses
    assert count.written() == []
    memory[3 * PAGE + PAGE // 2 : 4 * PAGE + PAGE // 2] = b"\2" * PAGE
    assert any(start <= lost[0] < end for start, end in count.written())
    count.end()
