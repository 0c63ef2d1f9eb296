"""Copying live tensors into a slot of the arena, in file order."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.errors import SaveError
from ckptd.format.digest import digest
from ckptd.format.filemap import ChunkRef
from ckptd.layout.block import Region
from ckptd.save.arena import Slot, anonymous_file
from ckptd.save.structure import SavePlan
from ckptd.train.cuda import CHUNK_BYTES, CudaCopies, CudaSnapshot, OnDevice
from ckptd.train.feed import CopyFeed, CopyGroup, CopyMark, CopyStep, StridedWindow, grouped
from ckptd.train.replicas import Samples
from ckptd.train.state.describe import Describer
from ckptd.train.state.leaves import TensorLeaf
from ckptd.train.state.tensors import as_bytes, is_dtensor, local_tensor
from ckptd.types import Box

__all__ = [
    "PAGE",
    "CopySources",
    "Count",
    "MappedRange",
    "MemorySpan",
    "Pages",
    "Range",
    "Snapshot",
    "SpanWatch",
    "WatchedSpans",
    "copy_steps",
    "mappings",
]


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
        Of this process, from `ckptd.train.copy.mappings`.
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
        self._file = anonymous_file("ckptd-watch")
        weakref.finalize(self, os.close, self._file)
        self._plan(_countable(self.spans, mappings, pages) if pages is not None else set())

    def _plan(self, counted: set[int]) -> None:
        """Decide what is looked at how; `counted` are the spans whose pages the kernel counts."""
        self.ranges: list[Range] = []
        self._of_range: list[int] = []
        fixed: list[tuple[int, int, int]] = []
        windows: list[tuple[int, int]] = []
        blind: list[int] = []
        for number, span in enumerate(self.spans):
            if number in counted:
                start, end = _inner(span)
                self.ranges.append((start, end))
                self._of_range.append(number)
                fixed.append((number, 0, start - span.at))
                fixed.append((number, end - span.at, span.at + span.nbytes - end))
                windows.append((number, 1))  # a device may write past the kernel's eye
            elif span.nbytes <= SMALL_SPAN_BYTES:
                fixed.append((number, 0, span.nbytes))
            else:
                blind.append(number)
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
        if self._pages is not None and self.ranges:
            try:
                count = self._pages.count(self.ranges)
            except OSError:  # memory that is mapped anew at the same place is not registered
                self._plan(set())
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
        self._ranges = list(watch.ranges)
        _gather(file, 0, watch._at[spans] + offsets, sizes)

    def changed(self, slot: int) -> list[str]:
        """Return the names of what was written, or is not what the slot at an address holds.

        It is called when everything is copied, and before anything may change.
        """
        found = set(self._written())
        copies = _ints(-1 if s.slot is None else slot + s.slot for s in self._watch.spans)
        starts = np.where(copies < 0, self._watch._at, copies)
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
        order = sorted(zip(self._ranges, self._watch._of_range, strict=True))
        starts = [start for (start, _), _ in order]
        try:
            written = self._count.written()
        except OSError:  # some of it was unmapped
            written = self._ranges
        for start, _ in written:
            yield self._watch.spans[order[bisect.bisect_right(starts, start) - 1][1]].name

    def _different(self) -> set[str]:
        names = set()
        step = 8 << 20
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


REPORT_BYTES = 8 << 20
SMALL_TENSOR_BYTES = 4096


class LaidSteps(Protocol):
    """Knows the chunks of tensors that a layout describes."""

    def steps(self, name: str, chunk: ChunkRef) -> Iterable[CopyStep] | None:
        """Return the steps of a chunk; None when the layout does not describe its tensor."""


def copy_steps(
    plan: SavePlan,
    rank: int,
    leaves: Mapping[str, TensorLeaf],
    describer: Describer,
    laid: LaidSteps | None = None,
) -> list[CopyStep]:
    """Return the steps for what `rank` writes under `plan`, in file order.

    `laid` gives the steps of tensors that a layout describes.
    """
    steps: list[CopyStep] = []
    for chunk in plan.filemap.chunks(rank):
        if chunk.end == chunk.start:
            continue
        name = plan.tensors[chunk.tensor].name
        special = None if laid is None else laid.steps(name, chunk)
        if special is not None:
            steps += special
            continue
        held = describer.held(name, leaves[name].tensor)
        box = _local_box(chunk, held.regions, tuple(held.local.shape))
        everything = box.shape == tuple(held.local.shape)
        steps.append(CopyStep(name, None if everything else box, chunk.start, chunk.end))
    return steps


def _local_box(chunk: ChunkRef, regions: Sequence[Region], local_shape: tuple[int, ...]) -> Box:
    piece = chunk.piece.box
    for region in regions:
        if region.box.intersect(piece) == piece or region.box == piece:
            corner = np.unravel_index(region.start, local_shape) if local_shape else ()
            offset = tuple(
                int(c) + p - r
                for c, p, r in zip(corner, piece.offset, region.box.offset, strict=True)
            )
            return Box(offset, piece.shape)
    raise AssertionError(f"plan gives this rank a piece it does not hold: {piece}")


_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class CopySources:
    """What copy steps read, worked out once for all saves of the same tensors.

    Parameters
    ----------
    steps
        What is copied, in file order. Large steps on a device are cut, so that the link is free
        for others meanwhile.
    leaves
        Leaf by the name that steps use.
    held
        Tells of a leaf that nothing mutates it before the gate says so.

    Attributes
    ----------
    locals, late
        Local tensor by name: all of them, and those that are copied late.
    shared
        Names of those in memory that other processes may write. These ask no gate, so such memory
        is copied at once, and must be the same afterwards.
    """

    def __init__(
        self,
        steps: Sequence[CopyStep],
        leaves: Mapping[str, TensorLeaf],
        held: Callable[[TensorLeaf], bool],
    ) -> None:
        self.leaves = leaves
        self._held = held
        self.locals = {s.name: local_tensor(leaves[s.name].tensor) for s in steps}
        self.mixed = any(x.is_cuda for x in self.locals.values())
        self._mappings = mappings() if any(map(_on_host, self.locals.values())) else []
        shared = [(m.start, m.end) for m in self._mappings if m.shared]
        self.shared = {n for n, x in self.locals.items() if _lies_in(x, shared)}
        self._shared_locals = {id(self.locals[n]) for n in self.shared}
        self.late = {n: x for n, x in self.locals.items() if self.is_held(leaves[n])}
        self._counted = {n: _counted(leaves[n], x) for n, x in self.late.items()}
        self.steps = [cut for step in steps for cut in self._cut(step)]
        self._addresses = [self.locals[step.name].data_ptr() for step in self.steps]

    def _cut(self, step: CopyStep) -> Iterable[CopyStep]:
        local = self.locals[step.name]
        if not local.is_cuda or step.end - step.start <= CHUNK_BYTES:
            return (step,)
        shape = tuple(local.shape) if step.part is None else step.part.shape
        return step.cut(shape, local.element_size(), CHUNK_BYTES)

    def is_held(self, leaf: TensorLeaf) -> bool:
        """Tell whether a leaf is copied late."""
        tensor = local_tensor(leaf.tensor)
        if tensor.device.type == "cpu":
            # Beside CUDA tensors the few bytes of an optimizer's step counters would be all that
            # the host has to wait for at the gate.
            small = self.mixed and tensor.numel() * tensor.element_size() <= SMALL_TENSOR_BYTES
            alone = id(tensor) not in self._shared_locals and _is_dense(tensor)
            return alone and not small and self._held(leaf)
        return tensor.is_cuda and self._held(leaf)

    def versions(self) -> dict[str, list[int]]:
        """Return what torch counts of changes of what is copied late."""
        return {
            name: [t._version for t in tensors if not t.is_inference()]
            for name, tensors in self._counted.items()
        }

    @cached_property
    def watch(self) -> SpanWatch:
        """Finds writes that torch does not count to what is copied late on the host."""
        spans = []
        whole = set()
        for number in self.late_on_host:
            step = self.steps[number]
            plain = self._plain[number]
            if plain is not None:
                at = plain.ctypes.data
                spans.append(MemorySpan(step.name, at, plain.nbytes, step.start))
            elif step.name not in whole:
                whole.add(step.name)
                local = self.locals[step.name]
                nbytes = local.numel() * local.element_size()
                spans.append(MemorySpan(step.name, local.data_ptr(), nbytes, None))
        return SpanWatch(spans, self._mappings, Pages.of_this_process())

    @cached_property
    def early(self) -> list[int]:
        """Numbers of the steps that are copied at once, on the host."""
        return [
            number
            for number, step in enumerate(self.steps)
            if step.name not in self.late and not self.locals[step.name].is_cuda
        ]

    @cached_property
    def late_on_host(self) -> list[int]:
        """Numbers of the steps that a thread copies on the host."""
        return [
            number
            for number, step in enumerate(self.steps)
            if (local := self.late.get(step.name)) is not None and not local.is_cuda
        ]

    def source(self, number: int) -> torch.Tensor:
        """Return what a step copies."""
        step = self.steps[number]
        return _part(self.locals[step.name], step.part)

    def copy(self, number: int, slot: Slot) -> None:
        """Copy a step's tensor, which is on the host, into its place in the slot.

        Raises
        ------
        SaveError
            kind ``mutated``: its memory was freed.
        """
        step = self.steps[number]
        if self.locals[step.name].data_ptr() != self._addresses[number]:
            raise _mutated([step.name])
        plain = self._plain[number]
        if plain is None:
            _copy(self.source(number), slot.place(step.start, step.end))
        else:
            slot.put(step.start, plain)

    def is_copied(self, number: int, slot: Slot) -> bool:
        """Tell whether the slot holds what a step's tensor, which is on the host, holds now."""
        step = self.steps[number]
        place = slot.place(step.start, step.end)
        plain = self._plain[number]
        if plain is not None:
            return bool(np.array_equal(place, plain))
        return digest(place.data) == _digest(self.source(number))

    @cached_property
    def _plain(self) -> list[_Bytes | None]:
        """The memory of each step that is a run of bytes on the host."""
        return [self._bytes(number) for number in range(len(self.steps))]

    def _bytes(self, number: int) -> _Bytes | None:
        if not isinstance(part := self.steps[number].part, Box | None):
            return None
        local = self.locals[self.steps[number].name]
        tensor = _part(local, part)
        lazy = tensor.is_conj() or tensor.is_neg()
        runs = tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy
        return as_bytes(tensor) if runs else None


