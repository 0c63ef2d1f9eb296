"""Asking the disk for a checkpoint's files while the load is still being planned.

A cold load is bound by the disk. Between the manifest and the first planned read lie tenths of a
second in which the live state is walked and matched; the disk would idle. It is a hint and nothing
more: bytes go to the page cache only, nothing is verified or kept, and failures are left to the
reads that follow, which report them properly.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError
from ckptd.format.digest import digest
from ckptd.format.manifest import FileEntry
from ckptd.load.places import missing_file
from ckptd.runtime.host import available_bytes
from ckptd.store.base import Store
from ckptd.store.osio import reading

__all__ = ["LocalFiles", "read_ahead"]


_MOST_IDLE = 32


@dataclass(slots=True)
class _Open:
    """An open file: its descriptor, where the object begins in it, and threads at work."""

    fd: int
    shift: int
    users: int = 0

    @property
    def identity(self) -> tuple[int, int, int]:
        """What is the same for whoever opens the same bytes on this host."""
        if self.fd < 0:
            return -1, -1, 0
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino, self.shift


class LocalFiles:
    """One descriptor a file: read-ahead lives in it, and threads with their own read half as fast.

    Files are read and never mapped: reading a file that somebody truncates is an error, touching
    its mapping is a SIGBUS. Copies from mappings were not faster (`read_exact` into a few MiB of
    warm memory and a strided copy from there take 0.08 s for 2 GB, two threads).

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

        One that is missing is no reason against descriptors: whoever reads it will say so.
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
            kind ``missing-file``: it is not there, or no plain file.
        """
        with self._lock:
            held = self._open.pop(file, None) or self._open_file(file)
            held.users += 1
            self._open[file] = held
        try:
            yield held.fd
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
            kind ``truncated``: the file ended. Committed files never change, so that somebody
            tampered with it.
        StoreError
            The system failed to read.
        """
        entry = self._entries[file]
        if fd < 0:
            self._store.read_into(entry.path, entry.data_start + start, view)
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


_STEP_BYTES = 4 << 20
_JOIN_S = 5.0


@contextmanager
def read_ahead(store: Store, files: Sequence[FileEntry]) -> Iterator[None]:
    """Have the start of `files` read into the page cache until the block ends.

    Does nothing for stores without local files, and stops at half of the memory that is available.
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
    view = memoryview(bytearray(_STEP_BYTES))
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
                try:
                    opened.read(number, at, view[: min(_STEP_BYTES, entry.data_bytes - at)])
                except CkptdError:
                    return  # the load's own reads meet the same failure and name it
