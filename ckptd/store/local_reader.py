"""Reading for `LocalStore`: from the page cache what is there, the rest past it.

Large reads of what is not cached are two to four times as fast with O_DIRECT, and do not push the
training data out of memory; what is cached already is faster still from there. The kernel tells
which is which: a read with RWF_NOWAIT fails where it would have to wait for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os

from ckptd.store.buffers import check_end
from ckptd.store.local_writer import ALIGN, address
from ckptd.store.osio import O_DIRECT

__all__ = ["read_range"]

_WORTH_DIRECT = 1 << 20
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def read_range(path: str, fd: int, offset: int, view: memoryview, *, direct: bool) -> None:
    """Fill `view` from `offset` of the file; `fd` is for this call alone.

    Raises
    ------
    CorruptError
        Kind ``truncated``: the file ends before.
    OSError
        What the kernel reports.
    """
    done = 0
    possible = direct and O_DIRECT and _NOWAIT and _is_aligned(offset, view)
    if possible and not _is_cached(fd, offset, len(view)):
        done = _read_direct(fd, offset, view)
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            check_end(path, offset + len(view), offset + done)
        done += count


def _is_aligned(offset: int, view: memoryview) -> bool:
    return len(view) >= _WORTH_DIRECT and offset % ALIGN == 0 and address(view) % ALIGN == 0


def _is_cached(fd: int, offset: int, count: int) -> bool:
    """Guess from a few pages whether the page cache holds a range.

    A larger probe would start to read ahead, through the cache, what is then read past it.
    """
    page = bytearray(1)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        for probe in (0, count // 2, count - 1):
            if os.preadv(fd, [page], offset + probe, _NOWAIT) != 1:
                return False
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return True  # or a file system that cannot tell, and is left to its own ways


def _read_direct(fd: int, offset: int, view: memoryview) -> int:
    """Read whole aligned blocks past the page cache; returns the number of bytes."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    end = len(view) // ALIGN * ALIGN
    done = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT)
        while done < end:
            count = os.preadv(fd, [view[done:end]], offset + done)
            if count == 0 or count % ALIGN:  # the end of the file
                return done + count
            done += count
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system has no O_DIRECT
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done
