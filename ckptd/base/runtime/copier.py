"""Fast copies and comparisons of memory: native code, from which size on it is used."""

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

from ckptd.base.digest import digest
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
    change
        See ``copier.cpp``.
    """

    copy: Callable[[int, int, int], None]
    change: Callable[[int, int, int, int, int, int, int, int], int]


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


class RunChange(NamedTuple):
    """How a run of elements has changed.

    Attributes
    ----------
    sparse
        The sparse form of `ckptd.publish.deltas`, none of whose streams is packed; empty: nothing
        has changed, None: more elements than that is for, or more than half, which pack.
    packs
        A bit for each byte plane that would be smaller after packing: of the elements that have
        changed, or of all where more have than a sparse form is for.
    planes
        The XOR of all elements, byte plane by byte plane, where `sparse` is None and some pack;
        until the next call of this thread.
    digest
        Of the new bytes; empty where it was not made.
    """

    sparse: bytes | None
    packs: int
    planes: tuple[bytes | memoryview, ...] = ()
    digest: bytes = b""


def change_of(
    old: NDArray[np.uint8], new: NDArray[np.uint8], size: int, most: int
) -> RunChange | None:
    """Return how bytes have changed in one pass; None without a native build.

    Parameters
    ----------
    size
        Bytes of an element: 1, 2, 4 or 8.
    most
        Elements in a sparse form.
    """
    native = _native()
    return None if native is None else _change(native, old, new, size, most)


def _change(
    native: _Native, old: NDArray[np.uint8], new: NDArray[np.uint8], size: int, most: int
) -> RunChange:
    count = len(new) // size
    to = 4 * (count // (1 << 16) + 1) + (2 + size) * (most + 64) + count // 8 + 640
    told = to + count // 8 + size * (count + 64) + 32
    room: tuple[NDArray[np.uint8], int] | None = getattr(_local, "room", None)
    if room is None or told + 18 > _ROOM_BYTES:
        made = np.empty(max(told + 18, _ROOM_BYTES), np.uint8)
        room = made, _address(made)
        if len(made) == _ROOM_BYTES:
            _local.room = room  # asked of the system once a thread, and not once a block
    memory, at = room
    length = native.change(
        _address(old), _address(new), len(new), size.bit_length() - 1, most, at, at + to, at + told
    )
    last = memory[told : told + 18].tobytes()
    sums = last[:16] if last[16] else b""
    if length >= 0:
        return RunChange(memory[to : to + length].tobytes(), last[17], (), sums)
    planes = memory[to : to + size * (count + 64)].reshape(size, -1)[: size if last[17] else 0]
    return RunChange(None, last[17], tuple(plane[:count].data for plane in planes), sums)


def copies_natively() -> bool:
    """Tell whether runs of at least `LEAST_BYTES` are copied past the cache."""
    return _native() is not None


def _address(values: NDArray[Any]) -> int:
    if values.flags.writeable and values.flags.c_contiguous and values.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(values.data))  # a fifth of the time
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
        change = library.ckptd_change
        change.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_int]
        change.argtypes += [ctypes.c_size_t] + [ctypes.c_void_p] * 3
        change.restype = ctypes.c_int64
        gains = bool(library.ckptd_copier_gains())
    except (OSError, AttributeError) as error:
        _log.warning("loads copy with numpy, which is slower: cannot use %s: %s", path, error)
        return None
    found = _Native(library.ckptd_copy, change)
    if gains and not _is_right(found):
        _log.error("loads copy with numpy, which is slower: %s failed its self-test", path)
        return None
    return found if gains else None


def _is_right(native: _Native) -> bool:
    """Copy a few bytes that are aligned to nothing, look around them too, and tell them apart."""
    size, at = 5 * 4096 * 4 + 100, 65
    source = np.arange(size + 200, dtype=np.uint64).view(np.uint8)[: size + 200]
    target = np.zeros(size + 200, np.uint8)
    native.copy(_address(target) + at, _address(source) + 7, size)
    right = np.zeros_like(target)
    right[at : at + size] = source[7 : 7 + size]
    zeros = np.zeros_like(right)
    zeros[700:] = right[700:]
    found = _change(native, zeros, right, 1, size)
    wanted = int(np.count_nonzero(right[:700])).to_bytes(4, "little")
    return (
        bool(np.array_equal(target, right))
        and (found.sparse or b"")[2:6] == wanted
        and found.digest in (b"", digest(right.data))
    )
