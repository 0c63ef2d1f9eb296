"""Verification: is everything of one checkpoint as it was written? Goes on after errors.

From the top: commit record, manifest (digest, then every rule of the format), folders, then each
file: size, header against what the manifest implies, digest index, and with ``deep`` every block
and every chunk against its digest and the witness against the values. Nothing is written, and no
more memory is used than a few windows of data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.engine.fetch import check_index_size, load_index
from ckptd.engine.findings import Finding, Findings, VerifyReport
from ckptd.engine.index import Index
from ckptd.engine.places import Places, check_headers, missing_file, read_header
from ckptd.engine.pool import cores, run_all
from ckptd.engine.scan import Scan, segments
from ckptd.engine.witnesses import WitnessCheck
from ckptd.errors import CkptdError, CorruptError, NotFoundError
from ckptd.format.container import Chunk
from ckptd.format.filemap import FileMap
from ckptd.format.invariants import check_coverage, check_files, check_index, check_manifest
from ckptd.format.manifest import FileEntry, Manifest
from ckptd.format.names import CommitName, commit_key, digests_key, generation_key
from ckptd.format.records import Commit

__all__ = ["check_records", "verify"]

STALL_S = 300.0
_MOST_CHUNKS = 32
_MOST_THREADS = 8


def check_records(index: Index) -> tuple[Finding, ...]:
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
            found.append(Finding.of(error, generation_key(number)))
    suspect = index.suspect()
    return (*found, *([Finding.of(suspect)] if suspect is not None else ()))


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
        kind ``no-commit``: there is no such checkpoint. Whatever else is wrong is a finding.
    DeadlineError
        kind ``stalled``: the store does not answer.
    """
    findings = Findings()
    empty = VerifyReport(step=name.step, generation=name.generation, deep=deep)
    try:
        commit = index.commit(name)
    except NotFoundError:
        raise
    except CkptdError as error:
        return _with(empty, findings, Finding.of(error))
    try:
        manifest = index.manifest_of(commit)
        where = index.where(commit.folder + commit.manifest)
        filemap = check_manifest(manifest, where, commit.manifest_bytes)
        check_headers(index.store, manifest, filemap)
    except CkptdError as error:
        return _with(empty, findings, Finding.of(error, commit.folder + commit.manifest))
    run = _Verification(index, commit, manifest, filemap, findings, threads)
    return run.go(deep, progress)


def _with(report: VerifyReport, findings: Findings, finding: Finding) -> VerifyReport:
    findings.add(finding)
    return VerifyReport(
        step=report.step,
        generation=report.generation,
        deep=report.deep,
        findings=findings.all(),
    )


class _Verification:
    def __init__(
        self,
        index: Index,
        commit: Commit,
        manifest: Manifest,
        filemap: FileMap,
        findings: Findings,
        threads: int | None,
    ) -> None:
        self._store = index.store
        self._commit = commit
        self._manifest = manifest
        self._filemap = filemap
        self._findings = findings
        self._places = Places(manifest, filemap, self._store)
        local = self._store.capabilities.local_files
        parallel = cores() if local else self._store.capabilities.parallel
        self._threads = threads or max(2, min(_MOST_THREADS, parallel))
        self._available: dict[int, int] = {}

    def go(self, deep: bool, progress: Callable[[int, int], None] | None) -> VerifyReport:
        self._check_whole()
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
        encoded = {o.tensor for o in manifest.objects if o.tensor}
        return VerifyReport(
            step=manifest.step,
            generation=manifest.generation,
            deep=deep,
            files=len(manifest.files),
            tensors=sum(t.name not in encoded for t in manifest.tensors),
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
            check_files(self._manifest, self._filemap, self._commit.folder)
        except CkptdError as error:
            self._findings.add(Finding.of(error))
        record, manifest = self._commit, self._manifest
        used = {f.path.rpartition("/")[0] + "/" for f in manifest.files if f.data_start}
        unnamed = sorted(used - set(record.folders))
        if unnamed:
            self._findings.add(
                Finding(
                    kind="bad-record",
                    message="the commit record does not name a folder that is needed: "
                    "gc would delete it",
                    file=commit_key(record.name),
                    wanted=", ".join(unnamed[:4]),
                    found=", ".join(record.folders[:4]),
                )
            )
        if record.world_size != manifest.world_size:
            self._findings.add(
                Finding(
                    kind="bad-record",
                    message="commit record and manifest disagree on the number of ranks",
                    file=commit_key(record.name),
                    wanted=str(manifest.world_size),
                    found=str(record.world_size),
                )
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
                kind="truncated" if short else "bad-size",
                wanted=f"{wanted} bytes",
                found=f"{size} bytes",
            )
            self._add(error, entry)
            if short:
                self._lost(file, size - entry.data_start)
        return size - entry.data_start

    def _add(self, error: CkptdError, entry: FileEntry) -> None:
        self._findings.add(Finding.of(error, entry.path, entry.rank))

    def _lost(self, file: int, available: int) -> None:
        """Name the chunks that do not lie in the first `available` bytes."""
        entry = self._manifest.files[file]
        own = self._places.is_own(file)
        names = [
            (self._filemap.tensors[c.tensor].name, self._filemap.chunk_name(file, c))
            for c in self._filemap.chunks(file)
            # Where a chunk lies in an older file that is damaged nobody knows.
            if not own or c.end > available
        ]
        for tensor, chunk in names[:_MOST_CHUNKS]:
            more = len(names) - _MOST_CHUNKS
            self._findings.add(
                Finding(
                    kind="lost",
                    message="a chunk lies in the part of a file that is missing",
                    file=entry.path,
                    rank=entry.rank,
                    tensor=tensor,
                    chunk=chunk,
                    where=f"and {more} more chunks of this file" if more > 0 else "",
                )
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
            text = f"{len(chunks)} chunks", f"{len(found)} chunks"
            self._add(_header_error(*text), entry)
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
                self._findings.add(
                    Finding(
                        kind="bad-header" if own else "missing-chunk",
                        message="the header and the manifest disagree on a chunk",
                        file=entry.path,
                        rank=entry.rank,
                        tensor=self._filemap.tensors[c.tensor].name,
                        chunk=name,
                        wanted=_chunk_text(wanted),
                        found=_chunk_text(chunk) if chunk else "nothing",
                    )
                )
        return True

    def _check_index(self, file: int, entry: FileEntry, deep: bool) -> None:
        key = digests_key(entry.path)
        try:
            if not deep:
                check_index_size(self._store, entry)
                return
            index = load_index(self._store, entry)
            count = self._filemap.nchunks(file) if self._places.is_own(file) else None
            check_index(entry, index, count, key)
        except CkptdError as error:
            self._findings.add(Finding.of(error, key, entry.rank))
            return
        self._places.indexes[file] = index


def _header_error(wanted: str, found: str) -> CorruptError:
    return CorruptError(
        "the header and the manifest disagree", kind="bad-header", wanted=wanted, found=found
    )


def _chunk_text(chunk: Chunk) -> str:
    return f"{chunk.code} {list(chunk.shape)} at {chunk.start}"
