"""System calls of `LocalStore`, and what their errors mean (full, denied, gone, transient).

In it: how often a folder that vanishes is made again; page cache; rename without replacing; space
that is left.

Everything that changes a folder goes through one `Os` object. A fault campaign puts a `WatchedOs`
in its place and strikes between any two steps; a test subclasses it to lose a reply as NFS does.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ckptd.errors import CkptdError, NotFoundError, RefusedError, StoreError, TransientStoreError

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_O_CLOEXEC = os.O_CLOEXEC

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
_HEALS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNRESET,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOENT,  # while writing: another process removed the folder as it was empty
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_NO_LINKS = {errno.EINVAL, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of ``link`` and ``renameat2`` where the file system, or a filter, lacks the call."""
_RENAME_NOREPLACE = 1
_HERE = -100  # AT_FDCWD
_NO_FOLDER_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_MOST_RACES = 24
_T = TypeVar("_T")


def while_folders_vanish(act: Callable[[], _T], where: str) -> _T:
    """Return what `act` returns, which makes a folder that a concurrent delete removes as empty.

    Raises
    ------
    TransientStoreError
        Each try lost, though they are apart by a time that is drawn, and grows.
    """
    for tried in range(_MOST_RACES):
        if tried:
            time.sleep(os.urandom(1)[0] % (1 + tried) / 500)
        with suppress(FileNotFoundError):
            return act()
    raise TransientStoreError("the folder vanishes while it is created", where=where)


class Os:
    """The calls that change a folder. Every one takes the path, for errors and campaigns."""

    def open(self, path: str, flags: int) -> int:
        """Open with ``O_CLOEXEC`` and the permissions that the umask leaves."""
        return os.open(path, flags | _O_CLOEXEC, 0o666)

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        """Write some of `data`; returns how many bytes."""
        return os.pwrite(fd, data, offset)

    def fallocate(self, fd: int, size: int, path: str) -> None:
        """Reserve blocks, where the file system can; ENOSPC shows before a byte is written."""
        _fallocate(fd, size)

    def fsync(self, fd: int, path: str) -> None:
        """Make a file durable."""
        os.fsync(fd)

    def fdatasync(self, fd: int, path: str) -> None:
        """Make the bytes and the size of a file durable."""
        _fdatasync(fd)

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable; file systems without that notion are let pass."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_FSYNC:
                raise
        finally:
            os.close(fd)

    def link(self, path: str, target: str) -> None:
        """Give the file `path` a second name, which must be free."""
        os.link(path, target, follow_symlinks=False)

    def rename_new(self, path: str, target: str) -> None:
        """Rename to a name that must be free. See `LocalStore` for where that has one winner."""
        call = _libc(
            "renameat2",
            *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint),
        )
        code = errno.ENOSYS
        if call is not None:
            names = os.fsencode(path), os.fsencode(target)
            if call(_HERE, names[0], _HERE, names[1], _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path, None, target)

    def replace(self, path: str, target: str) -> None:
        """Rename, replacing what is there."""
        os.replace(path, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder; group and setgid follow the parent, as the kernel does it."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


def pages(size: int) -> mmap.mmap:
    """Return memory that begins at a page, as direct reads and writes want it, of zeros."""
    # Private: shared memory has its own, usual setting that forbids huge pages, and a million
    # faults of 4 KiB for a few GiB cost more than all copies.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # EINVAL: a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def is_cached(fd: int, *offsets: int) -> bool | None:
    """Tell whether the page cache holds some bytes; None where the system does not say.

    Raises
    ------
    OSError
        What the kernel reports besides.
    """
    if not _NOWAIT:
        return None
    byte = bytearray(1)
    try:
        return all(os.preadv(fd, [byte], offset, _NOWAIT) == 1 for offset in offsets)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise


def bring_into_cache(path: str, wanted: Callable[[], bool]) -> None:
    """Have a file of a disk of this host in the page cache, as far as it is still `wanted`.

    It is no failure where that cannot be: the first reader then waits for the disk.
    """
    # Read, since the kernel limits what one call of posix_fadvise or readahead brings.
    block, done = bytearray(1 << 20), 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        if os.major(os.fstat(file.fileno()).st_dev):  # else it is memory, or across a network
            while wanted() and (count := os.preadv(file.fileno(), [block], done)):
                done += count


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the interpreter's lock, which an assignment to a slice holds."""
    import numpy as np  # where bytes are copied, not where a command line starts

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class PagePool:
    """Memory of one size that users take in turns: its pages are there already. For threads.

    Parameters
    ----------
    size
        Bytes of a block.
    most_idle
        Unused blocks that are kept.
    """

    def __init__(self, size: int, most_idle: int) -> None:
        self._size = size
        self._most_idle = most_idle
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self) -> mmap.mmap:
        """Return a block; what is in it is whatever was."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return pages(self._size)

    def give(self, block: mmap.mmap) -> None:
        """Give a block back."""
        with self._lock:
            if len(self._idle) < self._most_idle:
                self._idle.append(block)

    def drop(self) -> None:
        """Give the memory of idle blocks back to the system."""
        with self._lock:
            self._idle.clear()


def write_all(system: Os, fd: int, data: memoryview, path: str) -> None:
    """Write all of `data` from the start of the file."""
    done = 0
    while done < len(data):
        count = system.pwrite(fd, data[done:], done, path)
        if count == 0:
            raise OSError(errno.EIO, "the file system accepts no bytes")
        done += count


class WatchedOs(Os):
    """Calls ``hook(point, path)`` before each call; points are ``os.link`` and so on."""

    def __init__(self, inner: Os, hook: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._hook = hook

    def open(self, path: str, flags: int) -> int:
        """Report, then do."""
        self._hook("os.open", path)
        return self._inner.open(path, flags)

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        """Report, then do."""
        self._hook("os.pwrite", path)
        return self._inner.pwrite(fd, data, offset, path)

    def fallocate(self, fd: int, size: int, path: str) -> None:
        """Report, then do."""
        self._hook("os.fallocate", path)
        self._inner.fallocate(fd, size, path)

    def fsync(self, fd: int, path: str) -> None:
        """Report, then do."""
        self._hook("os.fsync", path)
        self._inner.fsync(fd, path)

    def fdatasync(self, fd: int, path: str) -> None:
        """Report, then do."""
        self._hook("os.fdatasync", path)
        self._inner.fdatasync(fd, path)

    def fsync_folder(self, path: str) -> None:
        """Report, then do."""
        self._hook("os.fsync-folder", path)
        self._inner.fsync_folder(path)

    def link(self, path: str, target: str) -> None:
        """Report, then do."""
        self._hook("os.link", target)
        self._inner.link(path, target)

    def rename_new(self, path: str, target: str) -> None:
        """Report, then do."""
        self._hook("os.rename-new", target)
        self._inner.rename_new(path, target)

    def replace(self, path: str, target: str) -> None:
        """Report, then do."""
        self._hook("os.replace", target)
        self._inner.replace(path, target)

    def unlink(self, path: str) -> None:
        """Report, then do."""
        self._hook("os.unlink", path)
        self._inner.unlink(path)

    def mkdir(self, path: str) -> None:
        """Report, then do."""
        self._hook("os.mkdir", path)
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Report, then do."""
        self._hook("os.rmdir", path)
        self._inner.rmdir(path)


