"""Reads event files of a folder: lines, limits, torn ones skipped, clocks of files aligned.

Anything may lie in the folder. What is no event is skipped and counted; only regular files are
opened, and a file that grows is read up to the length that it had.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import BinaryIO

import msgspec

from ckptd.decoding import json_decoder
from ckptd.errors import CorruptError, NotFoundError
from ckptd.events.event import AnyEvent, Lost, Opened, Span
from ckptd.events.sink import SUFFIX

LINE_BYTES = 64 << 10
MOST_FILES = 1 << 18

_decoder = json_decoder(Opened | Lost | AnyEvent)


@dataclass
class EventFolder:
    """The event files of one folder.

    Attributes
    ----------
    heads
        First line of each file that has one, by path.
    unreadable
        Files that are named like event files and are none.
    skipped
        Lines that are no events.
    lost
        Events that their processes could not write.
    """

    folder: Path
    heads: dict[Path, Opened]
    unreadable: int = 0
    skipped: int = 0
    lost: int = 0

    @staticmethod
    def open(folder: str) -> EventFolder:
        """Look for event files.

        Raises
        ------
        NotFoundError
            There is no such folder, or no event file in it.
        CorruptError
            None of the files begins as an event file does.
        """
        found = EventFolder(Path(folder), {})
        paths = _event_files(folder)
        for path in paths:
            head = _head(path)
            if head is None:
                found.unreadable += 1
            else:
                found.heads[path] = head
        if not paths:
            raise NotFoundError(
                "no events were recorded here",
                where=folder,
                wanted=f"files that end in {SUFFIX}",
                hint="CKPTD_EVENTS=FOLDER, or ckptd.events.record(FOLDER), records them",
            )
        if not found.heads:
            raise CorruptError(
                "the files hold no events",
                where=folder,
                found=f"{found.unreadable} files that end in {SUFFIX}",
            )
        return found

    def read(self) -> Iterator[tuple[Opened, AnyEvent]]:
        """Yield every event with the head of its file; its times are those of one clock a host."""
        moved = shifts(self.heads)
        for path, head in self.heads.items():
            for item in self._read_file(path):
                if isinstance(item, Lost):
                    self.lost += item.count
                elif not isinstance(item, Opened):
                    yield head, _moved(item, moved[path])

    def _read_file(self, path: Path) -> Iterator[AnyEvent | Opened | Lost]:
        file = _open(path)
        if file is None:
            self.unreadable += 1
            return
        with file:
            for line in _lines(file):
                item = _decoded(line)
                if item is None:
                    self.skipped += 1
                else:
                    yield item


def shifts(heads: Mapping[Path, Opened]) -> dict[Path, int]:
    """Return by how many nanoseconds to move the events of each file.

    Processes that read one monotonic clock agree on time to the microsecond, whatever was done to
    the wall clock between their starts: they all get the middle one of their offsets. Between hosts
    nothing is known but their wall clocks.
    """
    offsets: dict[str, list[int]] = {}
    for head in heads.values():
        offsets.setdefault(head.clock, []).append(_offset(head))
    middle = {clock: median_low(found) for clock, found in offsets.items() if clock}
    return {p: middle.get(h.clock, _offset(h)) - _offset(h) for p, h in heads.items()}


def _offset(head: Opened) -> int:
    return head.wall_ns - head.monotonic_ns


def _moved(event: AnyEvent, by: int) -> AnyEvent:
    if not by:
        return event
    name = "start_ns" if isinstance(event, Span) else "at_ns"
    return msgspec.structs.replace(event, **{name: max(0, event.time_ns + by)})


def _event_files(folder: str) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = (e.name for e in entries if e.name.endswith(SUFFIX))
            # The largest names, so that the choice does not depend on the file system's order.
            found = sorted(heapq.nlargest(MOST_FILES, names))
    except OSError as error:
        raise NotFoundError("the folder cannot be read", where=folder, found=str(error)) from error
    return [Path(folder, name) for name in found]


def _open(path: Path) -> BinaryIO | None:
    """Open a regular file; None for anything else (a pipe would wait for ever)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def _head(path: Path) -> Opened | None:
    file = _open(path)
    if file is None:
        return None
    with file:
        item = _decoded(next(_lines(file), None))
    return item if isinstance(item, Opened) else None


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield whole lines; None for one that is too long. A torn last line is left out."""
    left = os.fstat(file.fileno()).st_size
    begins = True
    try:
        while left > 0 and (line := file.readline(min(LINE_BYTES, left))):
            left -= len(line)
            ends = line.endswith(b"\n")
            if begins and (ends or left > 0):
                yield line if ends else None
            begins = ends
    except OSError:
        yield None


def _decoded(line: bytes | None) -> AnyEvent | Opened | Lost | None:
    if line is None:
        return None
    try:
        item: AnyEvent | Opened | Lost = _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
    return item
