"""Memory of this process that another thread may free while it is read."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import numpy as np

__all__ = ["read_memory"]

_PIECE_BYTES = 32 << 20


class _Pieces(ctypes.Structure):
    """Two of struct iovec: where to, and where from."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("room", ctypes.c_size_t),
        ("at", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class _Call(threading.local):
    """What a thread passes to the kernel, made once: a save copies thousands of small tensors."""

    def __init__(self) -> None:
        self.pieces = _Pieces()
        to = ctypes.addressof(self.pieces)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        self.words = (ctypes.c_void_p(to), one, ctypes.c_void_p(to + _Pieces.at.offset), one, none)


_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
_call = _Call()


def read_memory(address: int, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Copy memory of this process, which another thread may free meanwhile, without a signal.

    The kernel copies it, at the speed of a plain copy, and without the interpreter's lock. Where it
    lets no process do that, the copy is a plain one.

    Raises
    ------
    OSError
        EFAULT: it is not there.
    """
    to, end = into.ctypes.data, address + into.nbytes
    pieces, words = _call.pieces, _call.words
    while address < end:
        many = min(end - address, _PIECE_BYTES)
        pieces.to, pieces.room, pieces.at, pieces.size = to, many, address, many
        done = -1 if _read is None else _read(os.getpid(), *words)
        if done <= 0:
            code = errno.ENOSYS if _read is None else ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EPERM):
                raise OSError(code, os.strerror(code))
            done = many
            ctypes.memmove(to, address, many)
        to, address = to + done, address + done
