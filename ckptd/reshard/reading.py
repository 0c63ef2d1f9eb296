"""Reads the blocks of a round, verifies digests, scatters them into staging memory; windows.

In it: memory handed out (`Ledger`), cache of blocks; after which stall a read fails.

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
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.clip import clip
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.runs import Runs
from ckptd.base.grouping import by_key
from ckptd.base.runtime.pool import run_all
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.plan import BlockLine, PlannedCopy, needed_bytes, put
from ckptd.checkpoint.load.read import FAR_BYTES, Fetcher
from ckptd.errors import DeadlineError
from ckptd.reshard.plan import Feed, RoundPlan, RoundPlanner, Stretch, Target, cut_rounds
from ckptd.store.osio import pages

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
            Tells that waiting helps no more: no thread is at work that would give memory back.
            Raises the error of such a thread.

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
                        hint="check that the file system or object store is reachable",
                    )
                self._changed.wait(_POLL_S)
                waited += _POLL_S

    def slab(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory that begins at a page; what is in it is whatever was."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        with self._changed:
            memory = self._take(size) or pages(size)
            size = len(memory)
            self._out += size
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
        size = len(memory)  # a call, after which Python may collect: not between the two below
        with self._changed:
            self._out -= size
            self._idle.append(memory)
            self._changed.notify_all()


U8 = NDArray[np.uint8]


_NO_BYTES = np.empty(0, dtype=np.uint8)


class BlockCache:
    """Verified blocks by line position, the oldest forgotten first.

    Parameters
    ----------
    limit
        Most bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // BLOCK_BYTES
        self.most = 0
        """Most blocks that were kept at a time."""
        self._ledger = Ledger(limit)
        self._blocks: OrderedDict[int, U8] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, position: int, data: U8) -> None:
        """Keep a copy of a block."""
        if self._limit and position not in self._blocks:
            copy = self._ledger.slab(len(data))
            np.copyto(copy, data)
            with self._lock:
                self._blocks[position] = copy
                if len(self._blocks) > self._limit:
                    self._blocks.popitem(last=False)
                self.most = max(self.most, len(self._blocks))

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

    def bytes_missing(self, line: BlockLine, runs: Runs) -> int:
        """Return the bytes that a round reads of some runs, and keep what it keeps; no bytes."""
        missing, _ = self.split(runs)
        for position in np.stack((runs[:, 0], runs[:, 1] - 1), axis=1).ravel().tolist():
            self.keep(position, _NO_BYTES)
        return line.byte_count(missing)


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


