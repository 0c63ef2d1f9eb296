"""Data files of a load: sizes, headers and indexes checked, open descriptors, mmap, read-ahead.

In it: how many files stay open; sealed memory; steps of read-ahead.

Offsets in a checkpoint's own files follow from its manifest. A file of an older checkpoint holds
more than what is referred to here, so its safetensors header gives them, by chunk name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import DIGEST_BYTES, MAX_CHUNKS, DigestIndex, block_count, digest, digest_hex
from ckptd.base.grids.owners import ABSENT
from ckptd.base.runtime.guarded import GuardedMapping
from ckptd.base.runtime.host import available_bytes
from ckptd.checkpoint.format.container import (
    MAX_HEADER_BYTES,
    Chunk,
    ChunkRef,
    FileMap,
    header_bytes,
    is_home,
    parse_header,
)
from ckptd.checkpoint.format.invariants import FREE_CHUNKS, check_chunks, check_index
from ckptd.checkpoint.format.manifest import FileEntry, Manifest
from ckptd.checkpoint.format.names import digests_key, parse_chunk_name
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError, UsageError
from ckptd.store.base import Store
from ckptd.store.osio import is_cached, reading
from ckptd.types import ByteRange

_INDEX_HEADER_BYTES = 32
E = TypeVar("E", bound=CkptdError)


class PieceLocations:
    """Finds pieces in the files of a checkpoint. Threads may share it.

    Parameters
    ----------
    manifest, filemap
        The checkpoint.
    store
        Its root. May be left out where only pieces in the checkpoint's own files are located.
    """

    def __init__(self, manifest: Manifest, filemap: FileMap, store: Store | None = None) -> None:
        self.manifest = manifest
        self.filemap = filemap
        self.files = manifest.files
        self._store = store
        self._folder = manifest.folder
        self._checked: dict[int, bool] = {}
        self.indexes: dict[int, DigestIndex | None] = {}
        """Checked digest indexes by file: several reads of one checkpoint share them. None is
        for a file without digests."""
        self.sized: set[int] = set()
        """Files whose size is checked. Shared like `indexes`: each check is a request."""
        self._headers: dict[int, dict[str, Chunk]] = {}
        self._lock = threading.Lock()

    @property
    def store(self) -> Store:
        """The root of the checkpoint.

        Raises
        ------
        UsageError
            None was given.
        """
        if self._store is None:
            raise UsageError("reading files of a checkpoint needs its store", where=self._folder)
        return self._store

    def is_own(self, file: int) -> bool:
        """Whether this checkpoint wrote `file` itself, so that its manifest gives all places."""
        return is_home(self.files[file].path, self._folder)

    def is_digested(self, file: int) -> bool:
        """Whether `file` has digests: it is then read in their blocks, and compared with them."""
        return bool(self.files[file].index)

    def of(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return ``(file, first byte in its data section)`` of a piece; `ABSENT` for no file.

        Raises
        ------
        CorruptError
            The file's header does not hold the chunk, or manifest and file disagree.
        """
        file, starts = self.of_all(np.array([tensor]), piece)
        return file, int(starts[0])

    def of_all(self, tensors: NDArray[np.int64], piece: int) -> tuple[int, NDArray[np.int64]]:
        """Do what `of` does for tensors that are cut and stored alike."""
        tensor = int(tensors[0])
        file, start, _ = self.filemap.locate(tensor, piece)
        if file == ABSENT:
            return ABSENT, np.zeros(len(tensors), dtype=np.int64)
        own = self._checked.get(file)
        if own is None:
            own = self._check(tensor, file)
        if not own:
            found = [self._chunk(t, piece, file).start for t in tensors.tolist()]
            return file, np.array(found, dtype=np.int64)
        at = self.filemap.starts(file)
        return file, at[tensors] + (start - int(at[tensor]))

    def all_own(self, files: Iterable[int]) -> bool:
        """Tell whether files that tables name are this checkpoint's own; these are checked."""
        return all(self._check(0, file) for file in files)

    def _check(self, tensor: int, file: int) -> bool:
        """Check once for each file that it exists and has the size that the tables imply."""
        if not 0 <= file < len(self.files):
            raise CorruptError(
                "an owner map names a file that does not exist",
                where=self.filemap.tensors[tensor].name,
                found=f"file {file} of {len(self.files)}",
            )
        entry, own = self.files[file], self.is_own(file)
        implied = self.filemap.data_bytes(file)
        if own and implied != entry.data_bytes:
            raise CorruptError(
                "the manifest's tables and its file size disagree",
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
                "a file of an older checkpoint lacks a chunk that this one refers to",
                where=f"chunk {name} of {self.files[file].path}",
                wanted=f"{wanted[0]} {wanted[1]}",
                found="nothing" if chunk is None else f"{chunk.code} {chunk.shape}",
            )
        return chunk

    def header(self, file: int) -> Mapping[str, Chunk]:
        """Return the chunks of `file` by name, from its header (read once)."""
        with self._lock:
            found = self._headers.get(file)
        if found is None:
            entry = self.files[file]
            try:
                found = read_header(self.store, entry)[0]
            except CorruptError as error:
                raise blame(error, entry.path) from error.__cause__
            with self._lock:
                self._headers[file] = found
        return found

    def holders(self, file: int, start: int, end: int, most: int = 4) -> str:
        """Return the names of what lies in bytes ``[start, end)`` of `file`, for errors."""
        chunks = self.chunks_at(file, start, end)
        named = ", ".join(
            f"tensor {tensor}" if tensor == chunk else f"tensor {tensor} (chunk {chunk})"
            for tensor, chunk in chunks[:most]
        )
        return f"{named} and {len(chunks) - most} more" if len(chunks) > most else named

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
    """Note which object was found bad, as another source may have a good one; return `error`."""
    error.key = key
    return error


