"""Memory of this process: read while another thread may free it, its pages mapped and dropped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile

import numpy as np
from numpy.typing import NDArray

_MOST = 1024
"""The kernel's limit of runs in one call (``IOV_MAX``)."""

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of Linux 5.14 that `mmap` has no names for; older kernels refuse it."""

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = getattr(_libc, "madvise", None)
_read = getattr(_libc, "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
_write = getattr(_libc, "pwritev", None)
if _write is not None:
    _write.restype = ctypes.c_ssize_t
    _write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)


def read_memory(runs: NDArray[np.int64]) -> None:
    """Copy memory of this process, which another thread may free meanwhile, without a signal.

    The kernel copies it, at the speed of a plain copy, and without the interpreter's lock. A call
    costs 3 us, so one is made for many runs. Where the kernel lets no process do that, the copy is
    a plain one.

    Parameters
    ----------
    runs
        A row each: where it lies, where it goes, and its length in bytes.

    Raises
    ------
    OSError
        EFAULT: some of it is not there.
    """
    left = runs[runs[:, 2] > 0]
    while len(left):
        some = left[:_MOST]
        here, there = np.ascontiguousarray(some[:, 1:]), np.ascontiguousarray(some[:, ::2])
        done = -1 if _read is None else _read(os.getpid(), *_vector(here), *_vector(there), 0)
        if done <= 0:
            code = errno.ENOSYS if _read is None else ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EPERM):
                raise OSError(code, os.strerror(code))
            for at, to, nbytes in some.tolist():
                ctypes.memmove(to, at, nbytes)
            done = int(some[:, 2].sum())
        ends = some[:, 2].cumsum()
        whole = int(ends.searchsorted(done, "right"))
        left = left[whole:]
        if part := done - (int(ends[whole - 1]) if whole else 0):
            left[0] += (part, part, -part)


def _vector(pairs: NDArray[np.int64]) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    """Return rows of address and length as an array of struct iovec."""
    return ctypes.c_void_p(pairs.ctypes.data), ctypes.c_ulong(len(pairs))


def gather(file: int, where: int, at: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Copy pieces of memory into a file, one behind the other.

    The kernel copies: memory that is gone is an error, and not the end of the process.
    """
    pieces = np.stack((at, sizes), axis=1).astype(np.uint64)
    for first in range(0, len(pieces), _MOST):
        part = np.ascontiguousarray(pieces[first : first + _MOST])
        wanted = int(part[:, 1].sum())
        if _write is None or _write(file, part.ctypes.data, len(part), where) != wanted:
            raise OSError(ctypes.get_errno(), "memory cannot be read")
        where += wanted


def map_pages(address: int, size: int, *, write: bool = False) -> bool:
    """Map the pages behind a range of memory; False where the system cannot, or has no such call.

    To touch a page that cannot be given is a signal. May wait for a disk, without the interpreter's
    lock.
    """
    if sys.platform != "linux":
        return False
    return _advise(address, size, _POPULATE_WRITE if write else _POPULATE_READ)


def drop_pages(address: int, size: int) -> None:
    """Let whole pages of a mapped file be no memory of this process until they are touched."""
    _advise(address, size, mmap.MADV_DONTNEED)


def _advise(address: int, size: int, advice: int) -> bool:
    if _madvise is None:
        return False
    return int(_madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)) == 0


def anonymous_file(name: str) -> int:
    """Return the descriptor of an empty file without a path, in memory where there is such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