@functools.cache
def _libc(name: str, *types: Any) -> Any:
    """Return a function of the C library, or None where it has none of that name."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes = list(types)
    return call


def _fallocate(fd: int, size: int) -> None:
    """Call fallocate(2) itself: where it is missing, glibc's posix_fallocate writes each block."""
    call = _libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None or size == 0 or call(fd, 0, 0, size) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM):
        raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, count: int) -> None:
    """Make the kernel begin to write dirty pages, so that fdatasync has little left to wait for."""
    call = _libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None:
        call(fd, offset, count, 2)  # SYNC_FILE_RANGE_WRITE; only a hint, so no result is checked


def _fdatasync(fd: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an ``OSError`` of a read into an error of the store contract."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise NotFoundError("no such object", where=path) from error
        raise explain(error, path, "reading failed", None) from error


@contextmanager
def writing(path: str, size: int | None = None) -> Iterator[None]:
    """Turn an ``OSError`` of a write of `size` bytes into an error of the store contract."""
    try:
        yield
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            message = "an object or a folder of that name is in the way"
            raise StoreError(message, where=path, found=error.strerror) from error
        raise explain(error, path, "writing failed", size) from error


def open_plain(path: str) -> int:
    """Open a plain file for reading; `NotFoundError` when there is none of that name."""
    with reading(path):
        # A fifo must not block the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat_module.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotFoundError("no such object", where=path, found="not a regular file")


def knows_none(error: OSError, folder: str) -> bool:
    """Tell whether `error` means that there are no links in `folder`, or no RENAME_NOREPLACE."""
    if error.errno == errno.EIO:
        from ckptd.base.runtime.host import filesystem_of

        return filesystem_of(os.stat(folder).st_dev) == "fuse.rclone"  # its answer to every link
    return error.errno in _NO_LINKS


def no_winner(error: OSError, path: str) -> RefusedError:
    """Return the refusal of a file system on which two writers of `path` could both win."""
    from ckptd.base.runtime.host import filesystem_of  # opening a path need not pay for it

    kind = filesystem_of(os.stat(os.path.dirname(path)).st_dev) or "a file system of unknown type"
    return RefusedError(
        "this file system has no hard links: two writers of one step could both win",
        kind="no-create-only",
        where=path,
        wanted="hard links, or a file system on a disk of this host that knows RENAME_NOREPLACE",
        found=f"{_told(error)}; {kind}",
        hint="give the bucket itself as the root (s3://, gs://, az://), or a folder on a file "
        "system with hard links (ext4, XFS, NFS, Lustre, most SMB)",
    )


def explain(error: OSError, path: str, what: str, size: int | None) -> CkptdError:
    """Return the contract's error for `error`, met at `path` while writing `size` bytes."""
    from ckptd.base.runtime.host import limit_of

    found = _told(error)
    if error.errno in _FULL:
        return StoreError(
            "no space left",
            kind="no-space",
            where=path,
            wanted=None if size is None else f"{size} bytes",
            found=f"{found}; {_free(path)}",
            hint="free space or raise the quota; `ckptd gc` removes what no kept step needs",
        )
    if error.errno == errno.EFBIG:
        return StoreError(
            "the file exceeds a size limit",
            kind="no-space",
            where=path,
            wanted=None if size is None else f"{size} bytes",
            found=found,
            hint=limit_of(error),
        )
    if error.errno in _DENIED:
        return StoreError(f"{what}: not permitted", kind="permission", where=path, found=found)
    kind = TransientStoreError if error.errno in _HEALS else StoreError
    return kind(what, where=path, found=found, hint=limit_of(error))


def _told(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror or error}"


def _free(path: str) -> str:
    """Say how much the file system of `path` has left for us; quotas are not in that number."""
    folder = os.path.dirname(path)
    while folder not in ("", "/") and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        stat = os.statvfs(folder)
    except OSError:
        return "free space unknown"
    return f"{stat.f_bavail * stat.f_frsize} bytes free"