def read_stored(store: Store, entry: FileEntry, start: int, view: memoryview) -> None:
    """Fill `view` from byte `start` of the data section of a file of a store.

    Raises
    ------
    CorruptError
        As of `missing_file`.
    StoreError
        As the store says.
    """
    try:
        store.read_into(entry.path, entry.data_start + start, view)
    except NotFoundError:
        raise missing_file(entry.path, entry.rank) from None


def missing_file(path: str, rank: int, what: str = "data file") -> CorruptError:
    """Return the error for a file that the manifest names and the store does not have."""
    error = CorruptError(
        f"a {what} of the checkpoint is missing",
        where=f"{path}, written by rank {rank}",
        hint="ckptd verify lists everything that is bad; load an older step or another tier",
    )
    return blame(error, path)


def check_size(store: Store, entry: FileEntry) -> None:
    """Compare a data file's size with the manifest before anything is allocated for it.

    Raises
    ------
    CorruptError
        kind ``truncated`` for a file that is too long.
    """
    _check_length(store, entry.path, entry.rank, "data file", entry.data_start + entry.data_bytes)


def _check_length(store: Store, key: str, rank: int, what: str, least: int, slack: int = 0) -> None:
    """Check that an object is there and has `least` bytes, or up to `slack` more."""
    try:
        found = store.stat(key).size
    except NotFoundError:
        raise missing_file(key, rank, what) from None
    if not least <= found <= least + slack:
        error = CorruptError(
            f"a {what} has the wrong size",
            kind="truncated" if found < least else None,
            where=f"{key}, written by rank {rank}",
            wanted=f"{'at least ' if slack else ''}{least} bytes",
            found=f"{found} bytes",
        )
        raise blame(error, key)


