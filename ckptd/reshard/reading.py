"""Reading the blocks that a round needs, comparing them with their digests, scattering them.

A window of a few blocks is read, hashed and scattered into the staging memory while it is warm in
the processor's cache, by one thread; several do so side by side. Blocks at the ends of runs are
kept for a while: the next round most often begins in the middle of them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError, DeadlineError, NotFoundError
from ckptd.format.digest import BLOCK_BYTES, digest
from ckptd.layout.block import Block
from ckptd.layout.clip import clip
from ckptd.load.files import LocalFiles, PieceLocations, missing_file
from ckptd.load.plan import BlockLine, Runs, strided, words_of
from ckptd.reshard.moves import RoundPlan, StagedCopy
from ckptd.runtime.pool import run_all
from ckptd.types import DType

__all__ = ["BlockCache", "Ledger", "Reading", "put"]


_POLL_S = 0.05
_PAGE = 4096
_SLACK = 8
"""A slab may be larger than asked for by one such part: rounds are alike, not the same."""


class Ledger:
    """Hands out page-aligned memory, at most `limit` bytes at a time.

    Parameters
    ----------
    limit
        Bytes that may be out at a time. A single slab may be larger: then it is out alone.
    stall_s
        Longest wait in seconds without anything given back.
    """

    def __init__(self, limit: int, stall_s: float = 900.0) -> None:
        self._limit = limit
        self._stall_s = stall_s
        # Re-entrant: a finalizer may run in the thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._out = 0
        self._idle: list[mmap.mmap] = []
        self.peak = 0

    def wait(self, nbytes: int, idle: Callable[[], bool]) -> None:
        """Return when `nbytes` more would stay within the limit.

        Parameters
        ----------
        idle
            Tells that waiting helps no more: nobody is at work who would give something back.
            Raises what went wrong there.

        Raises
        ------
        DeadlineError
            kind ``stalled``.
        """
        waited, seen = 0.0, -1
        with self._changed:
            while self._out and self._out + nbytes > self._limit and not idle():
                if self._out != seen:
                    waited, seen = 0.0, self._out
                if waited > self._stall_s:
                    raise DeadlineError(
                        "writing made no progress",
                        kind="stalled",
                        wanted=f"a step within {self._stall_s:.0f} s",
                        hint="is the file system or the object store reachable?",
                    )
                self._changed.wait(_POLL_S)
                waited += _POLL_S

    def slab(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory that begins at a page; what is in it is whatever was."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        with self._changed:
            memory = self._take(size) or _map(size)
            self._out += len(memory)
            self.peak = max(self.peak, self._out)
        # What is watched is not the mapping itself, which is to be handed out again.
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(buffer, self._back, memory).atexit = False
        return np.frombuffer(memoryview(buffer), dtype=np.uint8, count=nbytes)

    def _take(self, size: int) -> mmap.mmap | None:
        """Return an idle slab of about this size; else make room for a new one."""
        fits = [m for m in self._idle if size <= len(m) <= size + size // _SLACK]
        if fits:
            best = min(fits, key=len)
            self._idle.remove(best)
            return best
        while self._idle and self._out + sum(map(len, self._idle)) + size > self._limit:
            self._idle.pop(0)
        return None

    def _back(self, memory: mmap.mmap) -> None:
        with self._changed:
            self._out -= len(memory)
            self._idle.append(memory)
            self._changed.notify_all()


def _map(size: int) -> mmap.mmap:
    # Private: shared memory has its own, usual setting that forbids huge pages, and a million
    # faults of 4 KiB for a few GiB cost more than all copies.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


U8 = NDArray[np.uint8]

_TAIL = 15
"""Bytes read beyond a window of files that are not ours: an element may lie across its end."""


class BlockCache:
    """Verified blocks by line position, the oldest forgotten first.

    Parameters
    ----------
    limit
        Most bytes.
    """

    def __init__(self, limit: int) -> None:
        self._most = limit // BLOCK_BYTES
        self._ledger = Ledger(limit)
        self._blocks: OrderedDict[int, U8] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, position: int, data: U8) -> None:
        """Keep a copy of a block."""
        if self._most and position not in self._blocks:
            copy = self._ledger.slab(len(data))
            np.copyto(copy, data)
            with self._lock:
                self._blocks[position] = copy
                if len(self._blocks) > self._most:
                    self._blocks.popitem(last=False)

    def split(self, runs: Runs) -> tuple[Runs, list[tuple[int, U8]]]:
        """Return what must be read of some runs, and the blocks that are here."""
        found = []
        cuts = []
        with self._lock:
            for position, data in self._blocks.items():
                at = int(np.searchsorted(runs[:, 0], position, side="right")) - 1
                if at >= 0 and position < int(runs[at, 1]):
                    found.append((position, data))
                    cuts.append(position)
        return _without(runs, sorted(cuts)), found


def _without(runs: Runs, cuts: Sequence[int]) -> Runs:
    """Return runs less single positions."""
    if not cuts:
        return runs
    out = []
    at = 0
    for lo, hi in runs.tolist():
        while at < len(cuts) and cuts[at] < hi:
            out.append((lo, cuts[at]))
            lo = cuts[at] + 1
            at += 1
        out.append((lo, hi))
    pairs = np.array(out, dtype=np.int64).reshape(-1, 2)
    # Not `merge`: neighbours that a cut parts must stay apart, and nothing overlaps here.
    return pairs[pairs[:, 1] > pairs[:, 0]]


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Blocks ``[lo, hi)`` of one file, the moves that take from them, and which ends are kept."""

    file: int
    lo: int
    hi: int
    data: U8 | None
    moves: list[StagedCopy]
    kept: tuple[int, ...]