def bytes_wanted(
    source: PieceLocations, line: BlockLine, moves: Sequence[PlannedCopy], runs: Runs
) -> tuple[Runs, dict[int, Runs]]:
    """Return what some copies read: blocks of files with digests, and bytes of those without.

    Parameters
    ----------
    source, line
        What is read, and the positions of its blocks.
    moves, runs
        The copies, and all blocks that hold their bytes.

    Returns
    -------
    blocks
        Those of `runs` whose files have digests.
    ranges
        By file, of its data section: what the copies take, and holes that cost less than a request.
    """
    loose = {f for f in line.files_of(runs) if not source.is_digested(f)}
    if not loose:
        return runs, {}
    keep = [line.file_at(lo) not in loose for lo in runs[:, 0].tolist()]
    local = source.store.capabilities.local_files
    ranges = needed_bytes(
        (m for m in moves if m.file in loose), FAR_BYTES if local else BLOCK_BYTES
    )
    return runs[np.array(keep, dtype=np.bool_)], ranges


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Bytes ``[start, end)`` of the data section of one file, read at once.

    Attributes
    ----------
    lo
        Position of its first block; None for a file without digests, which is not read in blocks.
    data
        The bytes, where they are known already.
    kept
        Positions of blocks that another round may want as well.
    """

    file: int
    start: int
    end: int
    lo: int | None = None
    data: U8 | None = None
    kept: tuple[int, ...] = ()


class Reading:
    """Does the copies of rounds: reads through a `Fetcher`, and scatters what it brings.

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
        self._scratch = threading.local()
        self._rooms = Ledger(threads * window_blocks * BLOCK_BYTES)
        self._lock = threading.Lock()
        self.bytes_read = 0

    def run(self, plan: RoundPlan, memory: Sequence[U8]) -> None:
        """Do the copies of a round; fills and literals are not its business.

        Parameters
        ----------
        plan
            The round.
        memory
            Staging memory of each stretch.

        Raises
        ------
        CorruptError
            kinds ``digest`` or ``truncated`` among others.
        """
        fetcher = self._fetcher
        used = {f for _, runs in plan.turns for f in self._line.files_of(runs)}
        fetcher.check_files(sorted(used), lambda: None, anywhere=True)
        for moves, runs in plan.turns:

            def work(task: tuple[_Window, list[PlannedCopy]]) -> None:
                window, found = task
                data = window.data
                if data is None:
                    data, found = self._room_for(window, found, memory)
                    self._bring(window, fetcher, data)
                for move in found:
                    self._scatter(window, data, move, memory[move.target])

            run_all(
                self._tasks(moves, runs),
                work,
                threads=self._threads,
                stall_s=self._stall_s,
                what="reading the source",
            )

    @cached_property
    def _fetcher(self) -> Fetcher:
        # No open descriptors: what they read stays in the page cache, and is not read again.
        return Fetcher(
            self._source.store,
            self._source,
            self._line,
            None,
            threads=self._threads,
            stall_s=self._stall_s,
        )

    def check_unchanged(self) -> None:
        """Look again at what was read; raises as `Fetcher.check_unchanged`."""
        self._fetcher.check_unchanged()

    # -- windows -------------------------------------------------------------------------------

    def _tasks(
        self, moves: Sequence[PlannedCopy], runs: Runs
    ) -> Iterator[tuple[_Window, list[PlannedCopy]]]:
        """Yield windows, and the moves that take from each, in the order of the source's files."""
        by_file = by_key((m.file, m) for m in sorted(moves, key=lambda m: m.span[0]))
        windows = sorted(self._windows(moves, runs), key=lambda w: (w.file, w.start))
        for file, mine in groupby(windows, key=lambda w: w.file):
            found = by_file[file]
            spans = np.array([m.span for m in found], dtype=np.int64)
            reach = np.maximum.accumulate(spans[:, 1])
            for window in mine:
                first = int(np.searchsorted(reach, window.start, side="right"))
                last = int(np.searchsorted(spans[:, 0], window.end, side="left"))
                yield window, [found[i] for i in range(first, last) if spans[i, 1] > window.start]

    def _windows(self, moves: Sequence[PlannedCopy], runs: Runs) -> Iterator[_Window]:
        blocks, ranges = bytes_wanted(self._source, self._line, moves, runs)
        missing, known = self._cache.split(blocks)
        for position, data in known:
            yield self._of_blocks(self._line.file_at(position), position, position + 1, data)
        begins, ends = set(blocks[:, 0].tolist()), set(blocks[:, 1].tolist())
        for file, lo, hi in self._line.windows(missing, self._blocks):
            kept = [p for p, is_end in ((lo, lo in begins), (hi - 1, hi in ends)) if is_end]
            yield self._of_blocks(file, lo, hi, None, tuple(kept))
        size = self._blocks * BLOCK_BYTES
        for file, pairs in ranges.items():
            for start, end in pairs.tolist():
                # At multiples of a block, so that none cuts an element.
                cuts = [start, end]
                if end - start > size:
                    cuts[1:1] = range(start // size * size + size, end, size)
                for lo, hi in pairwise(cuts):
                    yield _Window(file, lo, hi)

    def _of_blocks(
        self, file: int, lo: int, hi: int, data: U8 | None, kept: tuple[int, ...] = ()
    ) -> _Window:
        return _Window(file, *self._line.byte_range(file, lo, hi), lo, data, kept)

    def _room_for(
        self, window: _Window, moves: list[PlannedCopy], memory: Sequence[U8]
    ) -> tuple[U8, list[PlannedCopy]]:
        """Return where a window is read to, and the moves that are to be done from there.

        What one move takes as a whole is read to where it goes.
        """
        for i, move in enumerate(moves):
            block, (lo, hi) = move.block, move.span
            plain = move.conversion is None and len(block.shape) <= 1
            if plain and block.run_length == block.numel and lo <= window.start < window.end <= hi:
                at = block.target_start * move.itemsize + window.start - lo
                there = memory[move.target][at : at + window.end - window.start]
                return there, [*moves[:i], *moves[i + 1 :]]
        return self._room()[: window.end - window.start], moves

    def _bring(self, window: _Window, fetcher: Fetcher, data: U8) -> None:
        """Read and check a window; keep the blocks that another round may want as well."""
        if window.lo is None:
            fetcher.bring_bytes(window.file, window.start, data.data)
        else:
            fetcher.bring(window.file, window.lo, data.data)
            for position in window.kept:
                at = (position - window.lo) * BLOCK_BYTES
                self._cache.keep(position, data[at : at + BLOCK_BYTES])
        with self._lock:
            self.bytes_read += window.end - window.start

    def _room(self) -> U8:
        found: U8 | None = getattr(self._scratch, "room", None)
        if found is None:
            found = self._scratch.room = self._rooms.slab(self._blocks * BLOCK_BYTES)
        return found

    def _scatter(self, window: _Window, data: U8, move: PlannedCopy, target: U8) -> None:
        """Copy what a window has of a move."""
        # No element lies in two windows: chunks are aligned to their item size.
        lo = -((move.start - window.start) // move.itemsize)
        hi = -((move.start - window.end) // move.itemsize)
        for block in clip(move.block, "source", lo, hi):
            put(move, block, data, move.start - window.start, target)


_ROUND_BYTES = 32 << 20
_STALL_S = 900.0


class ValueReader:
    """Reads what would fill some small tensors, and writes no file.

    They lie one after the other in one buffer, which is read part by part.

    Parameters
    ----------
    source
        What is read.
    tensors
        Type, grid and feed of each. Fills are left out: no source has their values.
    """

    def __init__(self, source: PieceLocations, tensors: Sequence[tuple[str, Grid, Feed]]) -> None:
        tables = ManifestTables()
        entries = [
            TensorEntry(
                f"{number}",
                dtype,
                grid.shape,
                tables.grid(GridEntry.of(grid)),
                tables.owner(((0, 0, grid.npieces),)),
            )
            for number, (dtype, grid, _) in enumerate(tensors)
        ]
        feeds = [feed for _, _, feed in tensors]
        self._target = Target(1, tuple(entries), tables.grids, tables.owners, feeds)
        line = BlockLine([f.data_bytes for f in source.files])
        self._planner = RoundPlanner(source, self._target, line)
        self._reading = Reading(
            source, line, threads=2, window_blocks=2, cache=BlockCache(0), stall_s=_STALL_S
        )

    @property
    def chunks(self) -> list[ChunkRef]:
        """The pieces of all tensors, in the order of the buffer."""
        return self._planner.chunks(0)

    def parts(self) -> Iterator[Stretch]:
        """Yield the parts of the buffer, in order."""
        for stretches in cut_rounds(self._target.filemap, [0], _ROUND_BYTES):
            yield stretches[0]

    def read(self, part: Stretch, memory: U8) -> None:
        """Put the values of a part into `memory`; raises as `Reading.run`."""
        self._reading.run(self._planner.plan([part]), [memory])
