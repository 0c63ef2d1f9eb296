"""Reading all data of a checkpoint once, in bounded memory: blocks, chunks and witness."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.engine.findings import Finding, Findings
from ckptd.engine.localfiles import LocalFiles
from ckptd.engine.places import Places, missing_file
from ckptd.engine.pool import run_all
from ckptd.engine.witnesses import ChunkWitness, WitnessCheck
from ckptd.errors import CkptdError, NotFoundError
from ckptd.format.digest import BLOCK_BYTES, digest
from ckptd.layout.grid import Piece
from ckptd.store.base import Store

__all__ = ["Scan", "Segment", "Target", "segments", "targets"]

STALL_S = 300.0
WINDOW_BLOCKS = 4
SEGMENT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A chunk to check: its place, its bytes in the data section, its number in the index."""

    tensor: int
    piece: Piece
    name: str
    start: int
    end: int
    number: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring chunks of one file, read by one thread; `available` bytes of data are there."""

    file: int
    targets: tuple[Target, ...]
    available: int


def targets(places: Places, file: int) -> list[Target]:
    """Return the chunks of `file` that the checkpoint refers to, in file order.

    Raises
    ------
    CorruptError
        The header of an older checkpoint's file cannot be read.
    """
    filemap = places.filemap
    chunks = [(c, filemap.chunk_name(file, c)) for c in filemap.chunks(file)]
    if places.is_own(file):
        return [
            Target(c.tensor, c.piece, name, c.start, c.end, i) for i, (c, name) in enumerate(chunks)
        ]
    header = places.header(file)
    numbers = {name: i for i, name in enumerate(header)}
    found = [
        Target(c.tensor, c.piece, name, header[name].start, header[name].end, numbers[name])
        for c, name in chunks
        if name in header
    ]
    return sorted(found, key=lambda t: t.number)


def segments(places: Places, files: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """Cut files into segments of about 32 MiB; a larger chunk is one segment.

    Parameters
    ----------
    files
        ``(file, bytes of data that are there)``. Chunks beyond are left out.
    """
    for file, available in files:
        held: list[Target] = []
        for target in targets(places, file):
            if target.end > available:
                continue
            gap = bool(held) and target.start != held[-1].end
            if held and (gap or target.end - held[0].start > SEGMENT_BYTES):
                yield Segment(file, tuple(held), available)
                held = []
            held.append(target)
        if held:
            yield Segment(file, tuple(held), available)


class _Open:
    """A chunk that is being read."""

    def __init__(self, target: Target, witness: ChunkWitness | None) -> None:
        self.target = target
        self.witness = witness
        self.hash = xxhash.xxh3_128()


class Scan:
    """Checks segments against digests, and feeds the witness.

    Parameters
    ----------
    places
        The checkpoint; its `indexes` hold the digests of every file that is scanned.
    progress
        Called with bytes done and in all.
    """

    def __init__(
        self,
        store: Store,
        places: Places,
        findings: Findings,
        witness: WitnessCheck,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._store = store
        self._places = places
        self._findings = findings
        self._witness = witness
        self._progress = progress
        self._lock = threading.Lock()
        self._total = 0
        self._bad_blocks: set[tuple[int, int]] = set()
        self._bad_chunks: dict[int, list[Target]] = {}
        self._buffers = threading.local()
        self.read_bytes = 0

    def run(self, work: Sequence[Segment], threads: int) -> None:
        """Read and check all segments."""
        self._total = sum(s.targets[-1].end - s.targets[0].start for s in work)
        with LocalFiles(self._store, self._places.manifest.files) as files:
            run_all(
                work,
                lambda segment: self._segment(segment, files),
                threads=threads,
                stall_s=STALL_S,
                what="reading the checkpoint",
            )
        self._report_blocks()

    def _segment(self, segment: Segment, files: LocalFiles) -> None:
        try:
            self._scan(segment, files)
        except CkptdError as error:
            entry = self._places.manifest.files[segment.file]
            self._findings.add(Finding.of(error, entry.path, entry.rank))
            self._witness.skip(self._places.filemap.tensors[t.tensor].name for t in segment.targets)
        size = segment.targets[-1].end - segment.targets[0].start
        with self._lock:
            self.read_bytes += size
            if self._progress is not None:
                self._progress(self.read_bytes, self._total)

    def _scan(self, segment: Segment, files: LocalFiles) -> None:
        entry = self._places.manifest.files[segment.file]
        lo = segment.targets[0].start // BLOCK_BYTES * BLOCK_BYTES
        end = -(-segment.targets[-1].end // BLOCK_BYTES) * BLOCK_BYTES
        end = min(end, segment.available, entry.data_bytes)
        waiting = iter(segment.targets)
        upcoming = next(waiting, None)
        current: list[_Open] = []
        for start in [*range(lo, end, WINDOW_BLOCKS * BLOCK_BYTES)] or [lo]:
            stop = min(start + WINDOW_BLOCKS * BLOCK_BYTES, end)
            window = self._read(segment.file, start, stop, files)
            self._check_blocks(segment.file, start, window)
            while upcoming is not None and (upcoming.start < stop or upcoming.start >= end):
                chunk = _Open(upcoming, self._witness.begin(upcoming.tensor, upcoming.piece))
                current.append(chunk)
                upcoming = next(waiting, None)
            for chunk in current:
                self._feed(chunk, start, window)
            for chunk in [c for c in current if c.target.end <= stop]:
                current.remove(chunk)
                self._close(segment.file, chunk)

    def _read(self, file: int, start: int, stop: int, files: LocalFiles) -> NDArray[np.uint8]:
        buffer: NDArray[np.uint8] | None = getattr(self._buffers, "array", None)
        if buffer is None:
            buffer = np.empty(WINDOW_BLOCKS * BLOCK_BYTES, dtype=np.uint8)
            self._buffers.array = buffer
        window = buffer[: stop - start]
        entry = self._places.manifest.files[file]
        if self._store.capabilities.local_files:
            files.read(file, start, window.data)
            return window
        try:
            self._store.read_into(entry.path, entry.data_start + start, window.data)
        except NotFoundError:
            raise missing_file(entry.path, entry.rank) from None
        return window

    def _check_blocks(self, file: int, start: int, window: NDArray[np.uint8]) -> None:
        index = self._places.indexes[file]
        for at in range(0, len(window), BLOCK_BYTES):
            block = (start + at) // BLOCK_BYTES
            part = window[at : at + BLOCK_BYTES]
            whole = min(BLOCK_BYTES, index.data_bytes - block * BLOCK_BYTES)
            # The last bytes of a truncated file are no whole block: nothing to compare them with.
            if len(part) == whole and digest(part.data) != index.block(block):
                with self._lock:
                    self._bad_blocks.add((file, block))

    def _feed(self, chunk: _Open, start: int, window: NDArray[np.uint8]) -> None:
        lo = max(chunk.target.start, start)
        hi = min(chunk.target.end, start + len(window))
        if hi > lo:
            part = window[lo - start : hi - start]
            chunk.hash.update(part.data)
            if chunk.witness is not None:
                self._witness.feed(chunk.witness, lo - chunk.target.start, part)

    def _close(self, file: int, chunk: _Open) -> None:
        target = chunk.target
        wanted, found = self._places.indexes[file].chunk(target.number), chunk.hash.digest()
        if wanted == found:
            return
        entry = self._places.manifest.files[file]
        first, last = target.start // BLOCK_BYTES, max(target.start, target.end - 1) // BLOCK_BYTES
        with self._lock:
            self._bad_chunks.setdefault(file, []).append(target)
            bad = [b for b in range(first, last + 1) if (file, b) in self._bad_blocks]
        self._findings.add(
            Finding(
                kind="digest",
                message="a chunk is not what was written",
                file=entry.path,
                rank=entry.rank,
                tensor=self._places.filemap.tensors[target.tensor].name,
                chunk=target.name,
                where=f"bytes {target.start} to {target.end} of the data, "
                + (f"bad blocks {_some(bad)}" if bad else "its blocks are good"),
                wanted=f"XXH3-128 {wanted.hex()}",
                found=f"XXH3-128 {found.hex()}",
            )
        )

    def _report_blocks(self) -> None:
        """Report bad blocks that no bad chunk explains: readers check blocks and would refuse."""
        for file, block in sorted(self._bad_blocks):
            lo, hi = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            if any(t.start < hi and lo < t.end for t in self._bad_chunks.get(file, ())):
                continue
            entry = self._places.manifest.files[file]
            held = self._places.chunks_at(file, lo, hi)
            self._findings.add(
                Finding(
                    kind="digest",
                    message="a block is not what was written, though the chunks referred to are",
                    file=entry.path,
                    rank=entry.rank,
                    tensor=held[0][0] if held else "",
                    chunk=held[0][1] if held else "",
                    where=f"block {block}",
                )
            )


def _some(numbers: list[int], most: int = 8) -> str:
    text = ", ".join(map(str, numbers[:most]))
    return f"{text} and {len(numbers) - most} more" if len(numbers) > most else text
