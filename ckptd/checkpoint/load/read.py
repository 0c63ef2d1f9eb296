"""Carries a read out: fetch and verify blocks, agree, write; threads, windows, retries, budget.

In it: how many threads; runs that are read together; how long an interrupted read waits; figures of
a read; damaged files that are read again elsewhere.

`execute` runs in two passes. Pass 1 brings every digest block that is needed and compares it with
the digest index; ranks that share a host bring each block once. Then all ranks of the job agree
that all is well, and only then pass 2 touches live buffers. When the bytes do not fit the budget
the passes alternate in waves; a failure after the first written wave leaves the state half
written, and the error says so (`state_corrupted`).

Local files are hashed where the page cache has them, and else read block by block into a small
reusable buffer, hashed and dropped: the page cache is the buffer, and pass 2 takes the bytes from
it again. Neither pass copies more than it must. Measured on a virtual disk: two
buffered readers reach 2.1 GB/s cold and 30 GB/s warm, O_DIRECT readers 1.2 GB/s; threads must
share one descriptor, because read-ahead lives in it. Should the kernel drop some of the bytes
between the passes, they are read again, unverified: committed files never change, and a lease keeps
them from deletion. From other stores ranges are read, several at a time, into a host buffer that
pass 2 copies from.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES, digest
from ckptd.base.grids.grid import is_packed
from ckptd.base.grids.runs import Runs, clip, coalesce, count, merge
from ckptd.base.runtime.copier import LEAST_BYTES, copies_natively, copy_runs
from ckptd.base.runtime.host import available_bytes
from ckptd.base.runtime.pool import cores, run_all
from ckptd.base.runtime.spare import SPARE
from ckptd.checkpoint.format.names import digests_key
from ckptd.checkpoint.load.files import (
    LocalFiles,
    PieceLocations,
    blame,
    check_size,
    load_index,
    read_stored,
)
from ckptd.checkpoint.load.hostgroup import (
    HostBuffer,
    HostGroup,
    Needs,
    ReadSchedule,
    Wave,
    make_schedule,
)
from ckptd.checkpoint.load.plan import (
    BlockLine,
    Moves,
    PlannedCopy,
    ReadPlan,
    needed_bytes,
    put,
    split,
)
from ckptd.checkpoint.load.target import DeviceBatch, DeviceWriter
from ckptd.checkpoint.load.union import UnionStore
from ckptd.errors import CkptdError, CorruptError
from ckptd.store.base import Store

T = TypeVar("T")
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

LOCAL_WINDOW_BLOCKS = 4
_LEAST_WINDOW = LOCAL_WINDOW_BLOCKS * BLOCK_BYTES


class Windows(threading.local):
    """Memory of each thread's own, which stays warm from read to read."""

    def __init__(self) -> None:
        self._array = np.empty(0, dtype=np.uint8)

    def get(self, size: int) -> NDArray[np.uint8]:
        """Return so many bytes, in which anything may stand."""
        if len(self._array) < size:
            self._array = np.empty(max(size, _LEAST_WINDOW), dtype=np.uint8)
        return self._array[:size]


