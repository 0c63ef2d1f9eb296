"""`LocalStore`: files in a folder: create-only put, durability, direct I/O, options, leftovers.

In it: block size, threads and stall of writes; from which size on the page cache is passed by.

Temporary files of a put begin with ``~``, which no key may contain, so a listing hides them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat as stat_module
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ckptd.errors import (
    CkptdError,
    ConflictError,
    NotFoundError,
    RefusedError,
    TransientStoreError,
    UsageError,
)
from ckptd.store import base, osio
from ckptd.types import ByteRange

_WORTH_DIRECT = 1 << 20
_BOUNCE_BYTES = 4 << 20
_bounces = osio.PagePool(_BOUNCE_BYTES, 8)
"""For reads that are not aligned."""


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
    possible = direct and osio.O_DIRECT and len(view) >= _WORTH_DIRECT
    if possible and _is_worth_direct(fd, offset, len(view)):
        is_aligned = offset % ALIGN == 0 and address(view) % ALIGN == 0
        done = (_read_direct if is_aligned else _read_bounced)(fd, offset, view)
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            base.check_end(path, offset + len(view), offset + done)
        done += count


def _is_worth_direct(fd: int, offset: int, count: int) -> bool:
    """Guess from a few bytes whether a range is to be read past the page cache.

    A larger probe would start to read ahead, through the cache, what is then read past it.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        # A file system that does not say is left to its own ways.
        return osio.is_cached(fd, offset, offset + count // 2, offset + count - 1) is False
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)


