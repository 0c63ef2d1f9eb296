"""Copies and comparisons of values in memory: native where a build of that is here."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.nativebuild import PlainLibrary

_log = logging.getLogger("ckptd")

COPIER = PlainLibrary(
    "libckptd-copier",
    Path(__file__).with_name("copier.cpp"),
    purpose="the native copy of loads",
    hint="numpy copies until then",
)
"""The build; `ckptd recorder build` makes it."""

LEAST_BYTES = 256 << 10
"""Smaller runs are left in the cache: their target may be read next, as in buffers of devices."""


class _Native(NamedTuple):
    """Functions of the build.

    Attributes
    ----------
    copy
        Takes the addresses of target and source, and a number of bytes.
    differ
        See ``copier.cpp``.
    """

    copy: Callable[[int, int, int], None]
    differ: Callable[[int, int, int, int, int, int, int], int]


_SMALL_BYTES = 16 << 10
_ROOM_BYTES = 2 << 20
_local = threading.local()
# Giving the GIL back and taking it again costs more than the copy.
_copy_small = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_values(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Write `source` into `target`, of the same shape and type; they do not overlap."""
    at, of = target.flags, source.flags
    # A target that is read-only is numpy's to refuse.
    if target.nbytes >= LEAST_BYTES and at.c_contiguous and at.writeable and of.c_contiguous:
        native = _native()
        if native is not None and (target.nbytes, target.dtype) == (source.nbytes, source.dtype):
            native.copy(_address(target), _address(source), target.nbytes)
            return
    np.copyto(target, source, casting="no")


def copy_runs(runs: NDArray[np.int64]) -> None:
    """Copy runs of memory that do not overlap: of each where it goes, where it lies, its bytes."""
    native = _native()
    for to, at, size in runs.tolist():
        if size < _SMALL_BYTES:
            _copy_small(to, at, size)
        elif size >= LEAST_BYTES and native is not None:
            native.copy(to, at, size)
        else:
            ctypes.memmove(to, at, size)


def differing(
    old: NDArray[np.uint8], new: NDArray[np.uint8], size: int, most: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]] | None:
    """Return which elements of two arrays of bytes differ, and how; None: more than `most` do.

    Parameters
    ----------
    size
        Bytes of an element: 1, 2, 4 or 8.

    Returns
    -------
    tuple
        How many elements lie between each and the one before it; and the bytes of both XORed, byte
        planes by elements.
    """
    native = _native()
    if native is None:
        xor = old.view(f"<u{size}") ^ new.view(f"<u{size}")
        at = np.flatnonzero(xor)
        if len(at) > most:
            return None
        values = np.ascontiguousarray(xor[at].view(np.uint8).reshape(-1, size).T)
        return (np.diff(at, prepend=-1) - 1).astype(np.uint32), values
    nbytes = (4 + size) * most
    room: NDArray[np.uint8] | None = getattr(_local, "room", None)
    if room is None or nbytes > _ROOM_BYTES:
        room = np.empty(max(nbytes, _ROOM_BYTES), np.uint8)
    if len(room) == _ROOM_BYTES:
        _local.room = room  # asked of the system once a thread, and not once a block
    gaps = room[: 4 * most].view(np.uint32)
    planes = room[4 * most : (4 + size) * most].reshape(size, most)
    shift, to, of = size.bit_length() - 1, _address(gaps), _address(planes)
    found = native.differ(_address(old), _address(new), len(old), shift, to, of, most)
    return None if found < 0 else (gaps[:found].copy(), planes[:, :found].copy())


def copies_natively() -> bool:
    """Tell whether runs of at least `LEAST_BYTES` are copied past the cache."""
    return _native() is not None


def _address(values: NDArray[Any]) -> int:
    return int(values.__array_interface__["data"][0])


@functools.cache
def _native() -> _Native | None:
    """Return the native code of this process; None without a build, or for another processor."""
    path = COPIER.built()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))  # its calls release the GIL
        library.ckptd_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        library.ckptd_copy.restype = None
        differ = library.ckptd_differ
        differ.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_int]
        differ.argtypes += [ctypes.c_void_p] * 2 + [ctypes.c_size_t]
        differ.restype = ctypes.c_int64
        gains = bool(library.ckptd_copier_gains())
    except (OSError, AttributeError) as error:
        _log.warning("loads copy with numpy, which is slower: cannot use %s: %s", path, error)
        return None
    found = _Native(library.ckptd_copy, differ)
    if gains and not _is_right(found.copy):
        _log.error("loads copy with numpy, which is slower: %s failed its self-test", path)
        return None
    return found if gains else None


def _is_right(copy: Callable[[int, int, int], None]) -> bool:
    """Copy a few bytes that are aligned to nothing, and look around them too."""
    size, at = 5 * 4096 * 4 + 100, 65
    source = np.arange(size + 200, dtype=np.uint64).view(np.uint8)[: size + 200]
    target = np.zeros(size + 200, np.uint8)
    copy(_address(target) + at, _address(source) + 7, size)
    right = np.zeros_like(target)
    right[at : at + size] = source[7 : 7 + size]
    return bool(np.array_equal(target, right))
