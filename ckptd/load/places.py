"""Where each piece lies: file and offset, also for files that an older checkpoint wrote.

Offsets in a checkpoint's own files follow from its manifest. A file of an older checkpoint holds
more than what is referred to here, so there the safetensors header tells, by chunk name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeVar

from ckptd.errors import CkptdError, CorruptError, NotFoundError, UsageError
from ckptd.format.container import MAX_HEADER_BYTES, Chunk, header_bytes, parse_header
from ckptd.format.digest import DigestIndex
from ckptd.format.filemap import ChunkRef, FileMap, is_home
from ckptd.format.invariants import FREE_CHUNKS, check_chunks
from ckptd.format.manifest import FileEntry, Manifest
from ckptd.format.names import parse_chunk_name
from ckptd.layout.owners import ABSENT
from ckptd.store.base import Store
from ckptd.types import ByteRange

__all__ = ["Places", "blame", "check_headers", "check_size", "missing_file", "read_header"]

E = TypeVar("E", bound=CkptdError)


class Places:
    """Finds pieces in files; safe to share between threads.

    Parameters
    ----------
    manifest, filemap
        The checkpoint.
    store
        Its root: asked for headers of older checkpoints' files and for nothing else. May be left
        out for a checkpoint that refers to none.
    """

    def __init__(self, manifest: Manifest, filemap: FileMap, store: Store | None = None) -> None:
        self.manifest = manifest
        self.filemap = filemap
        self._store = store
        self._folder = manifest.folder
        self._checked: dict[int, bool] = {}
        self.indexes: dict[int, DigestIndex] = {}
        """Checked digest indexes by file: several reads of one checkpoint share them."""
        self._headers: dict[int, dict[str, Chunk]] = {}
        self._lock = threading.Lock()

    def is_own(self, file: int) -> bool:
        """Whether this checkpoint wrote `file` itself."""
        return is_home(self.manifest.files[file].path, self._folder)

    def of(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return ``(file, first byte in its data section)`` of a piece; `ABSENT` for no file.

        Raises
        ------
        CorruptError
            The file's header does not hold the chunk, or manifest and file disagree.
        """
        file, start, _ = self.filemap.locate(tensor, piece)
        if file == ABSENT:
            return ABSENT, 0
        own = self._checked.get(file)
        if own is None:
            own = self._check(tensor, file)
        return file, start if own else self._chunk(tensor, piece, file).start

    def _check(self, tensor: int, file: int) -> bool:
        """Check once for each file that it exists and has the size that the tables imply."""
        if not 0 <= file < len(self.manifest.files):
            raise CorruptError(
                "an owner map names a file that does not exist",
                kind="bad-manifest",
                where=self.filemap.tensors[tensor].name,
                found=f"file {file} of {len(self.manifest.files)}",
            )
        entry, own = self.manifest.files[file], self.is_own(file)
        implied = self.filemap.data_bytes(file)
        if own and implied != entry.data_bytes:
            raise CorruptError(
                "the manifest's tables and its file size disagree",
                kind="bad-manifest",
                where=entry.path,
                wanted=f"{implied} bytes",
                found=f"{entry.data_bytes} bytes",
            )
        self._checked[file] = own
        return own

    def _chunk(self, tensor: int, piece: int, file: int) -> Chunk:
        dtype, cut = self.filemap.dtypes[tensor], self.filemap.grid_of(tensor).piece(piece)
        name = self.filemap.chunk_name(file, ChunkRef(tensor, cut, 0, 0))
        chunk = self.header(file).get(name)
        wanted = (dtype.stored_code, dtype.stored_shape(cut.shape))
        if chunk is None or (chunk.code, chunk.shape) != wanted:
            raise CorruptError(
                "a file of an older checkpoint does not hold the chunk referred to",
                kind="missing-chunk",
                where=f"chunk {name} of {self.manifest.files[file].path}",
                wanted=f"{wanted[0]} {wanted[1]}",
                found="nothing" if chunk is None else f"{chunk.code} {chunk.shape}",
            )
        return chunk

    def header(self, file: int) -> Mapping[str, Chunk]:
        """Return the chunks of `file` by name, from its header (read once)."""
        with self._lock:
            found = self._headers.get(file)
        if found is None:
            entry = self.manifest.files[file]
            if self._store is None:
                raise UsageError("a store is needed to read a header", where=entry.path)
            try:
                found = read_header(self._store, entry)[0]
            except CorruptError as error:
                raise blame(error, entry.path) from error.__cause__
            with self._lock:
                self._headers[file] = found
        return found

    def chunks_at(self, file: int, start: int, end: int) -> list[tuple[str, str]]:
        """Return ``(tensor, chunk name)`` of what lies in bytes ``[start, end)``, for errors."""
        if not self.is_own(file):
            found = [c for c in self.header(file).values() if c.start < end and start < c.end]
            return [(parse_chunk_name(c.name)[0], c.name) for c in found]
        return [
            (self.filemap.tensors[c.tensor].name, self.filemap.chunk_name(file, c))
            for c in self.filemap.chunks(file)
            if c.start < end and start < c.end
        ]


