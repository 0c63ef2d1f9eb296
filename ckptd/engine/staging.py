"""The staging buffer: memory that the trainer fills and the writing process drains.

One segment a rank, allocated for real and touched before use: a copy into fresh pages runs at a
tenth of the speed of one into warm pages, and a sparse segment in a small container raises
SIGBUS long after the save returned. The first page holds one counter, the bytes staged so far,
so that writing begins while copying still goes on.

A memfd on Linux (containers give ``/dev/shm`` 64 MB), an unlinked temporary file elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable

from ckptd.engine.memory import available_bytes
from ckptd.errors import SaveError

__all__ = ["Staging"]

CONTROL_BYTES = 4096
_POLL_S = 0.0005


class Staging:
    """A shared segment of `nbytes` bytes of data behind one control page.

    Parameters
    ----------
    nbytes
        Size of the data part.
    fd
        Descriptor of an existing segment (the writing process); a new one is made without it.

    Raises
    ------
    SaveError
        kind ``no-memory``: the memory cannot be had.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        size = CONTROL_BYTES + max(nbytes, 1)
        self.fd = _allocate(size) if fd is None else fd
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        try:
            self._map = mmap.mmap(self.fd, size, flags)
        except OSError as error:  # a limit on addresses, or a segment that is too small
            os.close(self.fd)
            raise _no_memory(size, error) from error
        self._counter = ctypes.c_uint64.from_buffer(self._map)
        self.data = memoryview(self._map)[CONTROL_BYTES : CONTROL_BYTES + nbytes]

    @property
    def staged(self) -> int:
        """Bytes of data that are in place, from the front."""
        return self._counter.value

    @staged.setter
    def staged(self, nbytes: int) -> None:
        # An aligned 8-byte store is atomic on every platform that torch runs on, and x86 and
        # the barrier inside the interpreter's own locks keep it behind the copies before it.
        self._counter.value = nbytes

    def wait(self, nbytes: int, alive: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `nbytes` bytes are staged.

        Raises
        ------
        SaveError
            kind ``half-staged``: the trainer died, or stopped for `timeout_s`, in mid-copy; what
            is staged is no consistent state and must not be written.
        """
        end = time.monotonic() + timeout_s
        while self.staged < nbytes:
            if (not alive() and self.staged < nbytes) or time.monotonic() > end:
                raise SaveError(
                    "the trainer died before its state was copied",
                    kind="half-staged",
                    wanted=f"{nbytes} bytes staged",
                    found=f"{self.staged} bytes",
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Release the mapping and the descriptor; views of `data` must be gone. Idempotent."""
        if self.fd < 0:
            return
        try:
            self.data.release()
            del self._counter
            self._map.close()
        except BufferError:  # an exported view still lives: the mapping goes when it does
            pass
        os.close(self.fd)
        self.fd = -1


def _allocate(size: int) -> int:
    # Beyond a container's limit nothing fails: the kernel kills the trainer in mid-allocation.
    if size > (room := available_bytes()):
        raise _no_memory(size, f"{room / 1e9:.2f} GB available")
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("ckptd-staging", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
    except OSError as error:
        raise _no_memory(size, error) from error
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise _no_memory(size, error) from error
    return fd


def _no_memory(size: int, found: object) -> SaveError:
    return SaveError(
        "no memory to stage the state in",
        kind="no-memory",
        wanted=f"{size / 1e9:.2f} GB of shared memory",
        found=found,
        hint="save less per rank (shard over more ranks), or raise the container's memory limit",
    )
