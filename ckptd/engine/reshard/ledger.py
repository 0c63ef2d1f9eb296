"""Memory for staging, counted: a slab is given back when the last one who uses it lets go.

Stores write in the background from the buffers that they were given, so only the buffers
themselves know when they are free. Slabs are used again: fresh pages are zeroed by the kernel,
which costs as much as a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import DeadlineError

__all__ = ["Ledger"]

_POLL_S = 0.05
_PAGE = 4096
_SLACK = 8
"""A slab may be larger than asked for by one such part: rounds are alike, not the same."""


class Ledger:
    """Hands out page-aligned memory, at most `limit` bytes at a time.

    Parameters
    ----------
    limit
        Bytes that may be out at a time. A single slab may be larger: then it is out alone.
    stall_s
        Longest wait in seconds without anything given back.
    """

    def __init__(self, limit: int, stall_s: float = 900.0) -> None:
        self._limit = limit
        self._stall_s = stall_s
        # Re-entrant: a finalizer may run in the thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._out = 0
        self._idle: list[mmap.mmap] = []
        self.peak = 0

    def wait(self, nbytes: int, idle: Callable[[], bool]) -> None:
        """Return when `nbytes` more would stay within the limit.

        Parameters
        ----------
        idle
            Tells that waiting helps no more: nobody is at work who would give something back.
            Raises what went wrong there.

        Raises
        ------
        DeadlineError
            kind ``stalled``.
        """
        waited, seen = 0.0, -1
        with self._changed:
            while self._out and self._out + nbytes > self._limit and not idle():
                if self._out != seen:
                    waited, seen = 0.0, self._out
                if waited > self._stall_s:
                    raise DeadlineError(
                        "writing made no progress",
                        kind="stalled",
                        wanted=f"a step within {self._stall_s:.0f} s",
                        hint="is the file system or the object store reachable?",
                    )
                self._changed.wait(_POLL_S)
                waited += _POLL_S

    def slab(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory that begins at a page; what is in it is whatever was."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        with self._changed:
            memory = self._take(size) or _map(size)
            self._out += len(memory)
            self.peak = max(self.peak, self._out)
        # What is watched is not the mapping itself, which is to be handed out again.
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(buffer, self._back, memory).atexit = False
        return np.frombuffer(memoryview(buffer), dtype=np.uint8, count=nbytes)

    def _take(self, size: int) -> mmap.mmap | None:
        """Return an idle slab of about this size; else make room for a new one."""
        fits = [m for m in self._idle if size <= len(m) <= size + size // _SLACK]
        if fits:
            best = min(fits, key=len)
            self._idle.remove(best)
            return best
        while self._idle and self._out + sum(map(len, self._idle)) + size > self._limit:
            self._idle.pop(0)
        return None

    def _back(self, memory: mmap.mmap) -> None:
        with self._changed:
            self._out -= len(memory)
            self._idle.append(memory)
            self._changed.notify_all()


def _map(size: int) -> mmap.mmap:
    # Private: shared memory has its own, usual setting that forbids huge pages, and a million
    # faults of 4 KiB for a few GiB cost more than all copies.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