@contextmanager
def _past_the_cache(fd: int) -> Iterator[bool]:
    """Have reads of `fd` bypass the page cache; False where the file system refuses.

    Some refuse when the flag is set, others when a read comes; either is EINVAL, and ends the block
    at that read.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | osio.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        yield False
        return
    try:
        yield True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _read_direct(fd: int, offset: int, view: memoryview) -> int:
    """Read whole aligned blocks past the page cache; returns the number of bytes."""
    end = len(view) // ALIGN * ALIGN
    done = 0
    with _past_the_cache(fd) as possible:
        while possible and done < end:
            count = os.preadv(fd, [view[done:end]], offset + done)
            if count == 0 or count % ALIGN:  # the end of the file
                return done + count
            done += count
    return done


def _read_bounced(fd: int, offset: int, view: memoryview) -> int:
    """Read the aligned blocks around a range past the page cache; returns the number of bytes.

    A copy in memory that is warm costs a tenth of the page cache's pages.
    """
    bounce = _bounces.take()
    done = 0
    with memoryview(bounce) as room, _past_the_cache(fd) as possible:
        while possible and done < len(view):
            first = (offset + done) // ALIGN * ALIGN
            skip = offset + done - first
            size = min(_BOUNCE_BYTES, -(-(skip + len(view) - done) // ALIGN) * ALIGN)
            count = os.preadv(fd, [room[:size]], first) - skip
            if count <= 0:  # the end of the file
                break
            count = min(count, len(view) - done)
            osio.copy_bytes(view[done : done + count], room[skip : skip + count])
            done += count
    _bounces.give(bounce)
    return done


ALIGN = 4096
_WORTH_ALIGNING = 1 << 20


class LocalWriter(base.SizedWriter):
    """Writes the file in place; see `Writer`. `path` is free or gets a new file."""

    def __init__(
        self,
        path: str,
        size: int,
        *,
        system: osio.Os,
        pool: ThreadPoolExecutor,
        threads: int,
        blocks: osio.PagePool,
        block_bytes: int,
        stall_s: float,
        buffered_devices: set[int],
        direct: bool,
    ) -> None:
        super().__init__(path, size)
        self._system = system
        self._pool = pool
        self._most = 2 * threads
        self._block_bytes = block_bytes
        self._stall_s = stall_s
        self._buffered_devices = buffered_devices
        self._flying: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        self._blocks = blocks
        self._gather: mmap.mmap | None = None
        self._gathered = 0
        self._sent = 0  # bytes handed to threads; the file offset of what is gathered
        self._is_cut = False
        self._fd = -1
        self._open(direct)

    def _open(self, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            self._fd = self._system.open(self.key, flags)
        except FileExistsError:
            # A new file, never a truncated old one: a reader may have the old one mapped.
            self._system.unlink(self.key)
            self._fd = self._system.open(self.key, flags)
        self._device = os.fstat(self._fd).st_dev
        self._direct = False
        try:
            self._system.fallocate(self._fd, self.size, self.key)
        except BaseException:
            self.abort()
            raise
        if direct and self.size >= ALIGN and self._device not in self._buffered_devices:
            self._direct = self._set_direct(True)

    def _set_direct(self, on: bool) -> bool:
        """Switch O_DIRECT; returns whether it is on."""
        if not osio.O_DIRECT:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | osio.O_DIRECT if on else flags & ~osio.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        except OSError:
            self._buffered_devices.add(self._device)
            return False
        return on

    # -- the caller's thread -------------------------------------------------------------------

    def _append(self, view: memoryview) -> None:
        with osio.writing(self.key, self.size):
            while len(view):
                taken = self._send_in_place(view) or self._send_gathered(view)
                view = view[taken:]

    def _send_in_place(self, view: memoryview) -> int:
        """Send a block straight from the caller's memory; 0 when alignment forbids it."""
        count = min(len(view), self._block_bytes) // ALIGN * ALIGN
        if count == 0 or self._gathered or (self._direct and address(view) % ALIGN):
            return 0
        self._send(view[:count], None)
        return count

    def _send_gathered(self, view: memoryview) -> int:
        """Copy bytes into the block under way, and send that when it is full; 0 when only sent."""
        room = self._block_bytes - self._gathered
        gap = -self._gathered % ALIGN
        # When the caller's memory is aligned like the file, a few bytes bring both to a boundary,
        # and the rest goes without a copy.
        in_step = not self._direct or (address(view) + gap) % ALIGN == 0
        if in_step and self._gathered and len(view) >= _WORTH_ALIGNING:
            room = gap
        count = min(len(view), room)
        if count:
            if self._gather is None:
                self._gather = self._blocks.take()
            end = self._gathered + count
            osio.copy_bytes(memoryview(self._gather)[self._gathered : end], view[:count])
            self._gathered += count
        if count == room:
            self._send_block()
        return count

    def _send_block(self) -> None:
        block, self._gather = self._gather, None
        count, self._gathered = self._gathered, 0
        if block is not None:
            self._send(memoryview(block)[:count], block)

    def _send(self, view: memoryview, block: mmap.mmap | None) -> None:
        while len(self._flying) >= self._most:
            self._land()
        offset, self._sent = self._sent, self._sent + len(view)
        try:
            future = self._pool.submit(self._write_block, view, offset)
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=self.key) from None
        self._flying.append((future, block))

    def _land(self) -> None:
        """Wait for the oldest block and raise what it met."""
        future, block = self._flying[0]
        if not wait([future], self._stall_s).done:
            raise TransientStoreError(
                f"no progress for {self._stall_s:g} s", kind="stalled", where=self.key
            )
        self._flying.popleft()
        future.result()
        if block is not None:
            self._blocks.give(block)

    def _shorten(self) -> None:
        self._is_cut = True  # once nothing is in flight any more

    def _finish(self) -> None:
        with osio.writing(self.key, self.size):
            tail = b""
            if self._gather is not None:
                aligned = self._gathered // ALIGN * ALIGN
                tail = self._gather[aligned : self._gathered]
                self._gathered = aligned
                self._send_block()
            while self._flying:
                self._land()
            self._go_buffered()  # O_DIRECT refuses a length that is not a multiple of ALIGN
            self._write_block(memoryview(tail), self._sent)
            if self._is_cut:
                os.ftruncate(self._fd, self.size)
            self._system.fdatasync(self._fd, self.key)
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _drop(self) -> None:
        # Those that were cancelled in time are no longer anybody's: a wait would not see them end.
        flying = [future for future, _ in self._flying if not future.cancel()]
        # A thread that hangs in a write keeps the descriptor: closing it would let the thread
        # write into whatever file gets that number next.
        if not wait(flying, self._stall_s).not_done:
            self._release()
        self._flying.clear()
        self._system.unlink(self.key)

    # -- the store's threads -------------------------------------------------------------------

    def _write_block(self, view: memoryview, offset: int) -> None:
        while len(view):
            direct = self._direct
            try:
                count = self._system.pwrite(self._fd, view, offset, self.key)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self._buffered_devices.add(self._device)
                self._go_buffered()
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system accepts no bytes")
            if direct and count < len(view):
                # A short write (the disk fills up): what remains must be aligned again.
                count = count // ALIGN * ALIGN
                if count == 0:
                    self._go_buffered()
            if not self._direct:
                osio.start_writeback(self._fd, offset, count)
            view = view[count:]
            offset += count

    def _go_buffered(self) -> None:
        if self._direct:
            self._direct = self._set_direct(False)


