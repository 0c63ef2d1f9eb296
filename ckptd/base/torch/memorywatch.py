"""Watches memory for writes to tensors not yet copied: whole, by samples, by the kernel's pages.

In it: up to which size memory is compared whole; resized storages.

Where the kernel counts writes (`ckptd.base.runtime.memory`), pages that are one tensor's alone are
watched by it; other memory is compared, whole or by samples (`SpanWatch`). Memory that a storage
gives back is noted as it does so, on every device (`Resizes`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.runtime.memory import (
    PAGE,
    Count,
    MappedRange,
    Pages,
    Range,
    anonymous_file,
    common,
    gather,
    joined,
)

SMALL_SPAN_BYTES = 4 * PAGE
"""A tensor up to this size is compared whole: asking the kernel costs as much."""
WHOLE_BYTES = 32 << 20
"""So much is compared whole where the kernel does not count writes; of more there are samples."""
SAMPLED_BYTES = 16 << 20
WINDOW_BYTES = 1024
"""Of one sample."""

_Ints = NDArray[np.int64]


class MemorySpan(msgspec.Struct, frozen=True):
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
        self._at = _ints([s.at for s in self.spans])
        self._sizes = _ints([s.nbytes for s in self.spans])
        self._slots = _ints([-1 if s.slot is None else s.slot for s in self.spans])
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
        self.ranges = joined(r for r, _ in ranges)
        # What little lies between is counted with them: a call costs as much as many pages.
        self._stretches = joined(self.ranges, SMALL_SPAN_BYTES)
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
        self._fixed = tuple(_ints([p[i] for p in fixed]) for i in range(3))
        self._drawn = np.repeat(_ints([w[0] for w in windows]), _ints([w[1] for w in windows]))

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
    """Memory of the spans when `SpanWatch.begin` was called, to compare with later."""

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
        gather(file, 0, watch._at[spans] + offsets, sizes)

    def changed(self, slot: int) -> list[str]:
        """Return the names of what was written, or is not what the slot at an address holds.

        It is called when everything is copied, and before anything may change.
        """
        found = set(self._written())
        slots = self._watch._slots
        starts = np.where(slots < 0, self._watch._at, slot + slots)
        try:
            gather(self._file, self._total, starts[self._spans] + self._offsets, self._sizes)
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
        for start, _ in common(written, watch.ranges):
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
        """Make writes to the memory cost nothing again."""
        if self._count is not None:
            self._count.end()
        self._count = None


def _ints(values: list[int]) -> _Ints:
    return np.array(values, np.int64)


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
