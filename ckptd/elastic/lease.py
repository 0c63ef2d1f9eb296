"""Lease of a node's workers: a mapped file with the time until which they may step."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from ckptd.errors import ProcessError

_BYTES = 8


class _Moment:
    """One unsigned number in a mapped file, read and written in one access of memory."""

    def __init__(self, path: Path, flags: int, access: int) -> None:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            try:
                if flags & os.O_CREAT:
                    os.ftruncate(fd, _BYTES)
                self._map = mmap.mmap(fd, _BYTES, access=access)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise ProcessError(
                "the lease of this node cannot be mapped", where=str(path), found=str(error)
            ) from error
        # Not struct: it goes byte by byte where the order of bytes is given.
        self._view = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._view.release()
        self._map.close()


class LeaseFile(_Moment):
    """The launcher's end; made again, mode 0600, with nothing leased yet.

    Raises
    ------
    ProcessError
        It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path, os.O_RDWR | os.O_CREAT, mmap.ACCESS_WRITE)
        self._view[0] = 0

    def extend(self, until_s: float) -> None:
        """Allow steps until this moment of `time.monotonic`, in seconds; one call, atomic."""
        self._view[0] = int(until_s * 1e9)


class WorkerLease(_Moment):
    """The worker's end, mapped for reading.

    Raises
    ------
    ProcessError
        There is no such file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(Path(path), os.O_RDONLY, mmap.ACCESS_READ)

    @property
    def over(self) -> bool:
        """Whether it is over; not while none was given."""
        until = self._view[0]
        return 0 < until < time.monotonic_ns()
