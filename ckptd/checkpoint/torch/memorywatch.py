"""Watching memory for writes to tensors that are not yet copied, whether torch counts them or not.

Where the kernel counts writes to pages (`Pages`), pages that are one tensor's alone are watched by
it; other memory is compared, whole or by samples (`SpanWatch`). Memory that a storage gives back is
noted as it does so, on every device (`Resizes`).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.runtime.memory import map_pages
from ckptd.checkpoint.save.arena import anonymous_file

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
        number = _SYSCALL.get(platform.machine())
        if number is None:
            raise OSError("the system call is unknown on this machine")
        libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.RLock()
        self._beginning = False
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
                other._noted += _common(found, other.ranges)

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
        """Let the next write to each page cost nothing, where no other count needs it."""
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
        self.ranges = _joined(ranges)
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


def _joined(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return ranges in rising order, as one those that overlap, or have less than `gap` between."""
    found: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if found and start < found[-1][1] + gap:
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


SMALL_SPAN_BYTES = 4 * PAGE
"""A tensor up to this size is compared whole: asking the kernel costs as much."""
WHOLE_BYTES = 32 << 20
"""So much is compared whole where the kernel does not count writes; of more there are samples."""
SAMPLED_BYTES = 16 << 20
WINDOW_BYTES = 1024
"""Of one sample."""
_MOST_PIECES = 1024
"""That one system call takes (IOV_MAX)."""

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """A run of memory that may not change.

    Attributes
    ----------
    name
        Of the tensor that lies there.
    at, nbytes
        Address and length.
    slot
        Where its copy begins in the slot; None where its bytes are copied in another order.
    """

    name: str
    at: int
    nbytes: int
    slot: int | None


