"""Data files of a local root, open for reading, shared by the threads of one pass.

Files that are packed have no descriptor: -1 stands for it, and they are read through the store.
"""

from __future__ import annotations

import os
import stat as stat_module
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from ckptd.engine.places import missing_file
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.manifest import FileEntry
from ckptd.store.base import Store
from ckptd.store.osio import reading

__all__ = ["LocalFiles"]

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open
_MOST_IDLE = 8


class LocalFiles:
    """One descriptor a file: read-ahead lives in it, and threads with their own read half as fast.

    Files are read and never mapped: reading a file that somebody truncates is an error, touching
    its mapping is a SIGBUS. Copies from mappings were not faster (`read_exact` into a few MiB of
    warm memory and a strided copy from there take 0.08 s for 2 GB, two threads).

    Parameters
    ----------
    store
        A store with ``capabilities.local_files``.
    entries
        The files of the manifest.
    """

    def __init__(self, store: Store, entries: Sequence[FileEntry]) -> None:
        self._store = store
        self._entries = entries
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}  # file number to [descriptor, users]
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            self._close_idle(0)

    @contextmanager
    def use(self, file: int) -> Iterator[int]:
        """Give the descriptor of file number `file`; -1 for a packed one.

        Raises
        ------
        CorruptError
            kind ``missing-file``: it is not there, or no plain file.
        """
        with self._lock:
            held = self._open.pop(file, None) or [self._open_file(self._entries[file]), 0]
            held[1] += 1
            self._open[file] = held
        try:
            yield held[0]
        finally:
            with self._lock:
                held[1] -= 1
                self._close_idle(0 if self._closed else _MOST_IDLE)

    def _close_idle(self, keep: int) -> None:
        """Close the longest unused files; one in use (by a thread that hangs) is never closed."""
        idle = [file for file, (_, users) in self._open.items() if not users]
        for file in idle[: len(idle) - keep] if keep else idle:
            fd = self._open.pop(file)[0]
            if fd >= 0:
                os.close(fd)

    def _open_file(self, entry: FileEntry) -> int:
        path = self._store.local_path(entry.path)
        if path is None:
            return -1
        try:
            with reading(str(path)):
                fd = os.open(path, _READ_FLAGS)
        except NotFoundError:
            raise missing_file(entry.path, entry.rank) from None
        if not stat_module.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise missing_file(entry.path, entry.rank)
        return fd

    def read(self, file: int, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the data section of file number `file`."""
        with self.use(file) as fd:
            self.read_exact(fd, file, start, view)

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
        done = 0
        while done < len(view):
            with reading(entry.path):
                n = os.preadv(fd, [view[done:]], entry.data_start + start + done)
            if n == 0:
                raise CorruptError(
                    "a data file ended early",
                    kind="truncated",
                    where=f"{entry.path}, written by rank {entry.rank}",
                    wanted=f"{entry.data_start + entry.data_bytes} bytes",
                    found=f"{entry.data_start + start + done} bytes",
                )
            done += n
