"""Writes target files in rounds within the memory budget, reading ahead; reading threads.

In it: the least budget and how it is shared out; bytes of a round; after how long without progress
it fails (`job.py` tries again); figures of what was spent.

One thread plans, reads and scatters (several threads help it to read), another digests and writes.
A round's memory is counted until the store has let go of it, so what is staged never exceeds the
budget, whatever the store does in the background.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES, Digester, DigestIndex
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.plan import BlockLine, put_fill
from ckptd.errors import UsageError
from ckptd.reshard.plan import RoundPlan, RoundPlanner, Stretch, Target, cut_rounds, group_files
from ckptd.reshard.reading import BlockCache, Ledger, Reading
from ckptd.reshard.verify import ExpectedValues, FileSamples
from ckptd.store.base import Store, Writer
from ckptd.store.osio import pages

U8 = NDArray[np.uint8]


class Joints(Protocol):
    """Bytes of a file between its data, and after them: heads and ends of archives.

    Attributes
    ----------
    ends
        Positions in the data section after which such bytes follow, rising; the last is its end.
    nbytes
        Length of all these bytes together.
    """

    ends: Sequence[int]
    nbytes: int

    def after(self, number: int, crc: int) -> bytes:
        """Return the bytes after end `number`; called once for each, in order.

        Parameters
        ----------
        crc
            CRC-32 of the data since the end before.
        """


@dataclass(frozen=True, slots=True)
class FileDraft:
    """A file to write.

    Attributes
    ----------
    number
        In the target's file table.
    key
        Where it goes.
    header
        Padded header.
    data_bytes
        Length of the data section.
    ends
        End of each chunk in it; None: no digests are wanted.
    joints
        What the data section is interrupted by; None: nothing.
    """

    number: int
    key: str
    header: bytes
    data_bytes: int
    ends: Sequence[int] | None = None
    joints: Joints | None = None

    @property
    def body_bytes(self) -> int:
        """Length of what follows the header."""
        return self.data_bytes + (self.joints.nbytes if self.joints else 0)


class FileOutput:
    """One file; used by one thread."""

    def __init__(self, store: Store, draft: FileDraft) -> None:
        self.draft = draft
        self._digester = None if draft.ends is None else Digester(draft.ends)
        self._written = 0
        self._joint, self._crc = 0, 0
        self._writer: Writer = store.writer(draft.key, len(draft.header) + draft.body_bytes)
        self._writer.write(_aligned(draft.header))
        self._join()

    def append(self, data: U8) -> bool:
        """Write the next stretch; tells whether the file is full."""
        view = data.data
        if self._digester is not None:
            self._digester.update(view)
        joints = self.draft.joints
        while len(view):
            take = joints.ends[self._joint] - self._written if joints else len(view)
            part, view = view[:take], view[take:]
            self._writer.write(part)
            self._written += len(part)
            if joints is not None:
                self._crc = zlib.crc32(part, self._crc)
                self._join()
        return self._written == self.draft.data_bytes

    def _join(self) -> None:
        """Write what stands between the data here."""
        joints = self.draft.joints
        ends = joints.ends if joints else ()
        found = []
        while joints and self._joint < len(ends) and ends[self._joint] == self._written:
            found.append(joints.after(self._joint, self._crc))
            self._joint, self._crc = self._joint + 1, 0
        if found:
            self._writer.write(memoryview(b"".join(found)))

    def commit(self) -> DigestIndex | None:
        """Return the digests that are wanted when every byte is durable."""
        self._writer.commit()
        return None if self._digester is None else self._digester.index()

    def abort(self) -> None:
        """Give the file up."""
        self._writer.abort()


class Outputs:
    """The files of one group: each is opened when its first bytes come, and closed when full.

    Several threads close them: that a file is durable takes the disk a while, in which the next one
    is written.

    Parameters
    ----------
    store
        Where they go, without a `Retry` around it (which would keep whole files in memory).
    drafts
        The files, by number.
    on_done
        Called for each when it is durable, from a thread.
    """

    def __init__(
        self, store: Store, drafts: dict[int, FileDraft], on_done: Callable[..., None]
    ) -> None:
        self._store = store
        self._drafts = drafts
        self._on_done = on_done
        self._open: dict[int, FileOutput] = {}
        self._pool = ThreadPoolExecutor(_CLOSERS, "ckptd-close")
        self._closing: deque[Future[None]] = deque()

    @property
    def is_closing(self) -> bool:
        """Whether files are being closed, and give memory back."""
        return any(not f.done() for f in list(self._closing))

    def append(self, file: int, data: U8) -> None:
        """Write the next stretch of a file.

        Raises
        ------
        CkptdError, OSError
            What went wrong with this file, or with one before it.
        """
        output = self._open.get(file)
        if output is None:
            output = self._open[file] = FileOutput(self._store, self._drafts[file])
        if output.append(data):
            self._finish(file)

    def finish_empty(self) -> None:
        """Write the files that have chunks and no bytes."""
        for number, draft in self._drafts.items():
            if not draft.data_bytes:
                self._open[number] = FileOutput(self._store, draft)
                self._finish(number)

    def _finish(self, file: int) -> None:
        while len(self._closing) >= _CLOSERS:
            self._closing.popleft().result()
        self._closing.append(self._pool.submit(self._close, self._open.pop(file)))

    def _close(self, output: FileOutput) -> None:
        try:
            index = output.commit()
        except BaseException:
            output.abort()
            raise
        self._on_done(output.draft, index)

    def close(self) -> None:
        """Return when all files are durable; errors as `append`."""
        while self._closing:
            self._closing.popleft().result()

    def abort(self) -> None:
        """Give up what is not full; return when nothing is under way. Never raises."""
        for output in self._open.values():
            output.abort()
        self._open.clear()
        self._pool.shutdown()


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    buffer = pages(len(header))
    buffer[:] = header
    return memoryview(buffer)


LEAST_BUDGET = 32 << 20
_MOST_ROUND_BYTES = 128 << 20
_FILE_ROUND_BYTES = 4 << 20
"""Of a round, for each file that grows in it: rows that all of them take from are read once."""
_WINDOWS_A_READER = 2
_MOST_READERS = 4
_STALL_S = 900.0
_CLOSERS = 4
"""Files that are closed at a time."""

Done = Callable[[FileDraft, DigestIndex | None, FileSamples], None]
"""Called in a thread when a file is durable; several at a time."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How the memory is shared out.

    Attributes
    ----------
    total
        Bytes in all.
    cache
        For blocks that several rounds want.
    staging
        For what is read and not yet written.
    round
        Most bytes of a round.
    readers, window_blocks
        Threads that read, and blocks that each reads at a time.
    """

    total: int
    cache: int
    staging: int
    round: int
    readers: int
    window_blocks: int

    @staticmethod
    def of(total: int, store: Store) -> Budget:
        """Share out `total` bytes.

        Raises
        ------
        UsageError
            It is too little.
        """
        if total < LEAST_BUDGET:
            raise UsageError(
                "the budget is too small",
                where="--budget",
                wanted=f"at least {LEAST_BUDGET} bytes",
                found=total,
            )
        local = store.capabilities.local_files
        # More than cores: most of a reader's time is the disk's.
        readers = _MOST_READERS if local else min(_MOST_READERS, store.capabilities.parallel)
        window = 4 if local else max(1, store.capabilities.block_bytes // BLOCK_BYTES)
        window = min(window, max(1, total // 8 // readers // BLOCK_BYTES))
        cache = min(64 << 20, total // 8)
        own = min(96 << 20, total // 6)  # plans, samples, what the allocator does not give back
        staging = total - cache - own - readers * (window + 1) * BLOCK_BYTES
        return Budget(total, cache, staging, min(_MOST_ROUND_BYTES, staging // 2), readers, window)


@dataclass(slots=True)
class Spent:
    """Cost of a run: bytes, rounds, memory.

    Attributes
    ----------
    bytes_needed
        Bytes of the source that the copies took.
    bytes_read
        Bytes of data files that were read for them.
    bytes_written
        Bytes of data sections written.
    rounds
        Number of rounds.
    peak_staged
        Most bytes that were staged at a time.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    rounds: int = 0
    peak_staged: int = 0

    def figures(self) -> dict[str, int]:
        """Return all of it by name."""
        return asdict(self)