def check_headers(store: Store, manifest: Manifest, filemap: FileMap) -> None:
    """Bound the chunks of a checkpoint by the files that are there, before any are listed.

    What a manifest says of the length of headers is a claim. A checkpoint of few chunks is not
    looked at: it costs a listing of its folders.

    Raises
    ------
    CorruptError
        No header that is there can name so many.
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
        See `ckptd.checkpoint.format.container.parse_header`.

    Raises
    ------
    CorruptError
        Missing or truncated file, impossible or broken header.
    """
    if not sized:
        check_size(store, entry)
    if not 8 < entry.data_start <= MAX_HEADER_BYTES + 8:
        raise CorruptError(
            "impossible header length in the manifest", where=entry.path, found=entry.data_start
        )
    try:
        raw = store.get(entry.path, ByteRange(0, entry.data_start))
    except NotFoundError:
        raise missing_file(entry.path, entry.rank) from None
    length = header_bytes(raw[:8], entry.path, entry.data_start + entry.data_bytes)
    if length != entry.data_start:
        raise CorruptError(
            "the length of a data file's header differs from the manifest",
            where=entry.path,
            wanted=entry.data_start,
            found=length,
        )
    return parse_header(raw, entry.path, entry.data_bytes)


def check_index_size(store: Store, entry: FileEntry) -> None:
    """Check that the digest index of a data file is there and can be its, if it is a file.

    Raises
    ------
    CorruptError
        kind ``truncated`` among others.
    """
    if entry.digests:
        return
    least = _INDEX_HEADER_BYTES + block_count(entry.data_bytes) * DIGEST_BYTES
    most = MAX_CHUNKS * DIGEST_BYTES
    _check_length(store, digests_key(entry.path), entry.rank, "digest index", least, most)


def load_index(store: Store, entry: FileEntry) -> DigestIndex | None:
    """Read the digest index of a data file, and check it against the manifest.

    From the manifest where it has it. None for a file without digests.

    Raises
    ------
    CorruptError
        kinds ``truncated`` or ``digest`` among others.
    """
    if not entry.index:
        return None
    check_index_size(store, entry)
    key = digests_key(entry.path)
    where = f"{key}, written by rank {entry.rank}"
    try:
        raw = entry.digests or store.get(key)
    except NotFoundError:
        raise missing_file(key, entry.rank, "digest index") from None
    found = digest_hex(raw)
    if found != entry.index:
        error = CorruptError(
            "a digest index is corrupt: digest mismatch",
            kind="digest",
            where=where,
            wanted=f"XXH3-128 {entry.index}",
            found=f"XXH3-128 {found}",
        )
        raise blame(error, key)
    index = DigestIndex.decode(raw, where)
    check_index(entry, index, where=where)
    return index


_MOST_IDLE = 32


class _Open(msgspec.Struct):
    """An open file: its descriptor, where the object begins in it, and threads at work.

    Attributes
    ----------
    data
        The data section, mapped for as long as it is wanted; None where that is not safe.
    guarded
        The same of a file on a disk; None where it must be read.
    """

    fd: int
    shift: int
    users: int = 0
    data: NDArray[np.uint8] | None = None
    guarded: GuardedMapping | None = None

    @property
    def identity(self) -> tuple[int, int, int]:
        """Return a key that all processes of this host have alike for the same bytes."""
        if self.fd < 0:
            return -1, -1, 0
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino, self.shift


