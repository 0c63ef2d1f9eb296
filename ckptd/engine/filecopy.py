"""Copying the files of one checkpoint into another root, and committing them there."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.fetch import load_index
from ckptd.engine.places import Places, missing_file, read_header
from ckptd.engine.pool import run_all
from ckptd.engine.publish import publish_manifest
from ckptd.engine.working import Working
from ckptd.errors import CorruptError, NotFoundError, TransientStoreError
from ckptd.format.digest import BLOCK_BYTES, DigestIndex, digest, digest_hex
from ckptd.format.filemap import FileMap
from ckptd.format.invariants import check_index
from ckptd.format.manifest import FileEntry, Manifest
from ckptd.format.names import WITNESS, CommitName, data_folder, digests_key
from ckptd.format.records import Commit
from ckptd.store.base import Store
from ckptd.store.retry import Backoff
from ckptd.store.spec import RetrySpec
from ckptd.types import ByteRange

__all__ = ["FileCopy", "Original"]

_SLICE_BYTES = 4 << 20
_THREADS = 4
_STALL_S = 900.0
_ATTEMPT_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint of the source, read and checked."""

    commit: Commit
    manifest: Manifest
    filemap: FileMap


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
        original: Original,
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
        self._places = Places(original.manifest, original.filemap, source.store)
        self._lock = threading.Lock()
        self._total = sum(f.data_bytes for f in original.manifest.files)
        self._done = self._reused = 0
        # Named after what is copied: a later copy of the same finds its files by it.
        self._attempt = f"cp{original.commit.manifest_digest[:_ATTEMPT_DIGITS]}"
        self._name = CommitName(original.commit.step, working.generation)

    def run(self) -> int:
        """Copy everything and commit; return how many files were there already."""
        self._working.touch(self._name)
        files = self._files()
        run_all(
            [i for i, f in enumerate(files) if f.data_start],
            lambda i: self._file(i, files[i].path),
            threads=_THREADS,
            stall_s=_STALL_S,
            what="copying",
            pulse=lambda: self._done,
        )
        self._witness()
        self._commit(files)
        return self._reused

    def _files(self) -> list[FileEntry]:
        """Return the file table of the copy.

        Files of older checkpoints hold more than is referred to here, so they keep a folder of
        their own: those of the attempt's own folder are full to the last byte (spec 4.4).
        """
        own = self._original.manifest.folder
        folders = {own: data_folder(self._name, self._attempt)}
        for file in self._original.manifest.files:
            folder = file.path.rpartition("/")[0] + "/"
            if folder not in folders:
                attempt = f"{self._attempt}x{len(folders)}"
                folders[folder] = data_folder(self._name, attempt)
        out = []
        for file in self._original.manifest.files:
            folder, _, name = file.path.rpartition("/")
            out.append(msgspec.structs.replace(file, path=folders[f"{folder}/"] + name))
        return out

    # -- data files

    def _file(self, number: int, key: str) -> None:
        entry = self._original.manifest.files[number]
        if self._is_there(entry, key):
            with self._lock:
                self._reused += 1
            self._count(entry.data_bytes)
            return
        index = load_index(self._source, entry)
        header = self._header(number, entry, index)
        backoff = Backoff(RetrySpec())
        while True:
            try:
                self._write(number, key, header, index)
                break
            except TransientStoreError as error:
                backoff.wait(error)
        # Last: whoever finds the index knows that the file is complete.
        self._target.store.put(digests_key(key), index.encode())

    def _write(self, number: int, key: str, header: bytes, index: DigestIndex) -> None:
        """Write one file front to back, reading and checking as it goes."""
        entry = self._original.manifest.files[number]
        copied = 0
        try:
            with self._bulk.writer(key, len(header) + entry.data_bytes) as writer:
                writer.write(_aligned(header))
                for start in range(0, entry.data_bytes, _SLICE_BYTES):
                    view = self._slice(number, entry, index, start)
                    writer.write(view)
                    copied += len(view)
                    self._count(len(view))
                    self._working.touch(self._name)
                writer.commit()
        except TransientStoreError:
            self._count(-copied)  # it is copied again from its beginning
            raise

    def _is_there(self, entry: FileEntry, key: str) -> bool:
        if self._target.size(key) != entry.data_start + entry.data_bytes:
            return False
        try:
            return digest_hex(self._target.store.get(digests_key(key))) == entry.index
        except NotFoundError:
            return False

    def _header(self, number: int, entry: FileEntry, index: DigestIndex) -> bytes:
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
                    kind="bad-header",
                    where=f"{entry.path}, written by rank {entry.rank}",
                    wanted=f"{len(wanted)} chunks",
                    found=f"{len(said)} chunks, {len(set(said) - set(wanted))} of them others",
                )
        check_index(entry, index, nchunks, digests_key(entry.path))
        return self._source.get(entry.path, ByteRange(0, entry.data_start))

    def _slice(self, number: int, entry: FileEntry, index: DigestIndex, start: int) -> memoryview:
        """Read and check part of a data section, into memory that direct I/O can write from."""
        size = min(_SLICE_BYTES, entry.data_bytes - start)
        view = memoryview(mmap.mmap(-1, size))
        try:
            self._source.read_into(entry.path, entry.data_start + start, view)
        except NotFoundError:
            raise missing_file(entry.path, entry.rank) from None
        for at in range(0, size, BLOCK_BYTES):
            block = (start + at) // BLOCK_BYTES
            part = view[at : at + BLOCK_BYTES]
            if digest(part) != index.block(block):
                raise self._bad_block(number, entry, block, len(part))
        return view

    def _bad_block(self, number: int, entry: FileEntry, block: int, size: int) -> CorruptError:
        start = block * BLOCK_BYTES
        chunks = self._places.chunks_at(number, start, start + size)
        named = ", ".join(f"tensor {t} (chunk {c})" for t, c in chunks[:4])
        more = f" and {len(chunks) - 4} more" if len(chunks) > 4 else ""
        return CorruptError(
            "bytes of the checkpoint are not what was written",
            kind="digest",
            where=f"block {block} of {entry.path}, written by rank {entry.rank}: {named}{more}",
            hint="ckptd verify lists everything that is bad",
        )

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    # -- the rest

    def _witness(self) -> None:
        manifest = self._original.manifest
        if manifest.witness is None:
            return
        key = manifest.folder + WITNESS
        try:
            raw = self._source.get(key)
        except NotFoundError:
            raise CorruptError("the witness is gone", kind="missing-file", where=key) from None
        if digest_hex(raw) != manifest.witness.digest:
            raise CorruptError("the witness is not what was written", kind="digest", where=key)
        self._target.store.put(data_folder(self._name, self._attempt) + WITNESS, raw)

    def _commit(self, files: Sequence[FileEntry]) -> None:
        manifest = msgspec.structs.replace(
            self._original.manifest,
            generation=self._name.generation,
            attempt=self._attempt,
            files=tuple(files),
        )
        folders = {f.path.rpartition("/")[0] + "/" for f in files if f.data_start}
        for folder in sorted(folders - {manifest.folder}):
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