def blame(error: E, key: str) -> E:
    """Say which object was found bad, for whoever may have it elsewhere too; return `error`."""
    error.key = key
    return error


def missing_file(path: str, rank: int, what: str = "data file") -> CorruptError:
    """Return the error for a file that the manifest names and the store does not have."""
    error = CorruptError(
        f"a {what} of the checkpoint is missing",
        kind="missing-file",
        where=f"{path}, written by rank {rank}",
        hint="ckptd verify lists everything that is bad; load an older step or another tier",
    )
    return blame(error, path)


def check_size(store: Store, entry: FileEntry) -> None:
    """Compare a data file's size with the manifest before anything is allocated for it.

    Raises
    ------
    CorruptError
        kind ``missing-file``, ``truncated``, or ``bad-size`` for a file that is too long.
    """
    try:
        found = store.stat(entry.path).size
    except NotFoundError:
        raise missing_file(entry.path, entry.rank) from None
    wanted = entry.data_start + entry.data_bytes
    if found != wanted:
        error = CorruptError(
            "a data file has the wrong size",
            kind="truncated" if found < wanted else "bad-size",
            where=f"{entry.path}, written by rank {entry.rank}",
            wanted=f"{wanted} bytes",
            found=f"{found} bytes",
        )
        raise blame(error, entry.path)


def check_headers(store: Store, manifest: Manifest, filemap: FileMap) -> None:
    """Bound the chunks of a checkpoint by the files that are there, before any are listed.

    What a manifest says of the length of headers is a claim. A checkpoint of few chunks is not
    looked at: it costs a listing of its folders.

    Raises
    ------
    CorruptError
        kind ``limits``: no header that is there can name so many.
    """
    if filemap.total_chunks <= FREE_CHUNKS:
        return
    claimed = {f.path: f.data_start for f in manifest.files}
    folders = sorted({f.folder for f in manifest.files})
    real = 0
    for folder in folders:
        for info in store.list(folder):
            real += min(info.size, claimed.get(info.key, 0))
    check_chunks(filemap, real, manifest.folder)


def read_header(
    store: Store, entry: FileEntry, *, sized: bool = False
) -> tuple[dict[str, Chunk], dict[str, str]]:
    """Read and check the header of a data file.

    Parameters
    ----------
    sized
        The caller has compared the file's size already.

    Returns
    -------
    chunks, metadata
        See `ckptd.format.container.parse_header`.

    Raises
    ------
    CorruptError
        Missing or truncated file, impossible or broken header.
    """
    if not sized:
        check_size(store, entry)
    if not 8 < entry.data_start <= MAX_HEADER_BYTES + 8:
        raise CorruptError(
            "impossible header length in the manifest",
            kind="bad-manifest",
            where=entry.path,
            found=entry.data_start,
        )
    try:
        raw = store.get(entry.path, ByteRange(0, entry.data_start))
    except NotFoundError:
        raise missing_file(entry.path, entry.rank) from None
    length = header_bytes(raw[:8], entry.path, entry.data_start + entry.data_bytes)
    if length != entry.data_start:
        raise CorruptError(
            "the header's length is not what the manifest says",
            kind="bad-header",
            where=entry.path,
            wanted=entry.data_start,
            found=length,
        )
    return parse_header(raw, entry.path, entry.data_bytes)
