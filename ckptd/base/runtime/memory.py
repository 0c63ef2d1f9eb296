"""Memory of this process that another thread may free while it is read."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
from numpy.typing import NDArray

_MOST = 1024
"""The kernel's limit of runs in one call (``IOV_MAX``)."""

_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t


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
