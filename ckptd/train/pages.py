"""Which pages of this process's memory were written since one asked: the kernel counts for us.

Linux 6.7 write-protects pages on request and notes the first write to each, without a signal and
without a message (``userfaultfd`` in its asynchronous mode, the ``PAGEMAP_SCAN`` ioctl). It sees
every write of this process, whoever makes it: torch with and without counting, numpy, a library in
C, a system call. It does not see writes of other processes to shared memory, or of devices.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["PAGE", "Count", "MappedRange", "Pages", "Range", "mappings"]

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
_WRITTEN = 1 << 1


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
        number = _SYSCALL.get(platform.machine())
        if number is None:
            raise OSError("no number of the system call for this machine")
        libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()
        self._counts: weakref.WeakSet[Count] = weakref.WeakSet()
        self._fault = libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
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
        """Let go of all memory."""
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
        """Let writes to these pages be countable; raises `OSError` where they cannot be."""
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
            others = list(self._counts)
            try:
                for page in count.ranges:
                    found = self._find(page, _WP_MATCHING | _CHECK_WPASYNC, tell=bool(others))
                    for other in others:
                        other._noted += _common(found, other.ranges)
            except OSError:
                self._release(count)
                raise
            self._counts.add(count)
        return count

    def _written(self, count: Count) -> list[Range]:
        with self._lock:
            found = [f for page in count.ranges for f in self._find(page, _CHECK_WPASYNC)]
            return sorted({*found, *count._noted})

    def _end(self, count: Count) -> None:
        with self._lock:
            self._counts.discard(count)
            self._release(count)

    def _release(self, count: Count) -> None:
        """Let the next write to each page cost nothing, where nobody else counts."""
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

    def _find(self, page: Range, flags: int, *, tell: bool = True) -> list[Range]:
        """Return what was written since it was protected; `flags` may protect it anew."""
        found: list[Range] = []
        room = array("Q", bytes(24 * 16))
        at, end = page
        while at < end:
            into = room.buffer_info()[0] if tell else 0
            many, at = self._scan(at, end, flags, into, 16 if tell else 0)
            found += [(room[3 * i], room[3 * i + 1]) for i in range(many if tell else 0)]
        return found

    def _scan(self, start: int, end: int, flags: int, into: int, room: int) -> tuple[int, int]:
        mask = _WRITTEN
        asked = bytearray(
            _SCAN.pack(_SCAN.size, flags, start, end, 0, into, room, 0, 0, mask, 0, mask)
        )
        many = fcntl.ioctl(self._map, _PAGEMAP_SCAN, asked)
        return many, _SCAN.unpack(asked)[4] or end


class Count:
    """Counts writes to some pages, from `Pages.count` on; it lets go of them when it is dropped.

    Attributes
    ----------
    ranges
        The pages, in rising order; none twice.
    """

    def __init__(self, pages: Pages, ranges: Iterable[Range]) -> None:
        self.ranges = _joined(ranges)
        self._pages = pages
        self._noted: list[Range] = []

    def written(self) -> list[Range]:
        """Return what was written since; raises `OSError` where memory was mapped anew."""
        return self._pages._written(self)

    def end(self) -> None:
        """Stop counting. Idempotent."""
        self._pages._end(self)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in rising order, those that overlap as one."""
    found: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _common(some: Iterable[Range], ranges: Sequence[Range]) -> list[Range]:
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
        for low, high in _common([(start, end)], ranges):
            found += [(at, low)] if at < low else []
            at = high
        found += [(at, end)] if at < end else []
    return found


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A part of this process's memory that can be written.

    `shared` tells that other processes may map it as well.
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
