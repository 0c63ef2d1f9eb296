"""The arena: memory that the trainer fills with snapshots and the writing process drains.

It has one or more slots, a segment each, allocated for real and touched before use: a copy into
fresh pages runs at a tenth of the speed of one into warm pages, and a sparse segment in a small
container raises SIGBUS long after the save returned. A slot is filled front to back under a
counter, so that writing begins while copying still goes on, and then sealed: a snapshot is whole
if and only if its slot carries the seal of its job. Slots of their own grow one by one, while the
others keep what is sealed in them.

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

__all__ = ["MOST_SLOTS", "Slot", "half_staged", "slots_for"]

CONTROL_BYTES = 4096
MOST_SLOTS = 8
_JOB, _STAGED, _SEAL = range(3)
_WORDS = 3
_POLL_S = 0.0005


class Slot:
    """A shared segment for one snapshot: its bytes behind one control page.

    Every word of the control page is an aligned store of 8 bytes, which is atomic on every
    platform that torch runs on; x86 and the barriers inside the interpreter's own locks keep it
    behind the copies that came before it.

    Parameters
    ----------
    number
        Which of the arena's slots.
    nbytes
        Size of the data.
    fd
        Descriptor of an existing segment (the writing process); a new one is made without it.

    Raises
    ------
    SaveError
        kind ``no-memory``: the memory cannot be had.
    """

    def __init__(self, number: int, nbytes: int, fd: int | None = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.before_close: Callable[[], None] | None = None
        """Called once before the memory goes; whoever page-locks it sets this."""
        size = CONTROL_BYTES + max(nbytes, 1)
        self.fd = _allocate(size) if fd is None else fd
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        try:
            self._map = mmap.mmap(self.fd, size, flags)
        except OSError as error:  # a limit on addresses, or a segment that is too small
            os.close(self.fd)
            raise _no_memory(size, error) from error
        self._control = (ctypes.c_uint64 * _WORDS).from_buffer(self._map)
        self.data = memoryview(self._map)[CONTROL_BYTES : CONTROL_BYTES + nbytes]

    def begin(self, job: int) -> None:
        """Empty it for a job (from 1). What was sealed in it is gone before anything else."""
        self._control[_SEAL] = 0
        self._control[_STAGED] = 0
        self._control[_JOB] = job

    @property
    def staged(self) -> int:
        """Bytes of data that are in place, from the front."""
        return self._control[_STAGED]

    @staged.setter
    def staged(self, nbytes: int) -> None:
        self._control[_STAGED] = nbytes

    def seal(self) -> None:
        """Say that the snapshot is whole. Comes last."""
        self._control[_SEAL] = self._control[_JOB]

    @property
    def sealed(self) -> int:
        """The job whose whole snapshot this is; 0 while it is being filled."""
        seal, job = self._control[_SEAL], self._control[_JOB]
        return seal if seal == job else 0

    def wait(self, job: int, nbytes: int, alive: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the first `nbytes` bytes of a job's snapshot are in place.

        Raises
        ------
        SaveError
            kind ``half-staged``: the trainer died, or stopped for `timeout_s`, in mid-copy; what
            is staged is no consistent state and must not be written.
        """
        end = time.monotonic() + timeout_s
        while not self._has(job, nbytes):
            if (not alive() and not self._has(job, nbytes)) or time.monotonic() > end:
                raise half_staged(f"{nbytes} bytes staged", self.staged)
            time.sleep(_POLL_S)

    def _has(self, job: int, nbytes: int) -> bool:
        return self._control[_JOB] == job and self._control[_STAGED] >= nbytes

    def close(self) -> None:
        """Release the mapping and the descriptor; views of `data` must be gone. Idempotent."""
        if self.fd < 0:
            return
        if self.before_close is not None:
            self.before_close()
        try:
            self.data.release()
            del self._control
            self._map.close()
        except BufferError:  # an exported view still lives: the mapping goes when it does
            pass
        os.close(self.fd)
        self.fd = -1


def half_staged(wanted: str, staged: int) -> SaveError:
    """Return the error for a snapshot that nobody will complete."""
    return SaveError(
        "the trainer died before its state was copied",
        kind="half-staged",
        wanted=wanted,
        found=f"{staged} bytes staged",
    )


def slots_for(nbytes: int, wanted: int | None, room: int) -> int:
    """Return how many slots of `nbytes` to have.

    Parameters
    ----------
    wanted
        What the user asked for; None leaves it to the memory: two where a quarter of what is
        available holds both, else one.
    room
        Bytes that may still be allocated.
    """
    if wanted is not None:
        return max(1, min(wanted, MOST_SLOTS))
    return 2 if 2 * nbytes <= room // 4 else 1


def _allocate(size: int) -> int:
    # Beyond a container's limit nothing fails: the kernel kills the trainer in mid-allocation.
    if size > (room := available_bytes()):
        raise _no_memory(size, f"{room / 1e9:.2f} GB available")
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("ckptd-slot", os.MFD_CLOEXEC)
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
