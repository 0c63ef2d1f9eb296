"""Memory of this process: safe reads, pages mapped and dropped, writes counted by the kernel.

Its pages are watched too: which were written since a look, as the kernel counts it (`Pages`).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, overload

import msgspec

if TYPE_CHECKING:  # a process that has TLS and no tensors asks here for a file alone
    import numpy as np
    from numpy.typing import NDArray

_MOST = 1024
"""The kernel's limit of runs in one call (``IOV_MAX``)."""

_WORD = 8
_SMALL_RUN = 4096
"""Runs of so many bytes are copied together."""
_SMALL_WORDS = 1 << 14
"""At once: their places stay in the cache."""

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
        here, there = some[:, 1:].copy(), some[:, ::2].copy()
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


def copy_memory(runs: NDArray[np.int64]) -> None:
    """Copy memory that nobody frees meanwhile; the kernel need not be able to read it.

    A call costs more than the copy of a small run, so many that consist of words are copied by one.

    Parameters
    ----------
    runs
        As of `read_memory`. None lies where another one goes.
    """
    import numpy as np

    runs = runs[runs[:, 2] > 0]
    small = (runs[:, 2] <= _SMALL_RUN) & (np.bitwise_or.reduce(runs, axis=1) % _WORD == 0)
    for at, to, nbytes in zip(*runs[~small].T.tolist(), strict=True):  # no list for each
        ctypes.memmove(to, at, nbytes)
    if not small.any():
        return
    runs = runs[small]
    low = int(runs[:, :2].min())
    count = (int((runs[:, :2].max(axis=1) + runs[:, 2]).max()) - low) // _WORD
    # What lies between is not touched.
    memory = np.frombuffer(memoryview((ctypes.c_uint64 * count).from_address(low)), np.uint64)
    starts, sizes = (runs[:, :2] - low) // _WORD, runs[:, 2] // _WORD
    ends, first, done = sizes.cumsum(), 0, 0
    while first < len(runs):
        last = max(first + 1, int(ends.searchsorted(done + _SMALL_WORDS, "right")))
        some, end = sizes[first:last], int(ends[last - 1])
        # A row's start, and behind it one word after the other.
        each = starts[first:last] - (ends[first:last] - some - done)[:, None]
        at, to = np.repeat(each, some, axis=0).T + np.arange(end - done)
        memory[to] = memory[at]
        first, done = last, end


def _vector(pairs: NDArray[np.int64]) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    """Return rows of address and length as an array of struct iovec."""
    return ctypes.c_void_p(pairs.ctypes.data), ctypes.c_ulong(len(pairs))