def address(view: memoryview) -> int:
    """Return the memory address of the first byte."""
    import numpy as np  # as in `copy_bytes`

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


_TEMPORARY = re.compile(r"~[0-9a-f]{24}\.put")  # no key has a "~"; other people's files may
_Entries = list[tuple[str, "os.DirEntry[str]"]]
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of paths and ``file://``.

    Attributes
    ----------
    direct
        Let writers bypass the page cache (O_DIRECT) where the file system allows it.
    direct_reads
        Let large reads bypass the page cache for what it does not hold. Faster the first time, but
        the second read of a file then finds nothing cached.
    threads
        Blocks in flight for all writers of this store together.
    block_bytes
        Size of one write, in bytes; rounded down to a multiple of 4096.
    stall_s
        A writer whose blocks make no progress for so many seconds fails (a hung mount).
    """

    direct: bool = True
    direct_reads: bool = True
    threads: int = 4
    block_bytes: int = 8 << 20
    stall_s: float = 600.0


def open_local(url: str, options: dict[str, Any]) -> LocalStore:
    """Open a path or ``file:///path``; what follows ``file://`` is the path, unescaped."""
    scheme, _, path = url.partition("://")
    if scheme.lower() != "file":
        path = url
    elif not path.startswith("/"):
        raise UsageError("invalid local URL", where=url, wanted="file:///path")
    return LocalStore(os.path.expanduser(path), base.parse_options(url, options, LocalOptions))