class SpanWatch:
    """Watches the same spans, save for save.

    Parameters
    ----------
    spans
        They stay mapped as long as this is used.
    mappings
        Of this process, from `mappings`.
    pages
        The kernel's eye; None: it has none.

    Attributes
    ----------
    odds
        The chance that a write of a single byte is found. It is 1 where the kernel counts all
        writes, or all bytes are compared.
    """

    def __init__(
        self, spans: Sequence[MemorySpan], mappings: Sequence[MappedRange], pages: Pages | None
    ) -> None:
        self.spans = [s for s in spans if s.nbytes]
        self._pages = pages
        self._random = np.random.default_rng()
        self._at = _ints(s.at for s in self.spans)
        self._sizes = _ints(s.nbytes for s in self.spans)
        self._slots = _ints(-1 if s.slot is None else s.slot for s in self.spans)
        self._file = anonymous_file("ckptd-watch")
        weakref.finalize(self, os.close, self._file)
        self._plan(_countable(self.spans, mappings, pages) if pages is not None else set())

    def _plan(self, counted: set[int]) -> None:
        """Decide what is looked at how; `counted` are the spans whose pages the kernel counts."""
        ranges: list[tuple[Range, int]] = []
        fixed: list[tuple[int, int, int]] = []
        windows: list[tuple[int, int]] = []
        blind: list[int] = []
        for number, span in enumerate(self.spans):
            if number in counted:
                start, end = _inner(span)
                ranges.append(((start, end), number))
                fixed.append((number, 0, start - span.at))
                fixed.append((number, end - span.at, span.at + span.nbytes - end))
                windows.append((number, 1))  # a device may write past the kernel's eye
            elif span.nbytes <= SMALL_SPAN_BYTES:
                fixed.append((number, 0, span.nbytes))
            else:
                blind.append(number)
        ranges.sort()
        self.ranges = _joined(r for r, _ in ranges)
        # What little lies between is counted with them: a call costs as much as many pages.
        self._stretches = _joined(self.ranges, SMALL_SPAN_BYTES)
        self._of_range = [number for _, number in ranges]
        self._range_starts = [start for (start, _), _ in ranges]
        total = sum(self.spans[n].nbytes for n in blind)
        self.odds = 1.0 if total <= WHOLE_BYTES else SAMPLED_BYTES / total
        for number in blind:
            size = self.spans[number].nbytes
            if total <= WHOLE_BYTES:
                fixed.append((number, 0, size))
            else:
                windows.append((number, max(4, int(size * self.odds) // WINDOW_BYTES)))
        fixed = [piece for piece in fixed if piece[2]]
        self._fixed = tuple(_ints(p[i] for p in fixed) for i in range(3))
        self._drawn = np.repeat(_ints(w[0] for w in windows), _ints(w[1] for w in windows))

    def begin(self) -> WatchedSpans:
        """Watch from now on. What an earlier call returned must have been asked already."""
        count = None
        while self._pages is not None and self.ranges and count is None:
            try:
                count = self._pages.count(self._stretches)
            except OSError:  # memory that is mapped again at the same place is not registered
                if self._stretches == self.ranges:
                    self._plan(set())
                self._stretches = self.ranges
        spans, offsets, sizes = self._fixed
        if len(self._drawn):
            # The user's streams of numbers are not drawn from.
            room = self._sizes[self._drawn] - WINDOW_BYTES
            drawn = self._random.integers(0, room, endpoint=True)
            spans = np.concatenate((spans, self._drawn))
            offsets = np.concatenate((offsets, drawn))
            sizes = np.concatenate((sizes, np.full(len(drawn), WINDOW_BYTES, np.int64)))
        return WatchedSpans(self, count, self._file, spans, offsets, sizes)


class WatchedSpans:
    """What was there when `SpanWatch.begin` was called."""

    def __init__(
        self,
        watch: SpanWatch,
        count: Count | None,
        file: int,
        spans: _Ints,
        offsets: _Ints,
        sizes: _Ints,
    ) -> None:
        self._watch = watch
        self._count = count
        self._file = file
        self._spans, self._offsets, self._sizes = spans, offsets, sizes
        self._ends = np.cumsum(sizes)
        self._total = int(self._ends[-1]) if len(sizes) else 0
        _gather(file, 0, watch._at[spans] + offsets, sizes)

    def changed(self, slot: int) -> list[str]:
        """Return the names of what was written, or is not what the slot at an address holds.

        It is called when everything is copied, and before anything may change.
        """
        found = set(self._written())
        slots = self._watch._slots
        starts = np.where(slots < 0, self._watch._at, slot + slots)
        try:
            _gather(self._file, self._total, starts[self._spans] + self._offsets, self._sizes)
        except OSError:
            # Memory was freed: which one cannot be told from here.
            found |= {s.name for s in self._watch.spans if s.slot is None}
            self.end()
            return sorted(found)
        found |= self._different()
        self.end()
        return sorted(found)

    def _written(self) -> Iterator[str]:
        if self._count is None:
            return
        watch = self._watch
        written = watch.ranges
        for ranges in (None, watch.ranges):  # some of it, or what lies between, was mapped again
            with suppress(OSError):
                written = self._count.written(ranges)
                break
        for start, _ in _common(written, watch.ranges):
            number = bisect.bisect_right(watch._range_starts, start) - 1
            yield watch.spans[watch._of_range[number]].name

    def _different(self) -> set[str]:
        names = set()
        step = 256 << 10  # what is read stays in the cache: larger pieces take five times as long
        for start in range(0, self._total, step):
            size = min(step, self._total - start)
            before = np.frombuffer(os.pread(self._file, size, start), np.uint8)
            now = np.frombuffer(os.pread(self._file, size, self._total + start), np.uint8)
            at = start + np.flatnonzero(before != now)
            for piece in np.unique(np.searchsorted(self._ends, at, side="right")):
                names.add(self._watch.spans[int(self._spans[piece])].name)
        return names

    def end(self) -> None:
        """Let the memory be written at no cost again."""
        if self._count is not None:
            self._count.end()
        self._count = None


def _ints(values: Iterator[int]) -> _Ints:
    return np.fromiter(values, np.int64)


def _inner(span: MemorySpan) -> Range:
    """Return the pages that are this span's alone."""
    start = -(-span.at // PAGE) * PAGE
    return start, max(start, (span.at + span.nbytes) // PAGE * PAGE)


def _countable(
    spans: Sequence[MemorySpan], mappings: Sequence[MappedRange], pages: Pages
) -> set[int]:
    """Register the mappings of large spans; return the spans that lie in them.

    Whole mappings, since a part of one would become a mapping of its own, and a process may not
    have more than some 65,000.
    """
    starts = [m.start for m in mappings]
    registered: dict[int, bool] = {}

    def counts(number: int) -> bool:
        if number not in registered:
            mapping = mappings[number]
            registered[number] = False
            with suppress(OSError):
                if not mapping.shared:
                    pages.register((mapping.start, mapping.end))
                    registered[number] = True
        return registered[number]

    found = set()
    for index, span in enumerate(spans):
        if span.nbytes <= SMALL_SPAN_BYTES:
            continue
        at, end = span.at, span.at + span.nbytes
        number = bisect.bisect_right(starts, at) - 1
        while 0 <= number < len(mappings) and mappings[number].start <= at < mappings[number].end:
            if not counts(number):
                break
            at = mappings[number].end
            number += 1
            if at >= end:
                found.add(index)
                break
    return found


_libc = ctypes.CDLL(None, use_errno=True)
_pwritev = _libc.pwritev
_pwritev.restype = ctypes.c_ssize_t
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)


def _gather(file: int, where: int, at: _Ints, sizes: _Ints) -> None:
    """Copy pieces of memory into a file, one behind the other.

    The kernel copies: memory that is gone is an error, and not the end of the process.
    """
    pieces = np.stack((at, sizes), axis=1).astype(np.uint64)
    for first in range(0, len(pieces), _MOST_PIECES):
        part = np.ascontiguousarray(pieces[first : first + _MOST_PIECES])
        wanted = int(part[:, 1].sum())
        if _pwritev(file, part.ctypes.data, len(part), where) != wanted:
            raise OSError(ctypes.get_errno(), "memory cannot be read")
        where += wanted


_RESIZE = "resize_"


class Resizes:
    """Finds storages that were resized since this was made.

    A tensor that is held keeps its storage, and the storage keeps its memory, with one exception: a
    resize gives the memory back while the storage lives on, as offloading does, and the next resize
    may get the same memory, in which others have written meanwhile. Torch counts no change, and
    the address is what it was.

    Notes
    -----
    Torch has no hook for it: ``torch.UntypedStorage.resize_`` is replaced when one of these is
    made. A resize by compiled code, which does not call it, is not found.
    """

    _installed: ClassVar[object] = None
    _numbers: ClassVar = itertools.count(1)
    _last: ClassVar[dict[int, int]] = {}
    """The number of the last resize by storage, as torch identifies it."""

    def __init__(self) -> None:
        plain = getattr(torch.UntypedStorage, _RESIZE)
        if plain is not Resizes._installed:
            Resizes._installed = _noted(plain, self._note)
            setattr(torch.UntypedStorage, _RESIZE, Resizes._installed)
        self._begin = next(self._numbers)

    @classmethod
    def _note(cls, storage: torch.UntypedStorage) -> None:
        cls._last[storage._cdata] = next(cls._numbers)

    def storages(self) -> set[int]:
        """Return the storages, as torch identifies them."""
        return {storage for storage, number in list(self._last.items()) if number > self._begin}


def _noted(
    plain: Callable[[torch.UntypedStorage, int], Any], note: Callable[[torch.UntypedStorage], None]
) -> Callable[[torch.UntypedStorage, int], Any]:
    @functools.wraps(plain)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        # Before and after: another thread may look, or begin, in between.
        note(storage)
        try:
            return plain(storage, size)
        finally:
            note(storage)

    return resize_
