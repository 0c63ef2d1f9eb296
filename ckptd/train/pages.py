"""Which pages of this process's memory were written since one asked: the kernel counts for us.

Linux 6.7 write-protects pages on request and notes the first write to each, without a signal and
without a message (``userfaultfd`` in its asynchronous mode, the ``PAGEMAP_SCAN`` ioctl). It sees
every write of this process, whoever makes it: torch with and without counting, numpy, a library in
C, a system call. It does not see writes of other processes to shared memory, or of devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["PAGE", "Mapping", "Pages", "Range", "mappings"]

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
            self.protect(page)
            clean = self.written(page)
            memory[0] = 2
            found = self.written(page)
            del held
        if clean or found != page:
            raise OSError("writes are not counted")

    def register(self, pages: Range) -> None:
        """Let writes to these pages be countable; raises `OSError` where they cannot be."""
        start, end = pages
        asked = bytearray(struct.pack("=4Q", start, end - start, _REGISTER_WP, 0))
        fcntl.ioctl(self._fault, _UFFDIO_REGISTER, asked)

    def protect(self, ranges: Iterable[Range]) -> None:
        """Begin to count: some 45 ns for each page of 4 KiB, as much for a huge one."""
        for start, end in ranges:
            self._scan(start, end, _WP_MATCHING | _CHECK_WPASYNC, 0, 0)

    def written(self, ranges: Sequence[Range]) -> list[Range]:
        """Return what was written since `protect`."""
        found: list[Range] = []
        room = array("Q", bytes(24 * 16))
        for start, end in ranges:
            at = start
            while at < end:
                many, at = self._scan(at, end, _CHECK_WPASYNC, room.buffer_info()[0], 16)
                found += [(room[3 * i], room[3 * i + 1]) for i in range(many)]
        return found

    def release(self, ranges: Iterable[Range]) -> None:
        """Stop counting: the next write to each page costs nothing then."""
        for start, end in ranges:
            with suppress(OSError):  # it was unmapped meanwhile
                fcntl.ioctl(
                    self._fault,
                    _UFFDIO_WRITEPROTECT,
                    bytearray(struct.pack("=3Q", start, end - start, 0)),
                )

    def _scan(self, start: int, end: int, flags: int, into: int, room: int) -> tuple[int, int]:
        mask = _WRITTEN
        asked = bytearray(
            _SCAN.pack(_SCAN.size, flags, start, end, 0, into, room, 0, 0, mask, 0, mask)
        )
        many = fcntl.ioctl(self._map, _PAGEMAP_SCAN, asked)
        return many, _SCAN.unpack(asked)[4] or end


@dataclass(frozen=True, slots=True)
class Mapping:
    """A part of this process's memory that can be written.

    `shared` tells that other processes may map it as well.
    """

    start: int
    end: int
    shared: bool


def mappings() -> list[Mapping]:
    """Return what of this process's memory can be written, in rising order."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, rights, _ = line.split(" ", 2)
            if rights[1] == "w":
                start, _, end = where.partition("-")
                found.append(Mapping(int(start, 16), int(end, 16), rights[3] == "s"))
    return found
