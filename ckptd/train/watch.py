"""Finds writes to host memory between `save` and the end of its copying, counted by torch or not.

torch counts changes of a tensor by the object that was asked for them: not those through ``.data``
or numpy, by other processes, by fused or `foreach` kernels below autograd. So memory itself is
watched. Where the kernel counts writes to pages (`ckptd.train.pages`), whole pages are its matter,
and what shares its first and last page with others is kept and compared. Where it does not, all
bytes are kept and compared as long as they are few, and else as many as cost little, at places that
are drawn anew for each save.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.arena import anonymous_file
from ckptd.train.pages import PAGE, Count, MappedRange, Pages, Range

__all__ = ["Span", "Watch", "Watched"]

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
class Span:
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


class Watch:
    """Watches the same spans, save for save.

    Parameters
    ----------
    spans
        They stay mapped as long as this is used.
    mappings
        Of this process, from `ckptd.train.pages.mappings`.
    pages
        The kernel's eye; None: it has none.

    Attributes
    ----------
    odds
        The chance that a write of a single byte is found. It is 1 where the kernel counts all
        writes, or all bytes are compared.
    """

    def __init__(
        self, spans: Sequence[Span], mappings: Sequence[MappedRange], pages: Pages | None
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

    def begin(self) -> Watched:
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
        return Watched(self, count, self._file, spans, offsets, sizes)


class Watched:
    """What was there when `Watch.begin` was called."""

    def __init__(
        self,
        watch: Watch,
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


def _inner(span: Span) -> Range:
    """Return the pages that are this span's alone."""
    start = -(-span.at // PAGE) * PAGE
    return start, max(start, (span.at + span.nbytes) // PAGE * PAGE)


def _countable(spans: Sequence[Span], mappings: Sequence[MappedRange], pages: Pages) -> set[int]:
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