class Fetcher:
    """Reads and checks blocks of one checkpoint.

    Parameters
    ----------
    store
        The checkpoint's root.
    places
        The checkpoint.
    line
        Positions of its blocks.
    files
        Its data files, where they are read through descriptors; None: through the store.
    threads
        Concurrent reads.
    stall_s
        Longest time without progress, in seconds.
    """

    def __init__(
        self,
        store: Store,
        places: PieceLocations,
        line: BlockLine,
        files: LocalFiles | None,
        *,
        threads: int,
        stall_s: float,
    ) -> None:
        self._store = store
        self._places = places
        self._line = line
        self._files = files
        self._threads = threads
        self._stall_s = stall_s
        self._windows = Windows()

    def check_files(self, files: list[int], on_file: Callable[[], None], *, anywhere: bool) -> None:
        """Compare the sizes of `files` with the manifest, and read and check their indexes.

        What another fetcher of this checkpoint has checked is not checked again.

        Parameters
        ----------
        on_file
            Called from threads after each that was checked.
        anywhere
            Where the store is a union, go on with the next source when one is wrong. Not where
            files are open already: those stay what they are.

        Raises
        ------
        CorruptError
            kinds ``truncated`` or ``digest`` among others.
        """

        def work(file: int) -> None:
            self._check_file(file, anywhere)
            on_file()

        new = [f for f in files if f not in self._places.sized or f not in self._places.indexes]
        if new:
            threads = min(len(new), max(self._threads, 4))
            self._all(new, work, "checking sizes and digest indexes", threads)

    def check_unchanged(self) -> None:
        """Check again the files without digests that any rank has read of this checkpoint.

        Other programs write theirs again under the same name: what was read would be of two. The
        same goes for the files that say where things lie.

        Raises
        ------
        CorruptError
            kinds ``replaced`` or ``truncated`` among others.
        """
        places = self._places
        loose = [file for file in sorted(places.sized) if not places.is_digested(file)]
        if loose:
            self._store.check_unchanged()
            work: Callable[[int], None] = lambda f: check_size(self._store, places.files[f])  # noqa: E731
            threads = min(len(loose), max(self._threads, 4))
            self._all(loose, work, "looking whether files have changed", threads)

    def _check_file(self, file: int, anywhere: bool) -> None:
        entry = self._places.files[file]
        if file not in self._places.sized:
            self._good(entry.path, lambda: check_size(self._store, entry), anywhere)
            self._places.sized.add(file)
        if file not in self._places.indexes:
            self._places.indexes[file] = self._good(
                digests_key(entry.path), lambda: load_index(self._store, entry), anywhere
            )

    def _good(self, key: str, look: Callable[[], T], anywhere: bool = True) -> T:
        """Return what `look` finds in the first source of a union in which `key` is good."""
        while True:
            store = self._store
            served = store.serving(key) if isinstance(store, UnionStore) else None
            try:
                return look()
            except CorruptError:
                union = store if anywhere and isinstance(store, UnionStore) else None
                if union is None or not union.distrust(key, served):
                    raise

    def check_memory(self, file: int, data: memoryview, runs: Runs) -> None:
        """Compare blocks of a file whose data section lies in memory with their digests.

        Raises
        ------
        CorruptError
            kind ``digest``; what `check_files` raises for its index.
        """
        self.check_files([file], lambda: None, anywhere=True)

        def work(window: tuple[int, int, int]) -> None:
            _, lo, hi = window
            start, end = self._line.byte_range(file, lo, hi)
            self._check(file, lo, data[start:end], runs)

        windows = self._line.windows(runs, LOCAL_WINDOW_BLOCKS)
        self._all(windows, work, "comparing what is in memory", self._threads)

    def fetch(
        self,
        runs: Runs,
        everybody: Runs,
        buffer: HostBuffer | None,
        on_bytes: Callable[[int], None],
        loose: Mapping[int, Runs],
    ) -> None:
        """Read the blocks `runs`, and check each.

        Parameters
        ----------
        runs
            Blocks that this reader brings.
        everybody
            Blocks that the readers of this host want; a hole of one block between them is read
            along to save a request.
        buffer
            Where the bytes go; None for local files, whose bytes stay in the page cache.
        on_bytes
            Called from threads with the number of bytes read.
        loose
            Byte ranges of data sections that are wanted of files without digests, by file: no more
            is read of these.

        Raises
        ------
        CorruptError
            kinds ``digest`` or ``truncated``: names tensors, chunks, file, rank and block.
        """
        if buffer is None:
            size, gap = LOCAL_WINDOW_BLOCKS, 0
        else:
            size, gap = max(1, self._store.capabilities.block_bytes // BLOCK_BYTES), 1

        def work(window: tuple[int, int, int]) -> None:
            file, lo, hi = window
            start, end = self._line.byte_range(file, lo, hi)
            if file in loose:
                own = self._windows.get(end - start).data
                view = own if buffer is None else buffer.view(file, start, end)
                for a, b in clip(loose[file], start, end).tolist():
                    self.bring_bytes(file, a, view[a - start : b - start])
                    on_bytes(b - a)
                return
            if buffer is not None:
                self.bring(file, lo, buffer.view(file, start, end), runs)
            elif not self._check_in_place(file, lo, start, end, runs):
                # One block at a time: it is hashed while the core's own cache has it.
                for block in range(lo, hi):
                    first, past = self._line.byte_range(file, block, block + 1)
                    self.bring(file, block, self._windows.get(past - first).data, runs)
            on_bytes(end - start)

        windows = self._line.windows(coalesce(runs, gap, everybody), size)
        self._all(windows, work, "reading the checkpoint", self._threads)

    def _all(self, items: Iterable[T], work: Callable[[T], None], what: str, threads: int) -> None:
        run_all(items, work, threads=threads, stall_s=self._stall_s, what=what)

    def _check_in_place(self, file: int, lo: int, start: int, end: int, runs: Runs) -> bool:
        """Check bytes of a local file where they lie in memory; False where they must be read."""
        if self._files is None:
            return False
        with self._files.touching(file, start, end, count=True) as found:
            if found is not None:
                self._check(file, lo, found[start:end].data, runs)
            return found is not None

    def bring(self, file: int, lo: int, view: memoryview, runs: Runs | None = None) -> None:
        """Fill `view` from block `lo` of the line on, and check the blocks in it.

        Parameters
        ----------
        file
            The file of that block.
        view
            Whole blocks, up to the end of the file.
        runs
            Blocks that are to be checked; None: all of them.

        Raises
        ------
        CorruptError
            See `fetch`.
        """
        start, _ = self._line.byte_range(file, lo, lo)
        self._bring(file, start, view, lambda: self._check(file, lo, view, runs))

    def bring_bytes(self, file: int, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the data section of a file without digests.

        Raises
        ------
        CorruptError
            kind ``truncated`` among others.
        """
        self._bring(file, start, view, lambda: None)

    def _bring(self, file: int, start: int, view: memoryview, check: Callable[[], None]) -> None:
        entry = self._places.files[file]

        def look() -> None:
            if self._files is not None:
                self._files.read(file, start, view)
            else:
                read_stored(self._store, entry, start, view)
            check()

        # A file that is open stays what it is: no other source is asked for it.
        self._good(entry.path, look, self._files is None)

    def _check(self, file: int, lo: int, view: memoryview, runs: Runs | None) -> None:
        index = self._places.indexes[file]
        if index is None:
            return
        first = self._line.first(file)
        for at in range(0, len(view), BLOCK_BYTES):
            position = lo + at // BLOCK_BYTES
            part = view[at : at + BLOCK_BYTES]
            block = position - first
            found = digest(part)
            if found != index.block(block) and (runs is None or _holds(runs, position)):
                raise self._mismatch(file, block, len(part), index.block(block), found)

    def _mismatch(
        self, file: int, block: int, length: int, wanted: bytes, found: bytes
    ) -> CorruptError:
        entry = self._places.files[file]
        start = block * BLOCK_BYTES
        error = CorruptError(
            "bytes of the checkpoint are corrupt: digest mismatch",
            kind="digest",
            where=f"block {block} of {entry.path}, written by rank {entry.rank}: "
            + self._places.holders(file, start, start + length),
            wanted=f"XXH3-128 {wanted.hex()}",
            found=f"XXH3-128 {found.hex()}",
            hint="ckptd verify lists everything that is bad; load an older step or another tier",
        )
        return blame(error, entry.path)


def _holds(runs: Runs, position: int) -> bool:
    at = int(np.searchsorted(runs[:, 0], position, side="right")) - 1
    return at >= 0 and position < int(runs[at, 1])


FAR_BYTES = 256 << 10
"""Runs this far apart are read one by one; nearer ones as one window (measured break-even)."""

_TASK_BYTES = 4 << 20
_TASK_MOVES = 256
_SMALL_BYTES = 64 << 10
"""Runs that are shorter on average are read with what lies between, and copied from there."""
_LEAVE_S = 10.0
"""How long an interrupted read waits for writes under way, in seconds."""


def _tasks(moves: Moves) -> Iterator[Moves]:
    """Group neighbouring moves of one file, so that small tensors do not cost a task each."""
    rows = moves.rows
    sizes = np.cumsum(rows["hi"] - rows["lo"])
    ends = [*(np.flatnonzero(np.diff(rows["file"])) + 1).tolist(), len(rows)]
    at = 0
    for end in ends:
        while at < end:
            before = int(sizes[at - 1]) if at else 0
            last = int(np.searchsorted(sizes, before + _TASK_BYTES, side="right"))
            last = min(max(last, at + 1), at + _TASK_MOVES, end)
            yield moves[at:last]
            at = last


class _Writes:
    """Where one task writes: targets on the host as they are, those of a device through batches."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan, self._targets = plan, plan.targets
        self._batch: tuple[DeviceWriter, DeviceBatch] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._batch is not None:
            self._batch[1].close()

    def _batch_of(self, writer: DeviceWriter) -> DeviceBatch:
        """Return the batch for a device; one at a time, since batches of all share their memory."""
        if self._batch is not None:
            if self._batch[0] is writer:
                return self._batch[1]
            self._batch[1].close()
        self._batch = writer, writer.batch()
        return self._batch[1]

    def put_all(self, moves: Moves, memory: U8, shifts: I64, *, locked: bool = False) -> None:
        """Do moves out of memory, in which the bytes of each lie so many further than in its file.

        What is one run on both sides is copied as such, without an object for each.
        """
        rows, host = moves.rows, self._plan.addresses[moves.rows["target"]]
        at, begin, size = rows["run"], rows["lo"] + shifts, rows["bytes"]
        runs = (at >= 0) & (host[:, 1] >= at + size) & (begin >= 0) & (begin + size <= len(memory))
        of = int(memory.__array_interface__["data"][0])
        copy_runs(np.stack((host[:, 0] + at, begin + of, size), axis=1)[runs])
        rest = np.flatnonzero(~runs)
        for move, shift in zip(moves[rest], shifts[rest].tolist(), strict=True):
            self.put(move, memory, move.start + shift, locked=locked)

    def put(self, move: PlannedCopy, memory: U8, origin: int, *, locked: bool = False) -> None:
        """Do a move out of memory; see `ckptd.checkpoint.load.plan.put`."""
        target = self._targets[move.target]
        if isinstance(target, np.ndarray):
            put(move, move.block, memory, origin, target)
            return
        batch, size, wide = self._batch_of(target.writer), move.itemsize, move.target_itemsize
        span = max(1, target.writer.limit // wide) * size
        for block in split(move.block, size, span):
            nbytes = block.numel * wide
            plain = move.conversion is None and is_packed(block.shape, block.source_strides)
            if locked and plain:
                at = origin + block.source_start * size
                target.send(block, wide, memory[at : at + nbytes], locked=True)
            else:
                values = batch.room(nbytes)
                put(move, block, memory, origin, values, packed=True)
                target.send(block, wide, values, locked=batch.locked)

    def room(self, move: PlannedCopy) -> U8 | None:
        """Return memory that takes the run of a file that a move is; None for another move."""
        target, size = self._targets[move.target], move.byte_count
        if isinstance(target, np.ndarray):
            return target[move.run_start :][:size] if move.run_start >= 0 else None
        packed = move.conversion is None and is_packed(move.block.shape, move.block.source_strides)
        if not packed or size > target.writer.limit:
            return None
        return self._batch_of(target.writer).room(size)

    def placed(self, move: PlannedCopy, memory: U8) -> None:
        """Send what `room` gave, which is filled now, to where it goes."""
        target = self._targets[move.target]
        if not isinstance(target, np.ndarray):
            locked = self._batch_of(target.writer).locked
            target.send(move.block, move.itemsize, memory, locked=locked)


def _read_move(
    move: PlannedCopy, writes: _Writes, files: LocalFiles, fd: int, windows: Windows
) -> None:
    lo, hi = move.span
    room = writes.room(move)
    window = windows.get(hi - lo) if room is None else room
    files.read_exact(fd, move.file, lo, window.data)
    if room is None:
        writes.put(move, window, move.start - lo)
    else:
        writes.placed(move, room)


_log = logging.getLogger("ckptd")
_MOST_THREADS = 8
_MEMORY_SPAN = 4 << 20
"""Bytes of what is in memory that one thread copies at a time."""


class InMemory(NamedTuple):
    """The data section of file number `file`, as this process still has it in memory.

    With `locked` it is page-locked, and devices copy from it as it lies there.
    """

    file: int
    data: memoryview
    locked: bool = False


class ReadReport(msgspec.Struct, frozen=True):
    """Bytes, files and seconds of one rank's read.

    Attributes
    ----------
    bytes_needed
        Bytes that this rank's buffers take from the checkpoint.
    bytes_fetched
        Bytes that this rank brought from the store in pass 1, for itself and its host.
    bytes_in_memory
        Bytes that this rank needed and had in memory.
    bytes_copied
        Bytes written to live buffers.
    files
        Data files that this rank's buffers come from.
    waves
        1, or more when the budget did not allow all at once.
    fetch_s, copy_s
        Seconds in pass 1 (waiting for other ranks included) and in pass 2.
    """

    bytes_needed: int
    bytes_fetched: int
    bytes_in_memory: int
    bytes_copied: int
    files: int
    waves: int
    fetch_s: float
    copy_s: float


def execute(
    plan: ReadPlan,
    store: Store,
    *,
    in_memory: InMemory | None = None,
    host: HostGroup | None = None,
    budget_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
    stall_s: float = 300.0,
) -> ReadReport:
    """Fill the buffers of a plan. Every rank of the job makes this call, also with nothing to read.

    Parameters
    ----------
    plan
        See `read_plan`.
    store
        The checkpoint's root.
    in_memory
        A file of the checkpoint that need not be read. It is compared with its digests like any
        other, and read where it is not what was written.
    host
        The ranks of this host, on the board of the job; None for a job of one rank. A rank that
        is alone on its host is a group of one.
    budget_bytes
        Bytes of the checkpoint that are held at a time on this host: in the page cache where all
        ranks of it can open all files that they need, in memory elsewhere. None takes half, or a
        quarter, of what is available. At least 4 MiB are used.
    progress
        Called with ``(bytes done, bytes total)`` of this rank, both passes counted, from threads,
        one call at a time.
    threads
        Concurrent reads and copies; chosen from cores and store when left out.
    stall_s
        Longest time in seconds without progress of this rank's reads.

    Raises
    ------
    CorruptError
        kinds ``truncated`` or ``digest`` among others. With ``state_corrupted`` False no buffer of
        any rank was touched; with True some were.
    StoreError, TransientStoreError, DeadlineError
        Likewise, `state_corrupted` included. When one rank fails all ranks raise.
    """
    run = _Run(plan, store, host or HostGroup.alone(), threads, stall_s, in_memory)
    with run.files:
        return run.go(budget_bytes, progress)


class _Run:
    def __init__(
        self,
        plan: ReadPlan,
        store: Store,
        group: HostGroup,
        threads: int | None,
        stall_s: float,
        in_memory: InMemory | None,
    ) -> None:
        self._whole = self._plan = plan
        self._in_memory, self._from_memory = in_memory, plan.of_files(())
        self._store = store
        self._group = group
        self._copiers = threads or _share_of(cores(), group.local_world)
        self._threads = threads
        self._stall_s = stall_s
        on_read = store.count if isinstance(store, UnionStore) else None
        self.files = LocalFiles(store, plan.manifest.files, on_read)
        self._buffer: HostBuffer | None = None
        self._taken: tuple[mmap.mmap, int] | None = None
        self._schedule = ReadSchedule([], BLOCK_BYTES, 0)
        self._fetch_s = self._copy_s = 0.0

    def go(
        self, budget_bytes: int | None, progress: Callable[[int, int], None] | None
    ) -> ReadReport:
        self._count = _Counter(progress, self._group.pulse.beat)
        self._group.agree("verified", self._guard(lambda: self._until_first_write(budget_bytes)))
        error = self._guard(self._write)
        try:
            self._group.agree("written", error)
        except CkptdError as failure:
            failure.state_corrupted = True
            raise
        # Only now has every rank read what this one posted; after a failure posts stay, since
        # some rank may still have to learn of it.
        self._group.close()
        if self._taken is not None:
            # After a failure a thread that hangs may still write there, into what is read next.
            SPARE.give_back(*self._taken)
        return self._report()

    def _guard(self, step: Callable[[], None]) -> CkptdError | None:
        """Do a step; the ranks that wait for this one learn of a failure at once."""
        try:
            step()
        except CkptdError as error:
            self._group.pulse.give_up(error)
            return error
        except BaseException as error:
            crash = CkptdError("a rank crashed while reading", kind="crashed", found=repr(error))
            self._group.pulse.give_up(crash)
            raise
        return None

    def _until_first_write(self, budget_bytes: int | None) -> None:
        begin = time.monotonic()
        if self._in_memory is not None:
            self._leave_out(self._in_memory)
        self._prepare(budget_bytes)
        mine = self._schedule.mine
        parallel = cores() if self._local else self._store.capabilities.parallel
        # Files first, those of later waves too: what is missing is found before a byte is read.
        threads = self._threads or _share_of(parallel, self._group.local_world)
        self._fetcher = self._of(self._plan, self.files if self._local else None, threads)
        files = self._plan.line.files_of(mine)
        self._fetcher.check_files(files, self._group.pulse.beat, anywhere=not self._local)
        self._count.total = self._whole.bytes_needed + self._bytes_of(mine)
        if self._schedule.waves:
            self._fetch(self._schedule.waves[0])
        self._fetcher.check_unchanged()
        self._fetch_s += time.monotonic() - begin

    def _of(self, plan: ReadPlan, files: LocalFiles | None, threads: int) -> Fetcher:
        """Return what brings the bytes of a plan."""
        store, at, stall_s = self._store, plan.places, self._stall_s
        return Fetcher(store, at, plan.line, files, threads=threads, stall_s=stall_s)

    def _leave_out(self, found: InMemory) -> None:
        """Leave out of what is read what is in memory, if that is what was written."""
        plan = self._whole.of_files({found.file})
        fetcher = self._of(plan, self.files, self._copiers)
        try:
            fetcher.check_memory(found.file, found.data, plan.needed)
        except CorruptError as error:
            _log.warning("not reading from this process's memory: %s", error)
            return
        others = {*range(len(plan.manifest.files))} - {found.file}
        self._from_memory, self._plan = plan, self._whole.of_files(others)

    def _prepare(self, budget_bytes: int | None) -> None:
        """Agree with the host on which rank brings what when, and get the buffer for it."""
        group, line = self._group, self._plan.line
        needs = self._agree_on_files(budget_bytes)
        gap = 0 if self._local else 1
        blocks = needs.budgets[0 if self._local else 1] // BLOCK_BYTES
        self._schedule = make_schedule(
            line, needs.runs, group.local_rank, budget_blocks=blocks, gap=gap
        )
        if not self._local and self._schedule.most_blocks:
            memory = None
            if group.local_world > 1:
                shared = group.share_memory(self._schedule.most_blocks * BLOCK_BYTES)
                memory = shared.array if shared else None
            if memory is None:
                memory = self._go_alone(needs.runs[group.local_rank], blocks, gap)
            self._buffer = HostBuffer(line, memory)
        hole = FAR_BYTES if self._buffer is None else BLOCK_BYTES
        self._parts, self._at = self._plan.parts(self._schedule.span_bytes, hole)

    def _agree_on_files(self, budget_bytes: int | None) -> Needs:
        """Tell the host what this rank needs, and agree whether descriptors are read from."""
        group, free = self._group, available_bytes()
        budgets = (free // 2, free // 4) if budget_bytes is None else (budget_bytes, budget_bytes)
        own = self.files.identity(self._plan.files)
        needs = group.needs(self._plan.needed, budgets, bool(own))
        self._local = needs.files
        if needs.files and group.local_world > 1:
            files = self._plan.line.files_of(merge(np.concatenate(needs.runs)))
            self._local = group.same_files(self.files.identity(files))
        return needs

    def _go_alone(self, runs: Runs, blocks: int, gap: int) -> NDArray[np.uint8]:
        """Read for this rank only: it is alone on its host, or memory cannot be shared."""
        self._schedule = make_schedule(
            self._plan.line, [runs], 0, budget_blocks=blocks // self._group.local_world, gap=gap
        )
        size = self._schedule.most_blocks * BLOCK_BYTES
        mapping, memory = SPARE.take(size)
        self._taken = mapping, size
        return memory

    def _fetch(self, wave: Wave) -> None:
        if self._buffer is not None:
            self._buffer.lay_out(wave.layout)
        self._fetcher.fetch(wave.mine, wave.needed, self._buffer, self._count.add, self._loose)

    @cached_property
    def _loose(self) -> dict[int, Runs]:
        """Runs needed of each file without digests; empty where several ranks share a host."""
        if self._group.local_world > 1:
            return {}
        plan, local = self._plan, self._store.capabilities.local_files
        loose = [f for f in plan.files if not plan.places.is_digested(f)]
        return needed_bytes(plan.of_files(loose).moves, FAR_BYTES if local else BLOCK_BYTES)

    def _bytes_of(self, runs: Runs) -> int:
        """Return the bytes that a set of blocks costs."""
        line, loose = self._plan.line, self._loose
        keep = np.array([line.file_at(lo) not in loose for lo in runs[:, 0].tolist()], dtype=bool)
        return line.byte_count(runs[keep]) + sum(map(count, loose.values()))

    def _write(self) -> None:
        if self._in_memory is not None and len(self._from_memory.moves):
            begin = time.monotonic()
            self._copy_memory(
                self._from_memory.parts(_MEMORY_SPAN)[0],
                np.frombuffer(self._in_memory.data, np.uint8),
                lambda file, start, end: start,
                locked=self._in_memory.locked,
            )
            self._copy_s += time.monotonic() - begin
        for number, wave in enumerate(self._schedule.waves):
            begin = time.monotonic()
            if number:
                self._group.barrier(f"free{number}")
                self._fetch(wave)
                self._group.barrier(f"full{number}")
            between = time.monotonic()
            self._copy(self._moves(wave))
            self._fetch_s += between - begin
            self._copy_s += time.monotonic() - between
        begin = time.monotonic()
        self._settle()
        self._fetcher.check_unchanged()
        self._copy_s += time.monotonic() - begin

    def _settle(self) -> None:
        """Wait until what was sent to devices is there, before the ranks agree that all is."""
        targets = self._whole.targets if not self._whole.addresses[:, 0].all() else ()
        for writer in {t.writer for t in targets if not isinstance(t, np.ndarray)}:
            writer.settle(self._stall_s)

    def _moves(self, wave: Wave) -> Moves:
        lo, hi = np.searchsorted(self._at, (wave.start, wave.end)).tolist()
        return self._parts[lo:hi]

    def _copy(self, moves: Moves) -> None:
        if self._buffer is None:
            self._copy_files(moves)
        else:
            self._copy_memory(moves, self._buffer.memory, self._buffer.offset)

    def _copy_memory(
        self,
        moves: Moves,
        memory: U8,
        offset: Callable[[I64, I64, I64], I64],
        *,
        locked: bool = False,
    ) -> None:
        """Copy `moves` out of memory that holds all their bytes.

        Parameters
        ----------
        offset
            ``offset(file, start, end)`` tells where bytes of a data section lie in `memory`.
        locked
            `memory` is page-locked, and stays as it is until all devices have settled.
        """

        def copy(task: Moves) -> None:
            file, lo, hi = (task.rows[name] for name in ("file", "lo", "hi"))
            with _Writes(self._whole) as writes:
                writes.put_all(task, memory, offset(file, lo, hi) - lo, locked=locked)

        self._in_tasks(moves, copy)

    def _copy_files(self, moves: Moves) -> None:
        """Copy `moves` out of local files: long runs straight into place, others by a window.

        What lies in memory that can be mapped is copied from there.
        """
        windows, files = Windows(), self.files

        def copy(task: Moves) -> None:
            rows = task.rows
            file, lo, hi = int(rows["file"][0]), int(rows["lo"].min()), int(rows["hi"].max())
            with (
                self._lying(task, file, lo, hi) as memory,
                files.use(file) as fd,
                _Writes(self._whole) as writes,
            ):
                start = 0
                # One read: much that is not wanted may lie between far moves.
                if memory is None and hi - lo <= min(2 * _TASK_BYTES, len(task) * _SMALL_BYTES):
                    memory, start = windows.get(hi - lo), lo
                    files.read_exact(fd, file, lo, memory.data)
                if memory is not None:
                    writes.put_all(task, memory, np.full(len(task), -start))
                    return
                for move in task:
                    _read_move(move, writes, files, fd, windows)

        self._in_tasks(moves, copy)

    def _lying(self, task: Moves, file: int, lo: int, hi: int) -> AbstractContextManager[U8 | None]:
        """Return what gives the data section of a task's file, if it should be copied from there.

        A file of a disk should only where that is done natively: the kernel copies faster than
        numpy. A device may let its writers wait, and much may lie between far moves.
        """
        large = int(task.rows["bytes"].sum()) >= len(task) * LEAST_BYTES
        on_host = bool(self._whole.addresses[task.rows["target"], 0].all())
        if hi - lo <= 2 * _TASK_BYTES and large and on_host and copies_natively():
            return self.files.touching(file, lo, hi)
        return nullcontext(self.files.memory(file))

    def _in_tasks(self, moves: Moves, copy: Callable[[Moves], None]) -> None:
        """Do moves in threads; where this one is interrupted, nothing is written after it has left.

        The next load of a process that goes on would be overwritten in part.
        """

        def work(task: Moves) -> None:
            copy(task)
            self._count.add(copied=int(task.rows["bytes"].sum()))

        threads, stall_s = self._copiers, self._stall_s
        run_all(
            _tasks(moves), work, threads=threads, stall_s=stall_s, what="copying", leave_s=_LEAVE_S
        )

    def _report(self) -> ReadReport:
        return ReadReport(
            bytes_needed=self._whole.bytes_needed,
            bytes_fetched=self._count.fetched,
            bytes_in_memory=self._from_memory.bytes_needed,
            bytes_copied=self._count.copied,
            files=len(self._whole.files),
            waves=len(self._schedule.waves),
            fetch_s=self._fetch_s,
            copy_s=self._copy_s,
        )


class _Counter:
    """Adds up progress of all threads and passes it on."""

    def __init__(
        self, progress: Callable[[int, int], None] | None, beat: Callable[[], None]
    ) -> None:
        self._lock = threading.Lock()
        self.total = self.fetched = self.copied = 0
        self._progress = progress
        self._beat = beat

    def add(self, fetched: int = 0, copied: int = 0) -> None:
        self._beat()
        with self._lock:
            self.fetched += fetched
            self.copied += copied
            if self._progress is not None:
                # Holes that are read along are not in the total.
                self._progress(min(self.fetched + self.copied, self.total), self.total)


def _share_of(parallel: int, ranks: int) -> int:
    """Threads of one of several ranks: two at least when it is alone, so that reads overlap."""
    if ranks == 1:
        return max(2, min(_MOST_THREADS, parallel))
    return max(1, min(_MOST_THREADS, parallel // ranks))
