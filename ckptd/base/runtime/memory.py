"""Memory of this process that another thread may free while it is read."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

__all__ = ["read_memory"]

_PIECE_BYTES = 32 << 20


class _Piece(ctypes.Structure):
    """Struct iovec."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t))


_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = [
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong) * 2,
        ctypes.c_ulong,
    ]


def read_memory(address: int, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Copy memory of this process, which another thread may free meanwhile, without a signal.

    The kernel copies it, at the speed of a plain copy, and without the interpreter's lock. Where it
    lets no process do that, the copy is a plain one.

    Raises
    ------
    OSError
        EFAULT: it is not there.
    """
    at, size = 0, into.nbytes
    while at < size:
        many = min(size - at, _PIECE_BYTES)
        ours = (_Piece * 1)(_Piece(into.ctypes.data + at, many))
        theirs = (_Piece * 1)(_Piece(address + at, many))
        done = -1 if _read is None else _read(os.getpid(), ours, 1, theirs, 1, 0)
        if done <= 0:
            code = errno.ENOSYS if _read is None else ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EPERM):
                raise OSError(code, os.strerror(code))
            done = many
            ctypes.memmove(into.ctypes.data + at, address + at, many)
        at += done
