"""`SpareMemory`: memory of one read, kept for the next; huge pages."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import StoreError

_HUGE_BYTES = 2 << 20
"""Mappings are a multiple of this, so that huge pages are behind all of one."""


class SpareMemory:
    """Gives memory for a read, and keeps that of the last one.

    Fresh pages cost more than to receive into them: the kernel fills each with zeros first, and on
    a virtual machine the host may have to find it. What is kept is marked as free to be taken
    (MADV_FREE): the kernel takes it, page by page, when anything else wants memory, and counts it
    as available. Where a system has no such mark nothing is kept.

    Without a lock, so that a process that was forked meanwhile finds no locked one: each step is
    one operation on a list.
    """

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def take(self, size: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
        """Return a mapping for `give_back`, and `size` bytes of it, which hold anything.

        Raises
        ------
        StoreError
            kind ``no-space``: there is no such memory.
        """
        found = self._fitting(size) or _map(size)
        return found, np.frombuffer(found, np.uint8, size)

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Return what is kept; one that is too small goes, before the larger one comes."""
        try:
            found = self._kept.pop()
        except IndexError:
            return None
        return found if len(found) >= size else None

    def give_back(self, mapping: mmap.mmap, size: int) -> None:
        """Keep a mapping, of which `size` bytes were used; nothing may touch it any more."""
        if not hasattr(mmap, "MADV_FREE"):
            return
        with contextlib.suppress(OSError):  # locked in memory, or an older kernel: it goes
            mapping.madvise(mmap.MADV_FREE, 0, _whole(size))
            self._kept[:] = [mapping]


def _map(size: int) -> mmap.mmap:
    try:
        found = mmap.mmap(-1, _whole(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise StoreError(
            "no memory for the read buffer",
            kind="no-space",
            wanted=f"{size} bytes",
            hint="give a smaller budget_bytes",
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _whole(size: int) -> int:
    return -(-size // _HUGE_BYTES) * _HUGE_BYTES


SPARE = SpareMemory()
"""That of this process."""