class Reading:
    """Reads for one process.

    Parameters
    ----------
    source
        What is read.
    line
        Positions of its blocks.
    threads
        Concurrent reads.
    window_blocks
        Blocks of one read.
    cache
        Where blocks at the ends of runs are kept.
    stall_s
        Longest time in seconds without progress.
    """

    def __init__(
        self,
        source: PieceLocations,
        line: BlockLine,
        *,
        threads: int,
        window_blocks: int,
        cache: BlockCache,
        stall_s: float,
    ) -> None:
        self._source = source
        self._line = line
        self._threads = threads
        self._blocks = window_blocks
        self._cache = cache
        self._stall_s = stall_s
        self._local = source.store.capabilities.local_files
        self._scratch = threading.local()
        self._rooms = Ledger(threads * window_blocks * BLOCK_BYTES)
        self._lock = threading.Lock()
        self.bytes_read = 0

    def run(
        self,
        plan: RoundPlan,
        memory: Sequence[U8],
        dtypes: Sequence[DType],
        pulse: Callable[[], None],
    ) -> None:
        """Do the copies of a round; fills and literals are not its business.

        Parameters
        ----------
        plan
            The round.
        memory
            Staging memory of each stretch.
        dtypes
            Of the target's tensors.
        pulse
            Called from threads, now and then.

        Raises
        ------
        CorruptError
            kinds ``digest``, ``truncated``, ``missing-file``, ``bad-size``, ``bad-index``.
        """
        for _, runs in plan.turns:
            for file in self._line.files_of(runs):
                self._source.check_file(file)
        with LocalFiles(self._source.store, self._source.files) as files:
            for moves, runs in plan.turns:

                def work(window: _Window) -> None:
                    data = self._bring(window, files) if window.data is None else window.data
                    for move in window.moves:
                        self._scatter(window, data, move, memory, dtypes)
                    pulse()

                run_all(
                    self._windows(moves, runs),
                    work,
                    threads=self._threads,
                    stall_s=self._stall_s,
                    what="reading the source",
                )

    # -- windows -------------------------------------------------------------------------------

    def _windows(self, moves: list[StagedCopy], runs: Runs) -> Iterator[_Window]:
        """Yield windows with their moves, in the order of the source's files."""
        spans = np.array([self._span(m) for m in moves], dtype=np.int64).reshape(-1, 2)
        order = np.argsort(spans[:, 0], kind="stable")
        spans = spans[order]
        reach = np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]
        missing, known = self._cache.split(runs)
        windows: list[tuple[int, int, U8 | None]] = [(p, p + 1, data) for p, data in known]
        windows += [(lo, hi, None) for _, lo, hi in self._line.windows(missing, self._blocks)]
        begins, ends = set(runs[:, 0].tolist()), set(runs[:, 1].tolist())
        for lo, hi, data in sorted(windows, key=lambda w: w[0]):
            first = int(np.searchsorted(reach, lo, side="right"))
            last = int(np.searchsorted(spans[:, 0], hi, side="left"))
            inside = [i for i in range(first, last) if spans[i, 1] > lo]
            found = [moves[order[i]] for i in inside]
            kept = {p for p, is_end in ((lo, lo in begins), (hi - 1, hi in ends)) if is_end}
            yield _Window(self._line.file_at(lo), lo, hi, data, found, tuple(kept))

    def _span(self, move: StagedCopy) -> tuple[int, int]:
        return self._line.positions(move.file, *move.span)

    def _bring(self, window: _Window, files: LocalFiles) -> U8:
        """Read and check a window."""
        index = self._source.indexes.get(window.file)
        entry = self._source.files[window.file]
        start, end = self._line.byte_range(window.file, window.lo, window.hi)
        wanted = end if index is not None else min(entry.data_bytes, end + _TAIL)
        data = self._room()[: wanted - start]
        if self._local:
            files.read(window.file, start, data.data)
        else:
            self._fetch(window.file, start, data)
        with self._lock:
            self.bytes_read += wanted - start
        if index is not None:
            self._check(window, start, data)
            self._keep(window, data)
        return data

    def _room(self) -> U8:
        found: U8 | None = getattr(self._scratch, "room", None)
        if found is None:
            found = self._scratch.room = self._rooms.slab(self._blocks * BLOCK_BYTES + _TAIL)
        return found

    def _fetch(self, file: int, start: int, data: U8) -> None:
        entry = self._source.files[file]
        try:
            self._source.store.read_into(entry.path, entry.data_start + start, data.data)
        except NotFoundError:
            raise missing_file(entry.path, entry.rank) from None

    def _keep(self, window: _Window, data: U8) -> None:
        """Keep the blocks at the ends of runs, which another round may want as well."""
        for position in window.kept:
            at = (position - window.lo) * BLOCK_BYTES
            self._cache.keep(position, data[at : at + BLOCK_BYTES])

    def _check(self, window: _Window, start: int, data: U8) -> None:
        index = self._source.indexes.get(window.file)
        for at in range(0, len(data), BLOCK_BYTES):
            part = data[at : at + BLOCK_BYTES]
            block = (start + at) // BLOCK_BYTES
            if index is not None and digest(part.data) != index.block(block):
                raise self._damaged(window.file, block, len(part))

    def _damaged(self, file: int, block: int, length: int) -> CorruptError:
        entry = self._source.files[file]
        start = block * BLOCK_BYTES
        return CorruptError(
            "bytes of the source are not what was written",
            kind="digest",
            where=f"block {block} of {entry.path}, written by rank {entry.rank}: "
            + self._source.holders(file, start, start + length),
            hint="ckptd verify lists everything that is bad; reshard an older step",
        )

    # -- copies --------------------------------------------------------------------------------

    def _scatter(
        self,
        window: _Window,
        data: U8,
        move: StagedCopy,
        memory: Sequence[U8],
        dtypes: Sequence[DType],
    ) -> None:
        """Copy what a window has of a move."""
        source = self._source.filemap.dtypes[move.source_tensor]
        start, end = self._line.byte_range(window.file, window.lo, window.hi)
        # An element belongs to the window that has its first byte.
        lo = -((move.start - start) // source.itemsize)
        hi = -((move.start - end) // source.itemsize)
        for block in clip(move.block, "source", lo, hi):
            put(
                block,
                (data, move.start - start, source),
                (memory[move.stretch], 0, dtypes[move.tensor]),
                move,
            )


def put(
    block: Block, source: tuple[U8, int, DType], target: tuple[U8, int, DType], move: StagedCopy
) -> None:
    """Copy a block between two buffers, given as ``(bytes, place of element 0, type)``."""
    exact = move.change is None
    views = []
    for side, strides, at in (
        (source, block.source_strides, block.source_start),
        (target, block.target_strides, block.target_start),
    ):
        memory, base, dtype = side
        kind = words_of(dtype.itemsize) if exact else dtype.numpy
        views.append(strided(memory, base + at * dtype.itemsize, block.shape, strides, kind))
    if move.change is None:
        np.copyto(views[1], views[0], casting="no")
    else:
        move.change.put(views[1], views[0], block, move.shift)