class Executor:
    """Fills target files from a source.

    Parameters
    ----------
    source, target
        Both sides.
    budget
        The memory.
    expected
        What the source's witness wants to see, by target tensor.
    """

    def __init__(
        self,
        source: PieceLocations,
        target: Target,
        budget: Budget,
        expected: ExpectedValues,
    ) -> None:
        self._target = target
        self._budget = budget
        self._expected = expected
        self._names = [t.name for t in source.manifest.tensors]
        self._progress: Callable[[int], None] = lambda n: None
        self._line = BlockLine([f.data_bytes for f in source.files])
        self.planner = RoundPlanner(source, target, self._line)
        self._cache = BlockCache(budget.cache)
        self._reading = Reading(
            source,
            self._line,
            threads=budget.readers,
            window_blocks=budget.window_blocks,
            cache=self._cache,
            stall_s=_STALL_S,
        )
        self._ledger = Ledger(budget.staging, _STALL_S)
        self.spent = Spent()

    def rounds(self, files: Sequence[int]) -> Iterator[RoundPlan]:
        """Yield the plans of all rounds for some files, in order. Reads nothing."""
        full = [f for f in files if self._target.sizes[f]]
        most = max(1, self._budget.round // 2 // BLOCK_BYTES)
        for group in group_files(self.planner, full, most):
            for stretches in cut_rounds(self._target.filemap, group, self._round(len(group))):
                yield self.planner.plan(stretches)
            self.planner.forget(group)

    def _round(self, files: int) -> int:
        """Return the bytes of a round that fills some files.

        Small ones take turns in little memory, whose pages are then warm, and reading and writing
        overlap but for one of them.
        """
        budget = self._budget
        least = _WINDOWS_A_READER * budget.readers * budget.window_blocks * BLOCK_BYTES
        return min(budget.round, max(least, _FILE_ROUND_BYTES * files))

    def run(
        self,
        store: Store,
        drafts: Mapping[int, FileDraft],
        on_done: Done,
        progress: Callable[[int], None],
    ) -> None:
        """Write some files; each is durable when `on_done` is called for it.

        Parameters
        ----------
        store
            Where they go, without a `Retry` around it.
        drafts
            The files.
        progress
            Called with the bytes written since the last call, from a thread.

        Raises
        ------
        CorruptError
            The source is damaged, or its witness does not agree; files under way are removed.
        StoreError, TransientStoreError, DeadlineError
            As the stores say.
        """
        self._progress = progress
        before = self._reading.bytes_read
        writing = _Writing(self, store, drafts, on_done)
        try:
            for plan in _ahead(self.rounds(list(drafts))):
                size = sum(s.hi - s.lo for s in plan.stretches)
                self._ledger.wait(size, writing.idle)
                memory = [self._ledger.slab(s.hi - s.lo) for s in plan.stretches]
                self._fill(plan, memory)
                self.spent.rounds += 1
                self.spent.bytes_needed += plan.bytes_needed
                writing.put(plan.stretches, memory)
                del memory
            self._reading.check_unchanged()
            writing.close()
        except BaseException:
            writing.stop()
            raise
        finally:
            self.spent.bytes_read += self._reading.bytes_read - before
            self.spent.peak_staged = self._ledger.peak

    def _fill(self, plan: RoundPlan, memory: Sequence[U8]) -> None:
        for stretch, dtype, fill in plan.fills:
            put_fill(fill, dtype, memory[stretch])
        for stretch, at, literal, part in plan.literals:
            raw = np.frombuffer(literal()[part], dtype=np.uint8)
            memory[stretch][at : at + len(raw)] = raw
        self._reading.run(plan, memory)

    def samples(self, file: int) -> FileSamples:
        """Return what looks at one target file."""
        chunks = self._target.filemap.chunks(file)
        return FileSamples(self._target, chunks, self._expected, self._names)

    def written(self, nbytes: int) -> None:
        """Count bytes that were handed to the store."""
        self.spent.bytes_written += nbytes
        self._progress(nbytes)


def _ahead(plans: Iterator[RoundPlan]) -> Iterator[RoundPlan]:
    """Yield plans, each made while the one before it is carried out."""
    with ThreadPoolExecutor(1, "ckptd-plan") as pool:
        coming = pool.submit(next, plans, None)
        while (plan := coming.result()) is not None:
            coming = pool.submit(next, plans, None)
            yield plan


class _Writing:
    """The thread that digests and writes."""

    def __init__(
        self, executor: Executor, store: Store, drafts: Mapping[int, FileDraft], on_done: Done
    ) -> None:
        self._executor = executor
        self._on_done = on_done
        self._samples: dict[int, FileSamples] = {}
        self._outputs = Outputs(store, dict(drafts), self._done)
        self._queue: queue.Queue[tuple[Sequence[Stretch], list[U8]] | None] = queue.Queue(1)
        self._pinned = not store.capabilities.local_files
        self._error: BaseException | None = None
        self._busy = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ckptd-reshard", daemon=True)
        self._thread.start()

    def idle(self) -> bool:
        """Tell whether nothing more will be given back by itself; raise what went wrong."""
        self._raise()
        # A store without local files may hold on to a stretch until it gets the next one.
        return self._pinned and not self._busy and not self._outputs.is_closing

    def put(self, stretches: Sequence[Stretch], memory: list[U8]) -> None:
        """Hand over a filled round."""
        self._busy += 1
        self._offer((stretches, memory))

    def _offer(self, item: tuple[Sequence[Stretch], list[U8]] | None) -> None:
        while True:
            self._raise()
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def close(self) -> None:
        """Return when everything is durable."""
        self._offer(None)
        self._thread.join()
        self._raise()

    def stop(self) -> None:
        """Give up."""
        self._stopped = True
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.1)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
            self._thread.join(0.1)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._outputs.finish_empty()
            while not self._stopped:
                item = self._queue.get()
                if item is None:
                    break
                for stretch, data in zip(*item, strict=True):
                    self._write(stretch, data)
                del item, data
                self._busy -= 1
            if not self._stopped:
                self._outputs.close()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
        self._outputs.abort()

    def _write(self, stretch: Stretch, data: U8) -> None:
        samples = self._samples.get(stretch.file)
        if samples is None:
            samples = self._samples[stretch.file] = self._executor.samples(stretch.file)
        samples.look(stretch.lo, data)
        self._outputs.append(stretch.file, data)
        self._executor.written(len(data))

    def _done(self, draft: FileDraft, index: DigestIndex | None) -> None:
        samples = self._samples.pop(draft.number, None)
        self._on_done(draft, index, samples or self._executor.samples(draft.number))