def gather(file: int, where: int, at: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Copy pieces of memory into a file, one behind the other.

    The kernel copies: memory that is gone is an error, and not the end of the process.
    """
    import numpy as np

    pieces = np.stack((at, sizes), axis=1).astype(np.uint64)
    for first in range(0, len(pieces), _MOST):
        part = np.ascontiguousarray(pieces[first : first + _MOST])
        wanted = int(part[:, 1].sum())
        if _write is None or _write(file, part.ctypes.data, len(part), where) != wanted:
            raise OSError(ctypes.get_errno(), "memory cannot be read")
        where += wanted


class HostBuffers(Sequence["NDArray[np.uint8]"]):
    """Buffers of the host, each a view that is made when it is asked for.

    Parameters
    ----------
    memory
        All that lies between the first and the last, and keeps them.
    first
        Its address.
    places
        Address and bytes of each, a row each.
    """

    def __init__(self, memory: NDArray[np.uint8], first: int, places: NDArray[np.int64]) -> None:
        self._memory, self._first, self.places = memory, first, places

    @overload
    def __getitem__(self, number: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[NDArray[np.uint8]]: ...
    def __getitem__(self, number: int | slice) -> NDArray[np.uint8] | Sequence[NDArray[np.uint8]]:
        if isinstance(number, slice):
            return HostBuffers(self._memory, self._first, self.places[number])
        at, nbytes = self.places[number].tolist()
        return self._memory[at - self._first :][:nbytes]

    def __len__(self) -> int:
        return len(self.places)


def map_pages(address: int, size: int, *, write: bool = False) -> bool:
    """Map the pages behind a range of memory; False where the system cannot, or has no such call.

    To touch a page that cannot be given is a signal. May wait for a disk, without the interpreter's
    lock.
    """
    if sys.platform != "linux":
        return False
    return _advise(address, size, _POPULATE_WRITE if write else _POPULATE_READ)


def drop_pages(address: int, size: int) -> None:
    """Unmap whole pages of a mapped file until this process touches them again."""
    _advise(address, size, mmap.MADV_DONTNEED)


def _advise(address: int, size: int, advice: int) -> bool:
    if _madvise is None:
        return False
    return int(_madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)) == 0


def anonymous_file(name: str) -> int:
    """Return the descriptor of an empty file without a path, in memory where there is such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    import tempfile  # and half of the standard library with it

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# -- pages that are written -----------------------------------------------------------------------

Range = tuple[int, int]
"""First address, and the one after the last."""

PAGE = mmap.PAGESIZE
_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # what an ordinary user may ask for
_API = 0xAA
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_WRITEPROTECT = 0xC018AA06
_REGISTER_WP = 1 << 1
_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("=12Q")
_WP_MATCHING, _CHECK_WPASYNC = 1 << 0, 1 << 1
_WRITTEN, _SWAPPED = 1 << 1, 1 << 4
_MOVES = 4
"""How often pages that are being moved are waited for."""


class Pages:
    """The kernel's eye on the memory of one process; make it with `of_this_process`."""

    _made: tuple[int, Pages | None] | None = None

    def __init__(self) -> None:
        """Open it.

        Raises
        ------
        OSError
            This kernel does not count writes, or does not do it for this user.
        """
        number = _SYSCALL.get(os.uname().machine)
        if number is None:
            raise OSError("the system call is unknown on this machine")
        self._lock = threading.RLock()
        self._beginning = False
        self._counts: weakref.WeakSet[Count] = weakref.WeakSet()
        self._fault = _libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fault < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self._map = -1
        try:
            api = bytearray(struct.pack("=3Q", _API, _WP_UNPOPULATED | _WP_ASYNC, 0))
            fcntl.ioctl(self._fault, _UFFDIO_API, api)
            self._map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._probe()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def of_this_process() -> Pages | None:
        """Return the one of this process; None where the kernel does not count writes."""
        made = Pages._made
        if made is None or made[0] != os.getpid():
            found: Pages | None = None
            with suppress(OSError):
                found = Pages()
            made = Pages._made = os.getpid(), found
        return made[1]

    def close(self) -> None:
        """Release all memory."""
        for descriptor in (self._fault, self._map):
            if descriptor >= 0:
                os.close(descriptor)

    def _probe(self) -> None:
        """See that it counts: a sandbox may take the calls and do nothing."""
        with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory[0] = 1
            held = ctypes.c_char.from_buffer(memory)
            at = ctypes.addressof(held)
            page = [(at, at + PAGE)]
            self.register(page[0])
            count = self.count(page)
            clean = count.written()
            memory[0] = 2
            found = count.written()
            del held
        if clean or found != page:
            raise OSError("writes are not counted")

    def register(self, pages: Range) -> None:
        """Make writes to these pages countable; raises `OSError` where they cannot be."""
        start, end = pages
        asked = bytearray(struct.pack("=4Q", start, end - start, _REGISTER_WP, 0))
        fcntl.ioctl(self._fault, _UFFDIO_REGISTER, asked)

    def count(self, ranges: Iterable[Range]) -> Count:
        """Begin to count: some 45 ns for each page of 4 KiB, as much for a huge one.

        Counts may go on at a time, of the same pages too: there is one protection of a page, so
        that what the beginning of one hides is noted for the others, and the end of one leaves
        what the others need.

        Raises
        ------
        OSError
            Some of it is not registered.
        """
        count = Count(self, ranges)
        with self._lock:
            if self._beginning:  # in the frame below: this is a signal handler
                raise OSError(errno.EDEADLK, "a count is being begun")
            others = list(self._counts)
            try:
                self._beginning = True
                self._protect(count.ranges, others)
                for _ in range(_MOVES):
                    if not (lost := self._unprotected(count.ranges)):
                        break
                    self._protect(lost, others)
            except OSError:
                self._release(count)
                raise
            finally:
                self._beginning = False
            self._counts.add(count)
        return count

    def _protect(self, ranges: Iterable[Range], others: Iterable[Count]) -> None:
        for page in ranges:
            found = self._find(page, _WP_MATCHING | _CHECK_WPASYNC, 16 if others else 0)
            for other in others:
                other._noted += common(found, other.ranges)

    def _unprotected(self, ranges: Iterable[Range]) -> list[Range]:
        """Return pages to protect again, which are where they belong now.

        A page that was being moved (compaction, balancing of NUMA nodes) while it was protected
        arrives without the protection, if it was writable when its move began: the kernel's
        ``remove_migration_pte`` looks at one of the two. It would count as written.
        """
        lost = [f for page in ranges for f in self._find(page, 0, anyof=_WRITTEN | _SWAPPED)]
        for start, end in lost:  # waits for what is on its way; unmapped memory is found later
            map_pages(start, end - start)
        return lost

    def _written(self, count: Count, ranges: Iterable[Range]) -> list[Range]:
        with self._lock:
            found = [f for page in ranges for f in self._find(page, _CHECK_WPASYNC)]
            return sorted({*found, *count._noted})

    def _end(self, count: Count) -> None:
        with self._lock:
            self._counts.discard(count)
            self._release(count)

    def _release(self, count: Count) -> None:
        """Remove the protection of pages that no other count needs: a write then costs nothing."""
        left = count.ranges
        for other in self._counts:
            left = _without(left, other.ranges)
        for start, end in left:
            with suppress(OSError):  # it was unmapped meanwhile
                fcntl.ioctl(
                    self._fault,
                    _UFFDIO_WRITEPROTECT,
                    bytearray(struct.pack("=3Q", start, end - start, 0)),
                )

    def _find(self, page: Range, flags: int, room: int = 16, anyof: int = 0) -> list[Range]:
        """Return what was written since it was protected; `flags` may protect it again."""
        found: list[Range] = []
        into, mask = array("Q", bytes(24 * room)), 0 if anyof else _WRITTEN
        vec = into.buffer_info()[0] if room else 0
        at, end = page
        while at < end:
            asks = flags, at, end, 0, vec, room, 0, 0, mask, anyof, _WRITTEN
            asked = bytearray(_SCAN.pack(_SCAN.size, *asks))
            many = fcntl.ioctl(self._map, _PAGEMAP_SCAN, asked)
            at = _SCAN.unpack(asked)[4] or end
            found += [(into[3 * i], into[3 * i + 1]) for i in range(many)] if room else []
        return found


class Count:
    """Counts writes to some pages, from `Pages.count` on; dropping it ends the count.

    Attributes
    ----------
    ranges
        The pages, in rising order; none twice.
    """

    def __init__(self, pages: Pages, ranges: Iterable[Range]) -> None:
        self.ranges = joined(ranges)
        self._pages = pages
        self._noted: list[Range] = []

    def written(self, ranges: Iterable[Range] | None = None) -> list[Range]:
        """Return what was written since; raises `OSError` where memory was mapped again.

        Parameters
        ----------
        ranges
            Pages that are counted; None: all of them.
        """
        return self._pages._written(self, self.ranges if ranges is None else ranges)

    def end(self) -> None:
        """Stop counting. Idempotent."""
        self._pages._end(self)


def joined(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return ranges in rising order, as one those that overlap, or have less than `gap` between."""
    found: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if found and start < found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def common(some: Iterable[Range], ranges: Sequence[Range]) -> list[Range]:
    """Return what lies in both; `ranges` are joined."""
    found = []
    for start, end in some:
        number = max(0, bisect.bisect_right(ranges, (start, 1 << 64)) - 1)
        while number < len(ranges) and ranges[number][0] < end:
            low, high = max(start, ranges[number][0]), min(end, ranges[number][1])
            found += [(low, high)] if low < high else []
            number += 1
    return found


def _without(some: Iterable[Range], ranges: Sequence[Range]) -> list[Range]:
    """Return what lies in the first and not in the other; `ranges` are joined."""
    found = []
    for start, end in some:
        at = start
        for low, high in common([(start, end)], ranges):
            found += [(at, low)] if at < low else []
            at = high
        found += [(at, end)] if at < end else []
    return found


class MappedRange(msgspec.Struct, frozen=True):
    """A part of this process's memory that can be written.

    `shared`: other processes may map it as well.
    """

    start: int
    end: int
    shared: bool


def mappings() -> list[MappedRange]:
    """Return what of this process's memory can be written, in rising order; on Linux only."""
    found: list[MappedRange] = []
    if sys.platform != "linux":
        return found
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, rights, _ = line.split(" ", 2)
            if rights[1] == "w":
                start, _, end = where.partition("-")
                found.append(MappedRange(int(start, 16), int(end, 16), rights[3] == "s"))
    return found