class LocalStore(base.Store):
    """Plain files below a folder.

    A put writes a temporary file beside its target, fsyncs it, gives it its name by ``link`` (when
    create-only) or ``rename``, and fsyncs the folder. Where a disk of this host has no hard links
    (exFAT, FAT), ``renameat2`` with RENAME_NOREPLACE stands in for ``link``. The folder is made by
    the first write; files and folders get the permissions that the umask leaves, group and setgid
    of the folder above.

    Parameters
    ----------
    root
        The folder; a relative path is resolved now.
    options
        See `LocalOptions`.
    system
        The system calls, for tests.
    """

    _linked = ""
    """A folder outside into which links may lead as well; then links to files are listed."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        options: LocalOptions | None = None,
        *,
        system: osio.Os | None = None,
    ) -> None:
        self._settings = options or LocalOptions()
        self._root = os.path.abspath(root)
        self._real = os.path.realpath(self._root)
        self.url = self._root
        self.options: dict[str, Any] = _non_defaults(self._settings)
        self.capabilities = base.Capabilities(
            create_only=True,
            consistent_list=True,
            durable=True,
            local_files=True,
            shared=True,
            parallel=max(1, self._settings.threads),
            block_bytes=max(4096, self._settings.block_bytes // 4096 * 4096),
        )
        self._system = system or osio.Os()
        self._lock = threading.Lock()
        self._folders: set[str] = set()  # folders whose own names this store knows to be durable
        self._anchor: str | None = None
        self._fleeting = ""
        self._pool: ThreadPoolExecutor | None = None
        self._buffered_devices: set[int] = set()
        self._blocks = osio.PagePool(self.capabilities.block_bytes, 2 * self.capabilities.parallel)

    def watch(self, hook: Callable[[str, str], None]) -> None:
        """Call ``hook("os.link", path)`` and so on before each system call."""
        self._system = osio.WatchedOs(self._system, hook)

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        with self._opened(key) as (path, fd, size):
            start, end = (byte_range.start, byte_range.end) if byte_range else (0, size)
            base.check_end(path, end, size)
            if len(whole := os.pread(fd, end - start, start)) == end - start:
                return whole
            buffer = bytearray(end - start)
            read_range(path, fd, start, memoryview(buffer), direct=False)
            return bytes(buffer)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object."""
        view = base.as_bytes_view(buffer)
        with self._opened(key) as (path, fd, size):
            base.check_end(path, offset + len(view), size)
            read_range(path, fd, offset, view, direct=self._settings.direct_reads)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[str, int, int]]:
        path = self._path(key)
        self._refuse_outside(path)
        with osio.reading(path):
            fd = os.open(path, _READ_FLAGS)
            try:
                info = os.fstat(fd)
                if not stat_module.S_ISREG(info.st_mode):
                    raise NotFoundError("no such object", where=path, found="not a regular file")
                yield path, fd, info.st_size
            finally:
                os.close(fd)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        path = self._path(key)
        self._refuse_outside(path)
        with osio.reading(path):
            info = os.stat(path)
        if not stat_module.S_ISREG(info.st_mode):
            raise NotFoundError("no such object", where=path, found="not a regular file")
        return base.ObjectInfo(
            key, info.st_size, info.st_mtime, tag=f"{info.st_ino}-{info.st_mtime_ns}"
        )

    def local_path(self, key: str) -> Path | None:
        """Return the file behind `key`, which may not exist."""
        path = self._path(key)
        self._refuse_outside(path)
        return Path(path)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, base.check_key(key))

    def _refuse_outside(self, path: str) -> None:
        """Follow links only while they stay below the root: a checkpoint is untrusted input."""
        real = os.path.realpath(path)
        inside = [folder for folder in (self._real, self._linked) if folder]
        if not any(real == f or real.startswith(f.rstrip("/") + "/") for f in inside):
            raise RefusedError(
                "a symbolic link leads out of the store",
                where=path,
                wanted=f"a path below {' or '.join(inside)}",
                found=real,
                hint="open a separate store at the link's target",
            )

    # -- listing -------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order. Symbolic links are not listed."""
        self._refuse_outside(os.path.join(self._root, base.check_prefix(prefix)))
        yield from self._walk(prefix)

    def _walk(self, prefix: str) -> Iterator[base.ObjectInfo]:
        for name, entry in self._entries(prefix):
            if name.endswith("/"):
                yield from self._walk(prefix + name)
                continue
            try:
                with osio.reading(entry.path):
                    info = entry.stat(follow_symlinks=bool(self._linked))
            except NotFoundError:
                continue  # deleted since the folder was read
            yield base.ObjectInfo(prefix + name, info.st_size, info.st_mtime)

    def children(self, prefix: str = "") -> base.Names:
        """Return names directly below `prefix`, sorted; folders end in "/"."""
        self._refuse_outside(os.path.join(self._root, base.check_prefix(prefix)))
        # A folder is a name only through the objects in it: leftovers alone do not make one.
        return [n for n, _ in self._entries(prefix) if n[-1] != "/" or any(self._walk(prefix + n))]

    def _entries(self, prefix: str) -> _Entries:
        """Return files, and folders with "/", in the order that their keys have as text."""
        folder = os.path.join(self._root, prefix)
        found = []
        try:
            with osio.reading(folder), os.scandir(folder) as entries:
                for entry in entries:
                    if (
                        not base.is_segment(entry.name)
                        or len(prefix + entry.name) > base.MAX_KEY_BYTES
                    ):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        found.append((entry.name + "/", entry))
                    elif entry.is_file(follow_symlinks=bool(self._linked)):
                        found.append((entry.name, entry))
        except NotFoundError:
            return []
        return sorted(found, key=lambda e: e[0])

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole, atomically and durably."""
        path = self._path(key)
        view = base.as_bytes_view(memoryview(data))
        with osio.writing(path, len(view)):
            self._in_folder(os.path.dirname(path), lambda: self._put(path, view, create_only))

    def _put(self, path: str, data: memoryview, create_only: bool) -> None:
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"~{os.urandom(12).hex()}.put")
        lasts = folder != self._fleeting
        try:
            self._write_temporary(temporary, data, lasts)
            if create_only:
                self._link(temporary, path)
                with suppress(OSError):  # the object is there; `sweep` finds what stays
                    self._system.unlink(temporary)
            else:
                self._system.replace(temporary, path)
            if lasts:
                self._system.fsync_folder(folder)
        except BaseException:
            with suppress(OSError, CkptdError):
                self._system.unlink(temporary)
            raise

    def _write_temporary(self, temporary: str, data: memoryview, lasts: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = self._system.open(temporary, flags)
        try:
            osio.write_all(self._system, fd, data, temporary)
            if lasts:
                self._system.fsync(fd, temporary)
        finally:
            os.close(fd)

    def _link(self, temporary: str, path: str) -> None:
        try:
            self._system.link(temporary, path)
        except OSError as error:
            if osio.knows_none(error, os.path.dirname(path)):
                self._rename_new(temporary, path, error)
                return
            # NFS repeats a request whose reply was lost, and then reports our own success as
            # "exists"; the number of names and the identity of the file tell.
            if _is_linked(temporary, path):
                return
            if isinstance(error, FileExistsError):
                raise _exists(path) from error
            raise

    def _rename_new(self, temporary: str, path: str, refusal: OSError) -> None:
        """Give the name where there are no links, if the kernel of this host alone decides.

        A file system of the network, or of a process (FUSE), may take RENAME_NOREPLACE and still
        replace what another host put there a moment ago: SMB does. Only on a disk of this host no
        other host can, and the kernel holds the folder's lock from the look to the rename.
        """
        folder = os.path.dirname(path)
        if os.major(os.stat(folder).st_dev) == 0:  # no block device: the network's, FUSE's, memory
            raise osio.no_winner(refusal, path) from refusal
        try:
            self._system.rename_new(temporary, path)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            if osio.knows_none(error, folder):
                raise osio.no_winner(refusal, path) from error
            raise

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Write new files, then flush all and the folders: a journal then has one commit to do."""
        paths = {self._path(key): data for key, data in objects.items()}
        folder, owed = os.path.dirname(next(iter(paths))), dict[str, None]()
        with osio.writing(folder, sum(map(len, paths.values()))):
            self._in_folder(folder, lambda: self._put_together(folder, paths, owed), owed)

    def _put_together(
        self, folder: str, paths: Mapping[str, bytes], owed: Mapping[str, None]
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        opened: dict[str, int] = {}
        try:
            for path, data in paths.items():
                # A new file, never a truncated old one: a reader may have the old one mapped.
                with suppress(FileNotFoundError):
                    self._system.unlink(path)
                fd = opened[path] = self._system.open(path, flags)
                with osio.writing(path, len(data)):
                    osio.write_all(self._system, fd, memoryview(data), path)
                    osio.start_writeback(fd, 0, len(data))
            for path, fd in opened.items():
                with osio.writing(path, len(paths[path])):
                    self._system.fdatasync(fd, path)
            for each in (folder, *owed):
                self._system.fsync_folder(each)
        except BaseException:
            for path in opened:
                with suppress(OSError, CkptdError):
                    self._system.unlink(path)
            raise
        finally:
            for fd in opened.values():
                os.close(fd)
        with self._lock:
            self._folders |= {f for f in (folder, *owed) if os.path.dirname(f) in owed}

    def _in_folder(
        self, folder: str, act: Callable[[], None], owed: dict[str, None] | None = None
    ) -> None:
        """Run `act` with `folder` there, which a concurrent delete may have removed as empty."""

        def attempt() -> None:
            try:
                self._make_folder(folder, owed)
                act()
            except FileNotFoundError:
                with self._lock:
                    self._folders.clear()
                raise

        osio.while_folders_vanish(attempt, folder)

    def _make_folder(self, folder: str, owed: dict[str, None] | None = None) -> None:
        """Make `folder` and those above it; each one's own name becomes durable.

        Parameters
        ----------
        owed
            Gets the folders that the caller is to flush for that.
        """
        with self._lock:
            if folder in self._folders:
                return
        self._check_anchor()
        if folder == self._root:
            self._make_root()
        else:
            self._make_folder(os.path.dirname(folder), owed)
            self._refuse_outside(folder)
            with suppress(FileExistsError):
                self._system.mkdir(folder)
                self._check_anchor(made=folder)
            if owed is not None:
                owed[os.path.dirname(folder)] = None
                return
            if folder != self._fleeting:
                # Also when it was there: its maker may not have come to its fsync yet.
                self._system.fsync_folder(os.path.dirname(folder))
        with self._lock:
            self._folders.add(folder)

    def anchor(self, key: str) -> None:
        """Make no folder from now on while the object `key` is not there."""
        self._anchor = self._path(key)

    def fleeting(self, prefix: str) -> None:
        """Do so on a disk of this host: what cuts its power ends the processes as well."""
        with suppress(OSError):  # no folder yet, and nothing in it to be relied on
            if os.major(os.stat(self._root).st_dev):
                self._fleeting = os.path.join(self._root, base.check_prefix(prefix)).rstrip("/")

    def _check_anchor(self, made: str | None = None) -> None:
        """Raise when the anchor is gone; take back the folder that was `made` at that moment."""
        if self._anchor is None or os.path.lexists(self._anchor):
            return
        if made is not None:
            with suppress(OSError):
                self._system.rmdir(made)
        raise base.root_gone(self._anchor)

    def _make_root(self) -> None:
        missing = []
        path = self._root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            try:
                self._system.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):  # a file, or a link that leads nowhere
                    raise
            self._system.fsync_folder(os.path.dirname(path))

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object: preallocated, written in parallel blocks, O_DIRECT where it can."""
        path = self._path(key)
        made: list[LocalWriter] = []
        with osio.writing(path, size):
            self._in_folder(os.path.dirname(path), lambda: made.append(self._writer(path, size)))
        return made[0]

    def _writer(self, path: str, size: int) -> LocalWriter:
        return LocalWriter(
            path,
            size,
            system=self._system,
            pool=self._executor(),
            threads=self.capabilities.parallel,
            blocks=self._blocks,
            block_bytes=self.capabilities.block_bytes,
            stall_s=self._settings.stall_s,
            buffered_devices=self._buffered_devices,
            direct=self._settings.direct,
        )

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.capabilities.parallel, "ckptd-write")
            return self._pool

    # -- removing ------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, then folders that became empty; durable on return."""
        paths = [self._path(k) for k in keys]
        touched: set[str] = set()
        for path in paths:
            self._refuse_outside(os.path.dirname(path))
            with osio.writing(path), suppress(FileNotFoundError, NotADirectoryError):
                self._system.unlink(path)
                touched.add(os.path.dirname(path))
        for folder in sorted(touched, key=len, reverse=True):
            self._settle(folder)

    def _settle(self, folder: str) -> None:
        """Remove `folder` and those above it while they are empty; make the removal durable."""
        lasts = folder != self._fleeting
        with osio.writing(folder):
            while folder != self._root:
                try:
                    self._system.rmdir(folder)
                except FileNotFoundError:
                    pass
                except OSError:
                    break  # not empty: the usual case
                with self._lock:
                    self._folders.discard(folder)
                folder = os.path.dirname(folder)
            with suppress(FileNotFoundError):
                if lasts:
                    self._system.fsync_folder(folder)

    def sync(self, prefix: str) -> None:
        """Fsync the folder, every folder below it, and the one above it if that may be needed."""
        base.check_prefix(prefix)
        top = os.path.join(self._root, prefix).rstrip("/")
        self._refuse_outside(top)
        with osio.writing(top):
            folders = [folder for folder, _, _ in os.walk(top, onerror=_raise)]
            if top != self._root and top not in self._folders:
                folders.append(os.path.dirname(top))
            for folder in folders:
                with suppress(FileNotFoundError):  # removed meanwhile, with all its names
                    self._system.fsync_folder(folder)

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> base.Names:
        """Remove temporary files of interrupted puts, and folders that hold nothing else.

        Not `deep`: looks at the folder itself and at no other.
        """
        base.check_prefix(prefix)
        top = os.path.join(self._root, prefix).rstrip("/") or "/"
        self._refuse_outside(top)
        limit = time.time() - older_than_s
        removed = []
        walk = os.walk(top, topdown=not deep, onerror=_raise)
        for folder, folders, names in walk if deep else islice(walk, 1):
            old = [os.path.join(folder, n) for n in names if _TEMPORARY.fullmatch(n)]
            old = [path for path in old if _older(path, limit)]
            for path in old:
                with osio.writing(path), suppress(FileNotFoundError):
                    self._system.unlink(path)
            if old or not (folders or names):
                self._settle(folder)
            removed += [os.path.relpath(path, self._root) for path in old]
        return sorted(removed)

    def close(self) -> None:
        """End the writing threads, and give their memory back. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        self._blocks.drop()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _non_defaults(options: msgspec.Struct) -> dict[str, Any]:
    default = msgspec.to_builtins(type(options)())
    return {k: v for k, v in msgspec.to_builtins(options).items() if v != default[k]}


def _exists(path: str) -> ConflictError:
    return ConflictError("the object exists already", kind="exists", where=path)


def _is_linked(temporary: str, path: str) -> bool:
    try:
        ours = os.lstat(temporary)
        if ours.st_nlink > 1:
            return True
        return os.path.samestat(ours, os.lstat(path))
    except OSError:
        return False


def _raise(error: OSError) -> None:
    """Make os.walk fail on a folder it cannot read, instead of leaving it out."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _older(path: str, limit: float) -> bool:
    try:
        return os.lstat(path).st_mtime <= limit
    except OSError:
        return False
