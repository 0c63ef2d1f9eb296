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

from ckptd.errors import DeadlineError
from ckptd.format.digest import BLOCK_BYTES
from ckptd.format.filemap import ChunkRef
from ckptd.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.layout.clip import clip
from ckptd.layout.grid import Grid
from ckptd.load.files import LocalFiles, PieceLocations
from ckptd.load.plan import BlockLine, PlannedCopy, Runs, put
from ckptd.load.read import Fetcher
from ckptd.reshard.plan import Feed, RoundPlan, RoundPlanner, Stretch, Target, cut_rounds
from ckptd.runtime.pool import run_all

__all__ = ["BlockCache", "Ledger", "Reading", "ValueReader"]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Blocks ``[lo, hi)`` of one file, the moves that take from them, and which ends are kept."""

    file: int
    lo: int
    hi: int
    data: U8 | None
    moves: list[PlannedCopy]
    kept: tuple[int, ...]


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
            kinds ``digest``, ``truncated``, ``missing-file``, ``bad-size``, ``bad-index``.
        """
        store = self._source.store
        with LocalFiles(store, self._source.files) as files:
            fetcher = Fetcher(
                store,
                self._source,
                self._line,
                files if store.capabilities.local_files else None,
                threads=self._threads,
                stall_s=self._stall_s,
            )
            used = {f for _, runs in plan.turns for f in self._line.files_of(runs)}
            fetcher.check_files(sorted(used), lambda: None, anywhere=True)
            for moves, runs in plan.turns:

                def work(window: _Window) -> None:
                    data = self._bring(window, fetcher) if window.data is None else window.data
                    for move in window.moves:
                        self._scatter(window, data, move, memory[move.target])

                run_all(
                    self._windows(moves, runs),
                    work,
                    threads=self._threads,
                    stall_s=self._stall_s,
                    what="reading the source",
                )

    # -- windows -------------------------------------------------------------------------------

    def _windows(self, moves: list[PlannedCopy], runs: Runs) -> Iterator[_Window]:
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

    def _span(self, move: PlannedCopy) -> tuple[int, int]:
        return self._line.positions(move.file, *move.span)

    def _bring(self, window: _Window, fetcher: Fetcher) -> U8:
        """Read and check a window; keep the blocks that another round may want as well."""
        start, end = self._line.byte_range(window.file, window.lo, window.hi)
        data = self._room()[: end - start]
        fetcher.bring(window.file, window.lo, data.data)
        with self._lock:
            self.bytes_read += end - start
        for position in window.kept:
            at = (position - window.lo) * BLOCK_BYTES
            self._cache.keep(position, data[at : at + BLOCK_BYTES])
        return data

    def _room(self) -> U8:
        found: U8 | None = getattr(self._scratch, "room", None)
        if found is None:
            found = self._scratch.room = self._rooms.slab(self._blocks * BLOCK_BYTES)
        return found

    def _scatter(self, window: _Window, data: U8, move: PlannedCopy, target: U8) -> None:
        """Copy what a window has of a move."""
        start, end = self._line.byte_range(window.file, window.lo, window.hi)
        # No element lies in two digest blocks: chunks are aligned to their item size.
        lo = -((move.start - start) // move.itemsize)
        hi = -((move.start - end) // move.itemsize)
        for block in clip(move.block, "source", lo, hi):
            put(move, block, data, move.start - start, target)


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
