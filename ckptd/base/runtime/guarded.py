"""`GuardedMapping`: a mapped file, touched only while no process can shorten it; file systems.

In it: the file systems where it works; when a lease of the kernel is asked for again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.host import filesystem_of
from ckptd.base.runtime.memory import drop_pages, map_pages

_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "f2fs"}
"""Those of a disk of this machine alone: others know nothing of the kernel's leases here."""

_AGAIN_S = 1.0
"""After which a lease is asked for again that a writer of the file stood against."""


class GuardedMapping:
    """The start of a file, mapped.

    To touch a part that was cut off is a SIGBUS, and so is a page that the disk cannot give. So the
    bytes are touched under a lease of the kernel (F_SETLEASE), for a few milliseconds at a time: a
    process that opens the file for writing or truncates it waits that long. Their pages are mapped
    first, by a call that reports errors. What cannot be guarded has to be read.

    Parameters
    ----------
    fd
        Open for reading; it must stay open while something is touched.
    start, size
        The bytes.
    """

    def __init__(self, fd: int, start: int, size: int, mapping: mmap.mmap) -> None:
        self._fd = fd
        self._end = start + size
        self._data = np.frombuffer(mapping, np.uint8, size, start)
        self._address = int(self._data.__array_interface__["data"][0])
        self._lock = threading.Lock()
        self._users = 0
        self._refused_until = 0.0

    @classmethod
    def of(cls, fd: int, start: int, size: int) -> Self | None:
        """Return the mapping of a file; None where it cannot be guarded."""
        if not hasattr(fcntl, "F_SETLEASE") or fd < 0 or start < 0 or size <= 0:
            return None
        try:
            found = os.fstat(fd)
            if found.st_size < start + size or not _is_local(found.st_dev):
                return None
            return cls(fd, start, size, mmap.mmap(fd, start + size, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return None

    @contextmanager
    def touching(self, start: int, end: int) -> Iterator[NDArray[np.uint8] | None]:
        """Give all bytes, of which ``[start, end)`` may be touched in the block; None to read them.

        The block must be short: the kernel takes a lease away after 45 s, unless told otherwise.
        """
        if not self._enter():
            yield None
            return
        try:
            # A disk may take longer to give the pages than the kernel waits for the lease.
            good = self._populate(start, end) and self._is_kept()
            yield self._data if good else None
        finally:
            # They stay in the page cache, but are no memory of this process any more: a load would
            # grow it by all of the checkpoint, and the kernel ends the largest process first.
            drop_pages(*self._pages(start, end))
            self._leave()

    def _enter(self) -> bool:
        with self._lock:
            if self._refused_until > time.monotonic():
                return False
            try:
                if not self._users:
                    # Sent when a writer waits: ignored, where SIGIO would end the process. The
                    # kernel forgets it with each lease.
                    fcntl.fcntl(self._fd, fcntl.F_SETSIG, signal.SIGURG)
                    fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                elif not self._is_leased():
                    return False  # a writer waits for it
            except OSError as error:
                # A process that writes the file closes it; another user's file stays refused.
                again_s = _AGAIN_S if error.errno == errno.EAGAIN else math.inf
                self._refused_until = time.monotonic() + again_s
                return False
            self._users += 1
            return True

    def _is_leased(self) -> bool:
        return fcntl.fcntl(self._fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def _is_kept(self) -> bool:
        """Tell whether the file is as long as it was, and no process waits to change it."""
        return self._is_leased() and os.fstat(self._fd).st_size >= self._end

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                try:
                    fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                except OSError as error:
                    if error.errno != errno.EAGAIN:  # the kernel has taken it away
                        raise

    def _populate(self, start: int, end: int) -> bool:
        if map_pages(*self._pages(start, end)):
            return True
        # An older kernel, or a disk with an error, which a read will name.
        self._refused_until = math.inf
        return False

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        """Return address and length of the pages that a range lies on."""
        first = (self._address + start) // mmap.PAGESIZE * mmap.PAGESIZE
        return first, self._address + end - first


@functools.cache
def _is_local(device: int) -> bool:
    """Tell whether a device has a filesystem of this machine alone."""
    return filesystem_of(device) in _FILESYSTEMS
