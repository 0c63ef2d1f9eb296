"""Verification of a checkpoint: records, files, headers, digests, witness; threads, limits.

From the top: commit record, manifest (digest, then every rule of the format), folders, then each
file: size, header against what the manifest implies, digest index, and with ``deep`` every block
and every chunk against its digest and the witness against the values. Nothing is written, and no
more memory is used than a few windows of data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES, digest
from ckptd.base.grids.grid import Piece
from ckptd.base.runtime.pool import cores, run_all
from ckptd.checkpoint.format.container import Chunk
from ckptd.checkpoint.format.invariants import check_coverage, check_files, check_index
from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.format.names import CommitName, commit_key, digests_key, generation_key
from ckptd.checkpoint.load.files import (
    LocalFiles,
    PieceLocations,
    check_index_size,
    load_index,
    missing_file,
    read_header,
)
from ckptd.checkpoint.load.read import Windows
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.load.witnesses import (
    ChunkWitness,
    Findings,
    VerifyFinding,
    VerifyReport,
    WitnessCheck,
)
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CkptdError, CorruptError, NotFoundError, RefusedError, first_few
from ckptd.store.base import Store

STALL_S = 300.0
WINDOW_BLOCKS = 4
SEGMENT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ScanChunk:
    """A chunk to check: its place, its bytes in the data section, its number in the index."""

    tensor: int
    piece: Piece
    name: str
    start: int
    end: int
    number: int


@dataclass(frozen=True, slots=True)
class ScanSegment:
    """Neighbouring chunks of one file, read by one thread; `available` bytes of data are there."""

    file: int
    targets: tuple[ScanChunk, ...]
    available: int


def targets(places: PieceLocations, file: int) -> list[ScanChunk]:
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
            ScanChunk(c.tensor, c.piece, name, c.start, c.end, i)
            for i, (c, name) in enumerate(chunks)
        ]
    header = places.header(file)
    numbers = {name: i for i, name in enumerate(header)}
    found = [
        ScanChunk(c.tensor, c.piece, name, header[name].start, header[name].end, numbers[name])
        for c, name in chunks
        if name in header
    ]
    return sorted(found, key=lambda t: t.number)


def segments(places: PieceLocations, files: Iterable[tuple[int, int]]) -> Iterator[ScanSegment]:
    """Cut files into segments of about 32 MiB; a larger chunk is one segment.

    Parameters
    ----------
    files
        ``(file, bytes of data that are there)``. Chunks beyond are left out.
    """
    for file, available in files:
        held: list[ScanChunk] = []
        for target in targets(places, file):
            if target.end > available:
                continue
            gap = bool(held) and target.start != held[-1].end
            if held and (gap or target.end - held[0].start > SEGMENT_BYTES):
                yield ScanSegment(file, tuple(held), available)
                held = []
            held.append(target)
        if held:
            yield ScanSegment(file, tuple(held), available)


class _Open:
    """A chunk that is being read."""

    def __init__(self, target: ScanChunk, witness: ChunkWitness | None) -> None:
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
        places: PieceLocations,
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
        self._bad_chunks: dict[int, list[ScanChunk]] = {}
        self._windows = Windows()
        self.read_bytes = 0

    def run(self, work: Sequence[ScanSegment], threads: int) -> None:
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

    def _segment(self, segment: ScanSegment, files: LocalFiles) -> None:
        try:
            self._scan(segment, files)
        except RefusedError as error:
            if len(segment.targets) > 1:
                # One of them is of a kind that is not read, which says nothing of the others.
                for target in segment.targets:
                    self._segment(ScanSegment(segment.file, (target,), segment.available), files)
                return
            entry = self._places.manifest.files[segment.file]
            name = self._places.filemap.tensors[segment.targets[0].tensor].name
            self._findings.add(VerifyFinding.of(error, entry.path, entry.rank, name))
        except CkptdError as error:
            entry = self._places.manifest.files[segment.file]
            self._findings.add(VerifyFinding.of(error, entry.path, entry.rank))
            self._witness.skip(self._places.filemap.tensors[t.tensor].name for t in segment.targets)
        size = segment.targets[-1].end - segment.targets[0].start
        with self._lock:
            self.read_bytes += size
            if self._progress is not None:
                self._progress(self.read_bytes, self._total)

    def _scan(self, segment: ScanSegment, files: LocalFiles) -> None:
        entry = self._places.manifest.files[segment.file]
        lo = segment.targets[0].start // BLOCK_BYTES * BLOCK_BYTES
        end = -(-segment.targets[-1].end // BLOCK_BYTES) * BLOCK_BYTES
        if self._places.indexes[segment.file] is None:
            # Without digests no block has to be whole, and what lies beside is not read.
            lo, end = segment.targets[0].start, segment.targets[-1].end
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
        window = self._windows.get(stop - start)
        files.read(file, start, window.data)
        return window

    def _check_blocks(self, file: int, start: int, window: NDArray[np.uint8]) -> None:
        index = self._places.indexes[file]
        if index is None:
            return
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
        target, index = chunk.target, self._places.indexes[file]
        if index is None:
            return
        wanted, found = index.chunk(target.number), chunk.hash.digest()
        if wanted == found:
            return
        entry = self._places.manifest.files[file]
        first, last = target.start // BLOCK_BYTES, max(target.start, target.end - 1) // BLOCK_BYTES
        with self._lock:
            self._bad_chunks.setdefault(file, []).append(target)
            bad = [b for b in range(first, last + 1) if (file, b) in self._bad_blocks]
        self._findings.note(
            "digest",
            "a chunk is corrupt: digest mismatch",
            entry,
            tensor=self._places.filemap.tensors[target.tensor].name,
            chunk=target.name,
            where=f"bytes {target.start} to {target.end} of the data, "
            + (f"bad blocks {first_few(bad)}" if bad else "its blocks are good"),
            wanted=f"XXH3-128 {wanted.hex()}",
            found=f"XXH3-128 {found.hex()}",
        )

    def _report_blocks(self) -> None:
        """Report bad blocks that no bad chunk explains: readers check blocks and would refuse."""
        for file, block in sorted(self._bad_blocks):
            lo, hi = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            if any(t.start < hi and lo < t.end for t in self._bad_chunks.get(file, ())):
                continue
            entry = self._places.manifest.files[file]
            held = self._places.chunks_at(file, lo, hi)
            self._findings.note(
                "digest",
                "a block is corrupt, though this checkpoint's chunks in it are good",
                entry,
                tensor=held[0][0] if held else "",
                chunk=held[0][1] if held else "",
                where=f"block {block}",
            )


_MOST_CHUNKS = 32
_MOST_THREADS = 8


def check_records(index: Index) -> tuple[VerifyFinding, ...]:
    """Check the records by which a root says what counts: every generation's, and that none lacks.

    Raises
    ------
    StoreError
        As the store says.
    """
    found = []
    for number in index.generations():
        try:
            index.generation(number)
        except (CorruptError, NotFoundError) as error:
            found.append(VerifyFinding.of(error, generation_key(number)))
    suspect = index.suspect()
    return (*found, *([VerifyFinding.of(suspect)] if suspect is not None else ()))


def verify(
    index: Index,
    name: CommitName,
    *,
    deep: bool = True,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check one checkpoint and list everything that is wrong with it.

    Parameters
    ----------
    index
        The root's catalogue. Hold a lease where others delete.
    name
        The checkpoint.
    deep
        Read all data; otherwise only sizes and headers.
    threads
        Concurrent reads; by cores and store when left out.
    progress
        Called with ``(bytes done, bytes total)``, from threads, one call at a time.

    Raises
    ------
    NotFoundError
        There is no such checkpoint. Whatever else is wrong is a finding.
    DeadlineError
        kind ``stalled``: the store does not answer.
    """
    try:
        commit = index.commit(name)
    except NotFoundError:
        raise
    except CkptdError as error:
        return VerifyReport.failed(name, error, deep=deep)
    try:
        reader = CkptdReader(index, commit)
    except CkptdError as error:
        return VerifyReport.failed(name, error, commit.folder + commit.manifest, deep=deep)
    return _Verification(reader, threads).go(deep, progress)


