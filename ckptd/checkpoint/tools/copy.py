"""Copy of checkpoints between roots: digests checked, resumed; threads, stall.

The copy is a checkpoint of the target like any other: data first, then witness and manifest, and
the commit record last, so that a copy that is killed is absent, never partial. It is written under
a generation that continues the target's line. The next copy takes up where a killed one stopped:
it works in the same generation and folder, and a file whose digest index is there is complete.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import msgspec

from ckptd.base.digest import BLOCK_BYTES, Digester, DigestIndex, digest_hex
from ckptd.base.runtime.pool import run_all
from ckptd.checkpoint.format.invariants import check_files, check_index
from ckptd.checkpoint.format.manifest import UNDIGESTED, FileEntry, Manifest
from ckptd.checkpoint.format.names import ROOT_MARKER, WITNESS, CommitName, data_folder, digests_key
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.format.witness import DATA
from ckptd.checkpoint.load.files import check_size, load_index, read_header
from ckptd.checkpoint.load.opening import begin_root
from ckptd.checkpoint.load.plan import BlockLine
from ckptd.checkpoint.load.read import Fetcher
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.load.witnesses import witness_file
from ckptd.checkpoint.root.catalogue import Catalogue, publish_manifest
from ckptd.checkpoint.root.working import Working, refuse_behind
from ckptd.errors import CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.store.base import RetrySpec, Store
from ckptd.store.wrap import Backoff
from ckptd.types import ByteRange

_SLICE_BYTES = 4 << 20
_THREADS = 4
_STALL_S = 900.0
_ATTEMPT_DIGITS = 24


class FileCopy:
    """The copying of one checkpoint.

    Parameters
    ----------
    source, target
        The roots.
    original
        What is copied.
    bulk
        The target's store without a `Retry` around it, through which data files are written: a
        `Retry` keeps a whole file in memory to write it again. Here it is read again instead.
    working
        The generation that the copy belongs to.
    progress
        Called with ``(bytes done, bytes in all)``.
    """

    def __init__(
        self,
        source: Catalogue,
        target: Catalogue,
        original: CkptdReader,
        bulk: Store,
        working: Working,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source.store
        self._target = target
        self._bulk = bulk
        self._original = original
        self._working = working
        self._progress = progress
        self._places = original.places
        self._line = BlockLine([f.data_bytes for f in original.manifest.files])
        self._fetcher = Fetcher(
            self._source, self._places, self._line, None, threads=_THREADS, stall_s=_STALL_S
        )
        self._lock = threading.Lock()
        self._total = sum(f.data_bytes for f in original.manifest.files)
        self._done = self._reused = 0
        # Named after what is copied: a later copy of the same finds its files by it.
        self._attempt = f"cp{original.commit.manifest_digest[:_ATTEMPT_DIGITS]}"
        self._name = CommitName(original.commit.step, working.generation)
        self._files = self._file_table()

    def run(self) -> int:
        """Copy everything and commit; return how many files were there already."""
        self._working.touch(self._name)
        run_all(
            [i for i, f in enumerate(self._files) if f.data_start],
            self._file,
            threads=_THREADS,
            stall_s=_STALL_S,
            what="copying",
            pulse=lambda: self._done,
        )
        if UNDIGESTED in self._original.manifest.requires:
            self._source.check_unchanged()
        self._witness()
        self._commit()
        return self._reused

    def _file_table(self) -> list[FileEntry]:
        """Return the file table of the copy.

        Files of older checkpoints hold more than is referred to here, so they keep a folder of
        their own: those of the attempt's own folder are full to the last byte (spec 4.4).
        """
        own = self._original.manifest.folder
        folders = {own: data_folder(self._name, self._attempt)}
        for file in self._original.manifest.files:
            if file.folder not in folders:
                attempt = f"{self._attempt}x{len(folders)}"
                folders[file.folder] = data_folder(self._name, attempt)
        return [
            msgspec.structs.replace(f, path=folders[f.folder] + f.path.removeprefix(f.folder))
            for f in self._original.manifest.files
        ]

    # -- data files

    def _file(self, number: int) -> None:
        entry, key = self._original.manifest.files[number], self._files[number].path
        if self._is_there(number, entry, key):
            with self._lock:
                self._reused += 1
            self._count(entry.data_bytes)
            return
        index = self._places.indexes[number] = load_index(self._source, entry)
        header = self._header(number, entry, index)
        backoff = Backoff(RetrySpec())
        while True:
            try:
                index = self._write(number, key, header, index)
                break
            except TransientStoreError as error:
                backoff.wait(error)
        if not entry.index:
            check_size(self._source, entry)  # it was not written again while it was copied
        del self._places.indexes[number]  # one a file, and there may be many
        if entry.digests:
            return
        # Last: a reader that finds the index knows that the file is complete.
        raw = index.encode()
        self._target.store.put(digests_key(key), raw)
        self._digested(number, raw)

    def _digested(self, number: int, raw: bytes) -> None:
        """Note the digest of a file's index, for the manifest of the copy."""
        entry = self._files[number]
        self._files[number] = msgspec.structs.replace(entry, index=digest_hex(raw))

    def _write(
        self, number: int, key: str, header: bytes, index: DigestIndex | None
    ) -> DigestIndex:
        """Write one file front to back, reading and checking as it goes; return its digests."""
        entry = self._original.manifest.files[number]
        copied = 0
        digests: DigestIndex | Digester
        if index is None:
            digests = Digester([chunk.end for chunk in self._original.filemap.chunks(number)])
        else:
            digests = index
        try:
            with self._bulk.writer(key, len(header) + entry.data_bytes) as writer:
                writer.write(_aligned(header))
                for start in range(0, entry.data_bytes, _SLICE_BYTES):
                    view = self._slice(number, entry, start)
                    writer.write(view)
                    if isinstance(digests, Digester):
                        digests.update(view)
                    copied += len(view)
                    self._count(len(view))
                    self._working.touch(self._name)
                writer.commit()
        except TransientStoreError:
            self._count(-copied)  # it is copied again from its beginning
            raise
        return digests.index() if isinstance(digests, Digester) else digests

    def _is_there(self, number: int, entry: FileEntry, key: str) -> bool:
        if self._target.size(key) != entry.data_start + entry.data_bytes:
            return False
        try:
            raw = self._target.store.get(digests_key(key))
        except NotFoundError:
            return False
        if entry.index:
            return digest_hex(raw) == entry.index
        # The original has no digests: an earlier copy made these, and made them last.
        self._digested(number, raw)
        return True

    def _header(self, number: int, entry: FileEntry, index: DigestIndex | None) -> bytes:
        """Return the header when it says what the manifest says."""
        chunks, _ = read_header(self._source, entry)
        nchunks = len(chunks)
        if self._places.is_own(number):
            said = [(c.name, c.code, c.shape) for c in chunks.values()]
            wanted = [
                (name, dtype.stored_code, dtype.stored_shape(shape))
                for name, dtype, shape in self._original.filemap.header_entries(number)
            ]
            if sorted(said) != sorted(wanted):
                raise CorruptError(
                    "a data file's header and the manifest disagree",
                    where=f"{entry.path}, written by rank {entry.rank}",
                    wanted=f"{len(wanted)} chunks",
                    found=f"{len(said)} chunks, {len(set(said) - set(wanted))} of them others",
                )
        if index is not None:
            check_index(entry, index, nchunks, digests_key(entry.path))
        return self._source.get(entry.path, ByteRange(0, entry.data_start))

    def _slice(self, number: int, entry: FileEntry, start: int) -> memoryview:
        """Read and check part of a data section, into memory that direct I/O can write from."""
        view = memoryview(mmap.mmap(-1, min(_SLICE_BYTES, entry.data_bytes - start)))
        self._fetcher.bring(number, self._line.first(number) + start // BLOCK_BYTES, view)
        return view

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    # -- the rest

    def _witness(self) -> None:
        manifest = self._original.manifest
        if manifest.witness is None or manifest.witness.kind == DATA:
            return
        raw = witness_file(self._source, manifest, manifest.witness)
        self._target.store.put(data_folder(self._name, self._attempt) + WITNESS, raw)

    def _commit(self) -> None:
        manifest = msgspec.structs.replace(
            self._original.manifest,
            generation=self._name.generation,
            attempt=self._attempt,
            files=tuple(self._files),
            requires=tuple(r for r in self._original.manifest.requires if r != UNDIGESTED),
        )
        for folder in sorted({f.folder for f in self._files if f.data_start}):
            self._target.store.sync(folder)
        publish_manifest(
            self._target,
            manifest,
            write_id=self._working.work_id,
            created=self._original.commit.created,
        )


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)