class LocalFiles:
    """One descriptor a file: read-ahead lives in it, and threads with their own read half as fast.

    Sealed memory, as that of snapshots, is mapped: a read copies page by page, and takes twice the
    time. To read a file that another process truncates is an error, and to touch its mapping is a
    SIGBUS: files on disks are mapped where a `GuardedMapping` prevents that, and only pages in the
    page cache are taken from there. Others are read.

    A file stays the one that was opened first: what was verified is not taken from elsewhere later.

    Parameters
    ----------
    store
        Where the files are.
    entries
        The files of the manifest.
    on_read
        Called from threads with the key of a file and the bytes that `read` took from it.
    """

    def __init__(
        self,
        store: Store,
        entries: Sequence[FileEntry],
        on_read: Callable[[str, int], None] | None = None,
    ) -> None:
        self._store = store
        self._entries = entries
        self._on_read = on_read
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._first: dict[int, tuple[int, int, int]] = {}
        self._shifts: dict[int, int] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            self._close_idle(0)

    def identity(self, files: Iterable[int]) -> bytes:
        """Return what ranks of one host that open the same files agree on; empty: some cannot be.

        One that is missing is no reason against descriptors: the read will say so.
        """
        found: list[tuple[int, tuple[int, int, int]]] = []
        for file in files:
            try:
                with self.use(file) as fd:
                    if fd < 0:
                        return b""
                    found.append((file, self._first[file]))
            except CorruptError:
                found.append((file, (-1, -1, 0)))
            except StoreError:
                return b""
        return digest(msgspec.msgpack.encode(found))

    @contextmanager
    def use(self, file: int) -> Iterator[int]:
        """Give the descriptor of file number `file`; -1 for one that cannot be opened.

        Raises
        ------
        CorruptError
            It is not there, or no plain file.
        """
        with self._hold(file) as held:
            yield held.fd

    def memory(self, file: int) -> NDArray[np.uint8] | None:
        """Return the data section of a file where it lies; None where it has to be read.

        Raises
        ------
        CorruptError
            See `use`.
        """
        with self._hold(file) as held:
            return held.data

    @contextmanager
    def touching(
        self, file: int, start: int, end: int, *, count: bool = False
    ) -> Iterator[NDArray[np.uint8] | None]:
        """Give the data section of a file, of which a range may be touched in a short block.

        Parameters
        ----------
        count
            The range counts as read.

        Returns
        -------
        data
            None where the range has to be read.

        Raises
        ------
        CorruptError
            See `use`.
        StoreError
            What the kernel reports.
        """
        with self._hold(file) as held:
            if held.data is not None or held.guarded is None:
                context: AbstractContextManager[NDArray[np.uint8] | None] = nullcontext(held.data)
            elif self._is_cached(held, file, start, end):
                context = held.guarded.touching(start, end)
            else:
                context = nullcontext()
            with context as data:
                if data is not None and count and self._on_read is not None:
                    self._on_read(self._entries[file].path, end - start)
                yield data

    def is_cached(self, file: int, start: int, end: int) -> bool:
        """Tell whether both ends of a range are in the page cache; False where it is unknown.

        Raises
        ------
        CorruptError
            See `use`.
        StoreError
            What the kernel reports.
        """
        with self._hold(file) as held:
            # Of what is memory the kernel does not say so.
            return _seals(held.fd) is not None or self._is_cached(held, file, start, end)

    def _is_cached(self, held: _Open, file: int, start: int, end: int) -> bool:
        entry = self._entries[file]
        first = entry.data_start + held.shift
        with reading(entry.path):
            return held.fd >= 0 and is_cached(held.fd, first + start, first + end - 1) is True

    @contextmanager
    def _hold(self, file: int) -> Iterator[_Open]:
        with self._lock:
            held = self._open.pop(file, None) or self._open_file(file)
            held.users += 1
            self._open[file] = held
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                self._close_idle(0 if self._closed else _MOST_IDLE)

    def _close_idle(self, keep: int) -> None:
        """Close the longest unused files; one in use (by a thread that hangs) is never closed."""
        idle = [file for file, held in self._open.items() if not held.users]
        for file in idle[: len(idle) - keep] if keep else idle:
            self._close(self._open.pop(file))

    @staticmethod
    def _close(held: _Open) -> None:
        if held.fd >= 0:
            os.close(held.fd)

    def _open_file(self, file: int) -> _Open:
        entry = self._entries[file]
        try:
            opened = self._store.open_file(entry.path)
        except NotFoundError:
            raise missing_file(entry.path, entry.rank) from None
        except CkptdError as error:
            error.key = entry.path
            raise
        held = _Open(-1, 0) if opened is None else _Open(opened.fd, opened.shift)
        if self._first.setdefault(file, held.identity) != held.identity:
            self._close(held)
            raise missing_file(entry.path, entry.rank, "data file that was open before")
        self._shifts[file] = held.shift
        first = entry.data_start + held.shift
        held.data = _sealed_memory(held.fd, first, entry.data_bytes)
        if held.data is None:
            held.guarded = GuardedMapping.of(held.fd, first, entry.data_bytes)
        return held

    def read(self, file: int, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the data section of file number `file`."""
        with self.use(file) as fd:
            self.read_exact(fd, file, start, view)
        if self._on_read is not None and fd >= 0:
            self._on_read(self._entries[file].path, len(view))

    def read_exact(self, fd: int, file: int, start: int, view: memoryview) -> None:
        """Fill `view` from the descriptor that `use` gave.

        Raises
        ------
        CorruptError
            kind ``truncated``: the file ended. Committed files never change, so another program
            truncated it.
        StoreError
            The system failed to read.
        """
        entry = self._entries[file]
        if fd < 0:
            read_stored(self._store, entry, start, view)
            return
        try:
            self._fill(fd, entry, start, self._shifts[file], view)
        except CkptdError as error:
            error.key = entry.path
            raise

    @staticmethod
    def _fill(fd: int, entry: FileEntry, start: int, shift: int, view: memoryview) -> None:
        done, first = 0, entry.data_start + start + shift
        while done < len(view):
            with reading(entry.path):
                n = os.preadv(fd, [view[done:]], first + done)
            if n == 0:
                raise CorruptError(
                    "a data file ended early",
                    kind="truncated",
                    where=f"{entry.path}, written by rank {entry.rank}",
                    wanted=f"{entry.data_start + entry.data_bytes} bytes",
                    found=f"{first + done - shift} bytes",
                )
            done += n


def _seals(fd: int) -> int | None:
    """Return the seals of a file that lies in memory, also one of tmpfs; None for any other."""
    if fd < 0 or not hasattr(fcntl, "F_GET_SEALS"):
        return None
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None


def _sealed_memory(fd: int, start: int, size: int) -> NDArray[np.uint8] | None:
    """Map `size` bytes of a file that is sealed against truncation; None for any other.

    Only the kernel's seal is trusted: to touch a part that was cut off is a SIGBUS.
    """
    seals = _seals(fd)
    if start < 0 or size <= 0 or seals is None or not seals & fcntl.F_SEAL_SHRINK:
        return None
    if os.fstat(fd).st_size < start + size:
        return None  # reading names what is wrong with it
    try:
        whole = mmap.mmap(fd, start + size, prot=mmap.PROT_READ)
    except OSError:  # a limit on addresses
        return None
    return np.frombuffer(whole, np.uint8, size, start)


_STEP_BYTES = 4 << 20
_JOIN_S = 5.0


@contextmanager
def read_ahead(store: Store, files: Sequence[FileEntry]) -> Iterator[None]:
    """Have the start of `files` read into the page cache until the block ends.

    Does nothing for stores without local files, passes over what is there already, and stops at
    half of the memory that is available.
    The block's end waits for the step under way, at most a few seconds: its thread ends by itself.
    """
    if not store.capabilities.local_files or not files:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_read, args=(store, files, stop), name="ckptd-read-ahead", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_JOIN_S)


def _read(store: Store, files: Sequence[FileEntry], stop: threading.Event) -> None:
    left = available_bytes() // 2
    # Reads, not advice: advice fills the disk's queue, and the load's own small reads stand behind.
    view = np.empty(_STEP_BYTES, np.uint8).data  # no page of it, where all is there already
    with LocalFiles(store, files) as opened:
        for number, entry in enumerate(files):
            try:
                with opened.use(number) as fd:
                    if fd < 0:
                        continue  # packed: what the page cache would hold is not what is read
            except CkptdError:
                return
            for at in range(0, entry.data_bytes, _STEP_BYTES):
                left -= _STEP_BYTES
                if stop.is_set() or left < 0:
                    return
                size = min(_STEP_BYTES, entry.data_bytes - at)
                try:
                    if not opened.is_cached(number, at, at + size):
                        opened.read(number, at, view[:size])
                except CkptdError:
                    return  # the load's own reads meet the same failure and name it