class _HostLane:
    """Copies in `push`, by the thread that feeds. See `Lane`."""

    limit = 1
    free = False

    def __init__(self, slot: Slot, sources: CopySources) -> None:
        self._slot = slot
        self._sources = sources

    def push(self, group: CopyGroup) -> CopyMark:
        for number in group.steps:
            self._sources.copy(number, self._slot)
        if group.task is not None:
            group.task()
        return self

    def done(self) -> bool:
        return True


class Snapshot:
    """One save's copying: what may not wait at once, the rest in another thread.

    Parameters
    ----------
    sources
        What is copied.
    slot
        Where it goes.
    look
        Digest what is held now and again when it is copied: finds also what torch does not count
        as a mutation (writes through ``.data`` or numpy). Costs a pass over the state.
    cuda
        Carries out the copies from CUDA devices.
    clone
        See `CudaSnapshot`.
    samples
        Gets digests of what ranks hold in common, each of the values that are copied. None: ranks
        are not compared.
    timeout_s
        A device that copies nothing for so long hangs.

    Attributes
    ----------
    on_device
        Whether anything is copied from a CUDA device, so that `order` lets the host go on.

    Notes
    -----
    Tensors on the host and on CUDA devices may be held. What is on other accelerators is copied at
    once and synchronously.
    """

    def __init__(
        self,
        sources: CopySources,
        slot: Slot,
        *,
        look: bool = False,
        cuda: CudaCopies | None = None,
        clone: bool = True,
        samples: Samples | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._steps = steps = sources.steps
        self._slot = slot
        self._sources: CopySources | None = sources
        self._samples = samples
        self._shared = cuda
        self._clone = clone
        self._timeout_s = timeout_s
        self._locals: Mapping[str, torch.Tensor] = sources.locals
        self._late: Mapping[str, torch.Tensor] = sources.late
        self._versions = sources.versions()
        self._counts: Callable[[], dict[str, list[int]]] = sources.versions
        # Before anything is copied: what is written from now on is not of this step.
        self._watched = sources.watch.begin() if sources.late_on_host else None
        self._unsteady: list[str] = []
        # Until the gate opens nothing changes what is on the host; what a device has may change
        # before the host sees its copies done, so of that the staged bytes are compared.
        on_host = {n: x for n, x in self._late.items() if not x.is_cuda} if look else {}
        self._digests = {name: _digest(local) for name, local in on_host.items()}
        self._staged_digests = {
            number: _digest(sources.source(number).cpu())
            for number, step in enumerate(steps if look else ())
            if step.name in self._late and step.name not in on_host
        }
        self._checking = threading.Lock()
        self._changed: list[str] | None = None
        self._on_cuda: CudaSnapshot | None = None
        self._feed: CopyFeed | None = None
        self.on_device = False

    @property
    def _live(self) -> CopySources:
        if self._sources is None:
            raise SaveError("this snapshot has been copied already", kind="internal")
        return self._sources

    # -- in save ---------------------------------------------------------------------------------

    def copy_now(self) -> None:
        """Copy what may change at any time. Returns when it is copied, or cloned on its device."""
        for number in self._live.early:
            self._live.copy(number, self._slot)
        for number in self._live.early:
            name = self._steps[number].name
            if name in self._live.shared and not self._live.is_copied(number, self._slot):
                self._unsteady.append(name)
        if self._samples is not None:
            for leaf in self._common("cpu", late=False):
                self._samples(leaf.tensor)
        if (self._live.mixed or self._samples is not None) and (devices := self._devices()):
            self._begin_on(devices)

    def _common(self, kind: str, *, late: bool) -> list[TensorLeaf]:
        """Return the leaves that other ranks hold as well, on devices of a kind or not of CUDA."""
        return [
            leaf
            for leaf in self._live.leaves.values()
            if self._samples is not None
            and self._samples.wants(leaf.tensor)
            and (leaf.tensor.device.type == "cuda") == (kind == "cuda")
            and self._live.is_held(leaf) == late
        ]

    def _devices(self) -> dict[torch.device, OnDevice]:
        """Return what is on CUDA devices, without the steps."""
        found = {x.device: OnDevice() for x in self._locals.values() if x.is_cuda}
        if self._samples is not None:
            for late in (False, True):
                for leaf in self._common("cuda", late=late):
                    local = local_tensor(leaf.tensor)
                    part = found.setdefault(local.device, OnDevice())
                    common = part.common_late if late else part.common_early
                    common.append((leaf.tensor, local))
        return found

    def _begin_on(self, devices: dict[torch.device, OnDevice]) -> None:
        for number, step in enumerate(self._steps):
            local = self._locals[step.name]
            if not local.is_cuda:
                continue
            part = devices[local.device]
            if step.name in self._late:
                part.late.append(number)
                part.held[step.name] = local
            else:
                part.early.append(number)
        self._on_cuda = CudaSnapshot(
            self._shared or CudaCopies(),
            self._slot,
            devices,
            self._steps,
            self._live.source,
            clone=self._clone,
            timeout_s=self._timeout_s,
        )
        groups = self._on_cuda.groups + self._host_groups()
        self._feed = self._feed_of(groups, self._on_cuda.placed)
        self.on_device = True

    def _host_groups(self) -> list[CopyGroup]:
        lane = _HostLane(self._slot, self._live)
        late, most = self._live.late_on_host, len(self._steps)
        groups = list(grouped(lane, self._steps, late, REPORT_BYTES, most))
        if self._samples is not None:
            groups.append(CopyGroup(lane, (), self._sample_late))
        return groups

    def _sample_late(self) -> None:
        if self._samples is not None:
            for leaf in self._common("cpu", late=True):
                self._samples(leaf.tensor)

    def _feed_of(self, groups: Iterable[CopyGroup], placed: Iterable[int]) -> CopyFeed:
        def report(front: int) -> None:
            self._slot.staged = front

        return CopyFeed(self._steps, groups, report, (*self._live.early, *placed))

    # -- in the copying thread -------------------------------------------------------------------

    def copy_rest(self) -> None:
        """Copy what is held, front to back; on return the snapshot's tensors are all there.

        Raises
        ------
        SaveError
            kind ``mutated``: something changed before it was copied; the snapshot is worth
            nothing. Names what. Kind ``draining``: a device hangs.
        """
        if self._feed is None:
            self._feed = self._feed_of(self._host_groups(), ())
        with nullcontext() if self._on_cuda is None else self._on_cuda.devices():
            try:
                self._feed.run(self._timeout_s)
                if self._on_cuda is not None and self._samples is not None:
                    self._on_cuda.give(self._samples)
                self._check()
            finally:
                self._release_sources()
        self._slot.staged = self._steps[-1].end if self._steps else 0

    def _release_sources(self) -> None:
        """Drop what keeps memory, unless a device may still use it."""
        if self._feed is not None and not self._feed.stuck:
            if self._on_cuda is not None:
                self._on_cuda.release()
            self._feed = self._on_cuda = None
            with self._checking:
                self._changed = self._changed or []
                if self._watched is not None:
                    self._watched.end()
                self._watched, self._counts = None, dict
            self._locals, self._late, self._sources = {}, {}, None

    def _check(self) -> None:
        changed = self._changes() + self._unsteady
        if self._on_cuda is not None:
            changed += self._on_cuda.changed()
        for number, wanted in self._staged_digests.items():
            step = self._steps[number]
            if digest(self._slot.data[step.start : step.end]) != wanted:
                changed.append(step.name)
        if changed:
            raise _mutated(changed)

    def _changes(self) -> list[str]:
        """Return what has changed by now, or by the time when the gate opened."""
        with self._checking:
            if self._changed is None:
                now = self._counts()
                self._changed = [n for n, v in self._versions.items() if now[n] != v]
                if self._watched is not None:
                    at = np.frombuffer(self._slot.data, np.uint8).ctypes.data
                    self._changed += self._watched.changed(at)
                self._changed += [
                    n for n, d in self._digests.items() if _digest(self._late[n]) != d
                ]
            return list(self._changed)

    # -- at the gate -----------------------------------------------------------------------------

    def order(self, timeout_s: float) -> bool:
        """Let what the current streams do from now on come after the copies.

        The host waits for copies of what is on the host alone.

        Returns
        -------
        bool
            False: even that took longer than `timeout_s`.
        """
        feed, on_cuda = self._feed, self._on_cuda
        if feed is None or on_cuda is None:
            return True  # everything is copied, or given up
        if not feed.hurry(timeout_s):
            return False
        self._changes()
        on_cuda.order()
        return True

    @property
    def stuck(self) -> bool:
        """Whether a device may still write into the slot though the copying was given up."""
        feed = self._feed
        return feed is not None and feed.stuck


def _mutated(names: Iterable[str]) -> SaveError:
    found = sorted(set(names))
    return SaveError(
        f"{len(found)} tensors changed before they were copied",
        kind="mutated",
        where=", ".join(found[:5]) + (", ..." if len(found) > 5 else ""),
        wanted="no change between save() and before_mutation() or the optimizer's step",
        hint="call before_mutation() of the checkpointer before whatever changes them, or "
        'make it with lazy="off"; memory that other processes write needs them to wait',
    )


def _counted(leaf: TensorLeaf, local: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose counts torch raises when a leaf is changed in place.

    An operation on a DTensor raises the count of the DTensor, and not always that of the tensor
    inside; the detached leaf has counts of its own.
    """
    if not is_dtensor(leaf.origin):
        return [local]
    return [local, leaf.origin, local_tensor(leaf.origin)]


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _lies_in(tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> bool:
    if not ranges or not _on_host(tensor) or not tensor.numel():
        return False
    at = tensor.data_ptr()
    found = bisect.bisect_right(ranges, (at, 1 << 64)) - 1
    # Page-locked memory is mapped as shared by the driver, and no other process has it.
    return found >= 0 and at < ranges[found][1] and not tensor.is_pinned()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has its memory for itself, in whatever order."""
    if tensor.is_contiguous():
        return True
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return reach == tensor.numel()


def _part(local: torch.Tensor, part: Box | StridedWindow | None) -> torch.Tensor:
    if isinstance(part, Box):
        for dim, (offset, size) in enumerate(zip(part.offset, part.shape, strict=True)):
            local = local.narrow(dim, offset, size)
    elif part is not None:
        flat = local.contiguous().view(-1)
        return flat.as_strided(part.shape, part.strides, flat.storage_offset() + part.start)
    return local


def _digest(local: torch.Tensor) -> bytes:
    plain = local.contiguous().resolve_conj().resolve_neg()
    return digest(as_bytes(plain).data)


def _copy(source: torch.Tensor, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    lazy = source.is_conj() or source.is_neg()
    if source.device.type == "cpu" and source.is_contiguous() and not lazy:
        np.copyto(target, as_bytes(source))
        return
    view = torch.from_numpy(target).view(source.dtype).view(source.shape)
    view.copy_(source)