REASON = "cp"
"""Reason of the generations that copies claim."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one checkpoint.

    Attributes
    ----------
    step, source_generation
        The original.
    generation
        Of the copy.
    state
        ``copied``; ``present``: the target has it already, and nothing was done.
    bytes, files
        Bytes of data, and data files.
    reused_files
        Files that an earlier copy, which was killed, had finished.
    """

    step: int
    source_generation: int
    generation: int
    state: str
    bytes: int
    files: int
    reused_files: int = 0


class Transfer:
    """Copies checkpoints of one root into another.

    Parameters
    ----------
    source, target
        The roots; the target is made when it is none yet.
    progress
        Called with ``(bytes done, bytes in all)`` of the checkpoint under way.
    bulk
        See `ckptd.checkpoint.tools.copy.FileCopy`; the target's own store when left out.

    Raises
    ------
    UsageError
        A checkpoint is to be copied into the root it lies in, or a reshard would replace the files
        that it reads.
    RefusedError
        Kind ``no-create-only``: the target cannot keep checkpoints. Kind ``exists``: a foreign
        checkpoint is there.
    """

    def __init__(
        self,
        source: Catalogue,
        target: Catalogue,
        progress: Callable[[int, int], None] | None = None,
        *,
        bulk: Store | None = None,
    ) -> None:
        self._bulk = bulk or target.store
        self._source = source
        self._target = target
        self._progress = progress
        self._working: Working | None = None
        if source.open().root_id == begin_root(target).root_id:
            raise UsageError(
                "source and target are the same root",
                where=source.store.url,
                hint="ckptd rollback goes back to an older step; ckptd pin keeps one",
            )
        self._bulk.anchor(ROOT_MARKER)  # a store of its own, which has opened no root

    def copy(self, commit: Commit) -> Copied:
        """Copy one checkpoint; durable on return. The caller holds a lease on it.

        Raises
        ------
        CorruptError
            The original is damaged: names tensor, chunk, file and rank. The target is unchanged.
        RefusedError
            Kind ``behind``: the target has that step, or a later one, and it is another one. Kind
            ``unreadable-format``: the original has tensors of kinds that are not read.
        ConflictError
            Another copy into this root is at work. Kind ``superseded``: a job claimed a generation
            of the target meanwhile.
        """
        original = CkptdReader(self._source, commit)
        original.refuse_unread()
        check_files(original.manifest, original.filemap, original.manifest_path)
        present = self._present(original)
        if present is not None:
            self._annotate(original, present)
            return self._report(original, present.generation, "present", 0)
        if self._working is None:
            self._working = Working.begin(self._target, REASON)
        work = FileCopy(
            self._source, self._target, original, self._bulk, self._working, self._progress
        )
        reused = work.run()
        self._annotate(original, CommitName(commit.step, self._working.generation))
        return self._report(original, self._working.generation, "copied", reused)

    def _annotate(self, original: CkptdReader, name: CommitName) -> None:
        """Add to the copy what was added to the original; what was added to the copy stays."""
        there = self._target.annotations([name])
        own = CkptdReader(self._target, name, listed=False).metadata if name in there else {}
        self._target.annotate(name, {**original.metadata, **own})

    def close(self) -> None:
        """Tell others that this copy is no longer at work. Idempotent."""
        if self._working is not None:
            self._working.end()
            self._working = None

    def _present(self, original: CkptdReader) -> CommitName | None:
        """Return the copy that the target's line has already, if it has one."""
        line = self._target.line()
        step = original.commit.step
        for name in line:
            if name.step == step:
                if _same(self._target.manifest(name), original.manifest):
                    return name
                break
        refuse_behind(self._target, line, step)
        return None

    def _report(self, original: CkptdReader, generation: int, state: str, reused: int) -> Copied:
        return Copied(
            step=original.commit.step,
            source_generation=original.commit.generation,
            generation=generation,
            state=state,
            bytes=sum(f.data_bytes for f in original.manifest.files),
            files=sum(1 for f in original.manifest.files if f.data_start),
            reused_files=reused,
        )


def _same(copy: Manifest, original: Manifest) -> bool:
    """Tell whether one is a copy of the other: alike in everything but where they lie."""
    digested = UNDIGESTED not in original.requires
    return _content(copy, digested) == _content(original, digested)


def _content(manifest: Manifest, digested: bool) -> Manifest:
    files = tuple(
        msgspec.structs.replace(f, path="", index=f.index if digested else "")
        for f in manifest.files
    )
    return msgspec.structs.replace(manifest, generation=0, attempt="", files=files, requires=())
