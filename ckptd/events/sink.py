"""Event files: lines of JSON, size of a file, how many are kept.

A line is written by one call, to a file that is only ever appended to: whatever kills the process,
all lines but the last are whole. A file that is full is followed by another; of these the newest
are kept.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ckptd.events.event import AnyEvent, Lost, Opened, clock_id, pair

SUFFIX = ".jsonl"
FILE_BYTES = 16 << 20
FILES_KEPT = 4

_log = logging.getLogger("ckptd")


class JsonlSink:
    """Writes lines; used by one thread. Failures are counted, logged once, and told in the file.

    Parameters
    ----------
    folder
        Exists; several processes may share it.
    version
        Of ckptd, for the first line.
    file_bytes, files_kept
        Size in bytes at which a new file is begun, and how many stay: the bound for one process is
        their product, and one line.
    dropped
        Asked for the number of events that never came this far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        version: str = "",
        file_bytes: int = FILE_BYTES,
        files_kept: int = FILES_KEPT,
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        wall, monotonic = pair()
        host = socket.gethostname()[:255]
        self._opened = Opened(
            host=host,
            pid=os.getpid(),
            clock=clock_id(),
            wall_ns=wall,
            monotonic_ns=monotonic,
            version=version,
        )
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in host)[:60]
        # The time tells a process from an older one that had its number.
        self._base = folder / f"{safe}-{os.getpid()}-{time.time_ns():x}"
        self._file_bytes = file_bytes
        self._files_kept = files_kept
        self._dropped = dropped
        self._encoder = msgspec.json.Encoder()
        self._fd = -1
        self._number = 0
        self._size = 0
        self._torn = False
        self._lost = 0
        self._told = 0

    def write(self, event: AnyEvent) -> None:
        """Append an event; never raises for what the file system does."""
        try:
            self._write(event)
        except (OSError, UnicodeError) as error:
            self._lost += 1
            if self._lost == 1:
                _log.warning("events are lost: %s: %s", self._base.parent, error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, event: AnyEvent) -> None:
        if self._fd < 0 or self._size >= self._file_bytes:
            self._next_file()
        lost = self._lost + self._dropped() - self._told
        if lost > 0:
            self._line(Lost(count=lost))
            self._told += lost
        self._line(event)

    def _next_file(self) -> None:
        self.close()
        self._fd = os.open(
            self._path(self._number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
        )
        old = self._number - self._files_kept
        self._number += 1
        self._size, self._torn = 0, False
        self._line(self._opened)
        if old >= 0:
            self._path(old).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._base.with_name(f"{self._base.name}.{number:06d}{SUFFIX}")

    def _line(self, item: AnyEvent | Opened | Lost) -> None:
        raw = self._encoder.encode(item) + b"\n"
        if self._torn:  # end what a full disk cut off, so that it costs one line and not two
            raw = b"\n" + raw
        written = os.write(self._fd, raw)
        self._size += written
        self._torn = written < len(raw)
        if self._torn:
            raise OSError(f"{written} of {len(raw)} bytes written")