class _Verification:
    def __init__(self, reader: CkptdReader, threads: int | None) -> None:
        self._reader = reader
        self._store = reader.store
        self._manifest = reader.manifest
        self._filemap = reader.filemap
        self._places = reader.places
        self._findings = Findings()
        local = self._store.capabilities.local_files
        parallel = cores() if local else self._store.capabilities.parallel
        self._threads = threads or max(2, min(_MOST_THREADS, parallel))
        self._available: dict[int, int] = {}

    def go(self, deep: bool, progress: Callable[[int, int], None] | None) -> VerifyReport:
        self._check_whole()
        for name, kind in self._reader.unread.items():
            self._findings.note(
                "unreadable-format",
                "a tensor of this kind cannot be verified",
                tensor=name,
                where=self._manifest.folder,
                found=kind,
            )
        self._witness = WitnessCheck(self._store, self._manifest, self._findings, deep=deep)
        run_all(
            [i for i, f in enumerate(self._manifest.files) if f.data_start],
            lambda file: self._check_file(file, deep),
            threads=self._threads,
            stall_s=STALL_S,
            what="checking files",
        )
        read_bytes = 0
        if deep:
            scan = Scan(self._store, self._places, self._findings, self._witness, progress)
            work = list(segments(self._places, sorted(self._available.items())))
            scan.run(work, self._threads)
            read_bytes = scan.read_bytes
            self._witness.finish()
        return self._report(deep, read_bytes)

    def _report(self, deep: bool, read_bytes: int) -> VerifyReport:
        manifest = self._manifest
        return VerifyReport(
            step=manifest.step,
            generation=manifest.generation,
            deep=deep,
            files=len(manifest.files),
            tensors=len(self._reader.infos),
            chunks=sum(self._filemap.nchunks(i) for i, _ in enumerate(manifest.files)),
            data_bytes=sum(f.data_bytes for f in manifest.files),
            read_bytes=read_bytes,
            absent=tuple(a.tensor for a in check_coverage(manifest, self._filemap)),
            blind=self._witness.blind,
            findings=self._findings.all(),
            more=self._findings.more,
        )

    # -- the whole -----------------------------------------------------------------------------

    def _check_whole(self) -> None:
        """Compare the commit record, the manifest and the lengths of files with each other."""
        try:
            check_files(self._manifest, self._filemap, self._reader.commit.folder)
        except CkptdError as error:
            self._findings.add(VerifyFinding.of(error))
        record, manifest = self._reader.commit, self._manifest
        used = {f.folder for f in manifest.files if f.data_start}
        unnamed = sorted(used - set(record.folders))
        if unnamed:
            self._findings.note(
                "corrupt",
                "the commit record does not name a folder that is needed: gc would delete it",
                commit_key(record.name),
                wanted=", ".join(unnamed[:4]),
                found=", ".join(record.folders[:4]),
            )
        if record.world_size != manifest.world_size:
            self._findings.note(
                "corrupt",
                "commit record and manifest disagree on the number of ranks",
                commit_key(record.name),
                wanted=str(manifest.world_size),
                found=str(record.world_size),
            )

    # -- one file ------------------------------------------------------------------------------

    def _check_file(self, file: int, deep: bool) -> None:
        entry = self._manifest.files[file]
        try:
            available = self._check_size(file, entry)
            if available >= 0 and self._check_header(file, entry):
                self._check_index(file, entry, deep)
        except CkptdError as error:
            # The store's own failures included: the other files are looked at all the same.
            self._add(error, entry)
        if deep and file in self._places.indexes:
            self._available[file] = min(available, entry.data_bytes)
        else:
            self._skip(file)

    def _check_size(self, file: int, entry: FileEntry) -> int:
        """Return how many bytes of data are there; below zero when not even the header is."""
        try:
            size = self._store.stat(entry.path).size
        except NotFoundError:
            self._add(missing_file(entry.path, entry.rank), entry)
            self._lost(file, 0)
            return -1
        wanted = entry.data_start + entry.data_bytes
        if size != wanted:
            short = size < wanted
            error = CorruptError(
                "a data file has the wrong size",
                kind="truncated" if short else None,
                wanted=f"{wanted} bytes",
                found=f"{size} bytes",
            )
            self._add(error, entry)
            if short:
                self._lost(file, size - entry.data_start)
        return size - entry.data_start

    def _add(self, error: CkptdError, entry: FileEntry) -> None:
        self._findings.add(VerifyFinding.of(error, entry.path, entry.rank))

    def _lost(self, file: int, available: int) -> None:
        """Name the chunks that do not lie in the first `available` bytes."""
        entry = self._manifest.files[file]
        own = self._places.is_own(file)
        names = [
            (self._filemap.tensors[c.tensor].name, self._filemap.chunk_name(file, c))
            for c in self._filemap.chunks(file)
            # In an older file that is damaged the place of a chunk is unknown.
            if not own or c.end > available
        ]
        for tensor, chunk in names[:_MOST_CHUNKS]:
            more = len(names) - _MOST_CHUNKS
            self._findings.note(
                "lost",
                "a chunk lies in the part of a file that is missing",
                entry,
                tensor=tensor,
                chunk=chunk,
                where=f"and {more} more chunks of this file" if more > 0 else "",
            )
        self._witness.skip(tensor for tensor, _ in names)

    def _skip(self, file: int) -> None:
        tensors = self._filemap.tensors
        self._witness.skip(tensors[c.tensor].name for c in self._filemap.chunks(file))

    def _check_header(self, file: int, entry: FileEntry) -> bool:
        """Compare the header with what the manifest implies: names, places, types, shapes.

        Tells whether the data can be read: without its header it can in a file of this
        checkpoint, and not in an older one's.
        """
        own = self._places.is_own(file)
        found: Mapping[str, Chunk]
        try:
            if own:
                found = read_header(self._store, entry, sized=True)[0]
            else:
                found = self._places.header(file)
        except CorruptError as error:
            self._add(error, entry)
            return own
        wrong = 0
        chunks = self._filemap.chunks(file)
        if own and len(found) != len(chunks):
            message = "the header and the manifest disagree"
            counts = f"{len(chunks)} chunks", f"{len(found)} chunks"
            self._add(CorruptError(message, wanted=counts[0], found=counts[1]), entry)
        for c in chunks:
            name, dtype = self._filemap.chunk_name(file, c), self._filemap.dtypes[c.tensor]
            chunk = found.get(name)
            start = c.start if own or chunk is None else chunk.start
            size = c.end - c.start
            wanted = Chunk(
                name, dtype.stored_code, dtype.stored_shape(c.piece.shape), start, start + size
            )
            if chunk != wanted and wrong < _MOST_CHUNKS:
                wrong += 1
                self._findings.note(
                    "corrupt",
                    "the header and the manifest disagree on a chunk",
                    entry,
                    tensor=self._filemap.tensors[c.tensor].name,
                    chunk=name,
                    wanted=_chunk_text(wanted),
                    found=_chunk_text(chunk) if chunk else "nothing",
                )
        return True

    def _check_index(self, file: int, entry: FileEntry, deep: bool) -> None:
        key = digests_key(entry.path)
        try:
            if not deep:
                if entry.index:
                    check_index_size(self._store, entry)
                return
            index = load_index(self._store, entry)
            if index is not None:
                count = self._filemap.nchunks(file) if self._places.is_own(file) else None
                check_index(entry, index, count, key)
        except CkptdError as error:
            self._findings.add(VerifyFinding.of(error, key, entry.rank))
            return
        self._places.indexes[file] = index


def _chunk_text(chunk: Chunk) -> str:
    return f"{chunk.code} {list(chunk.shape)} at {chunk.start}"
