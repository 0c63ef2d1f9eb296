"""Memory for staging, counted: a slab is given back when the last one who uses it lets go.

Stores write in the background from the buffers that they were given, so only the buffers
themselves know when they are free.
"""

from __future__ import annotations

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
        """Return zeroed memory that begins at a page."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Two thousand faults instead of a million for a few GiB.
            memory.madvise(mmap.MADV_HUGEPAGE)
        with self._changed:
            self._out += size
            self.peak = max(self.peak, self._out)
        weakref.finalize(memory, self._back, size).atexit = False
        return np.frombuffer(memory, dtype=np.uint8, count=nbytes)

    def _back(self, size: int) -> None:
        with self._changed:
            self._out -= size
            self._changed.notify_all()
