"""Recordings of the daemon's messages: file, frames, checksums; replayed through the diagnosis.

In it: the most rounds of a replay.

A recording is one file: a header, then frames as they came. Each frame has a checksum; reading ends
at the first that is torn or damaged, since what follows cannot be trusted to begin anywhere.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError
from ckptd.monitor.incidents import Changes, Incident
from ckptd.monitor.report import ReportLimits, unpack_evidence, unpack_fencing, unpack_report
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.watch import JobWatch

SHEET, FOUND, ROUND, FENCING = "sheet", "found", "round", "fencing"
_KINDS = (SHEET, FOUND, ROUND, FENCING)
_MAGIC = b"CKPTREC\x01"
_FRAME = struct.Struct("<BdII")  # kind, moment, bytes, CRC-32 of these three and the bytes
_HEADER_BYTES = 4096
MOST_ROUNDS = 1 << 20
"""Rounds of one replay: what bounds a recording whose clock jumps."""


class RecordedFrame(msgspec.Struct, frozen=True):
    """One frame.

    Attributes
    ----------
    at
        When it came, monotonic seconds of the daemon.
    kind
        ``sheet``, ``found``, ``fencing``, or ``round`` where the daemon judged.
    body
        Packed message; empty for a round.
    """

    at: float
    kind: str
    body: bytes = b""


class _Header(msgspec.Struct, frozen=True):
    job: str
    epoch: float = 0.0


_headers = json_decoder(_Header)


def _head(job: str, epoch: float) -> bytes:
    raw = msgspec.json.encode(_Header(job, epoch))
    return _MAGIC + struct.pack("<II", len(raw), zlib.crc32(raw)) + raw


def _bytes_of(frame: RecordedFrame) -> bytes:
    kind = _KINDS.index(frame.kind)
    start = _FRAME.pack(kind, frame.at, len(frame.body), 0)
    check = zlib.crc32(frame.body, zlib.crc32(start))
    return _FRAME.pack(kind, frame.at, len(frame.body), check) + frame.body


def encode(job: str, epoch: float, frames: Iterable[RecordedFrame]) -> bytes:
    """Return a whole recording.

    Parameters
    ----------
    job
        Job of the messages.
    epoch
        Unix time at which the clock of the frames was 0.
    frames
        In the order in which they came.
    """
    return b"".join([_head(job, epoch), *(_bytes_of(f) for f in frames)])


class RecordingWriter:
    """Appends frames to a new file, mode 0600, until it is full; closing it is all it owes.

    Each frame is one write: after a crash of the writer the file ends with a whole frame or a torn
    one, which readers leave out. Nothing is flushed to the device.

    Parameters
    ----------
    path
        The file; it must not exist.
    job, epoch
        As of `encode`.
    most_bytes
        So large it may become; later frames are left out and counted.

    Raises
    ------
    StoreError
        kind ``store``: the file cannot be made or written.
    """

    def __init__(self, path: Path, job: str, epoch: float, most_bytes: int = 1 << 30) -> None:
        self.path = path
        self.left_out = 0
        self._most = most_bytes
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        self._size = 0
        self._write(_head(job, epoch))

    def add(self, frame: RecordedFrame) -> None:
        """Append a frame; errors as of the class."""
        if self._size + _FRAME.size + len(frame.body) > self._most:
            self.left_out += 1
        else:
            self._write(_bytes_of(frame))

    def _write(self, raw: bytes) -> None:
        left = memoryview(raw)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._size += len(raw)

    def close(self) -> None:
        """Close the file; harmless when closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JobRecording:
    """A recording that is read; frames come one at a time, whatever its size.

    Parameters
    ----------
    path
        The file.

    Attributes
    ----------
    job, epoch
        As of `encode`.
    unread
        Bytes behind the last whole frame, known when all frames were read.

    Raises
    ------
    NotFoundError
        There is no such file.
    CorruptError
        It is none, or its header is damaged.
    StoreError
        kind ``store``: it cannot be read.
    """

    def __init__(self, path: Path, limits: ReportLimits | None = None) -> None:
        self.path = path
        self.unread = 0
        self._most = (limits or ReportLimits()).packed
        with self._open() as file:
            header = self._read_header(file)
            self._begin = file.tell()
        self.job, self.epoch = header.job, header.epoch

    def _open(self) -> _File:
        try:
            return _File(self.path)
        except FileNotFoundError as error:
            raise NotFoundError("the recording does not exist", where=str(self.path)) from error
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _read_header(self, file: _File) -> _Header:
        start = file.read(len(_MAGIC) + 8)
        if len(start) == len(_MAGIC) + 8 and start.startswith(_MAGIC):
            size, check = struct.unpack_from("<II", start, len(_MAGIC))
            raw = file.read(size) if size <= _HEADER_BYTES else b""
            if len(raw) == size and zlib.crc32(raw) == check:
                try:
                    return _headers.decode(raw)
                except msgspec.MsgspecError as error:
                    raise self._bad(str(error)) from error
        raise self._bad(f"a file that begins with {start[:16]!r}")

    def _bad(self, found: str) -> CorruptError:
        return CorruptError(
            "not a recording of ckptd",
            where=str(self.path),
            wanted="the header of a recording of this version",
            found=found,
        )

    def frames(self) -> Iterator[RecordedFrame]:
        """Yield all whole frames; errors as of the class."""
        with self._open() as file:
            file.seek(self._begin)
            while True:
                here = file.tell()
                frame = self._next(file)
                if frame is None:
                    self.unread = max(file.size - here, 0)
                    return
                yield frame

    def _next(self, file: _File) -> RecordedFrame | None:
        start = file.read(_FRAME.size)
        if len(start) < _FRAME.size:
            return None
        kind, at, size, check = _FRAME.unpack(start)
        if kind >= len(_KINDS) or size > self._most or not abs(at) < 1e12:
            return None
        body = file.read(size)
        if len(body) < size:
            return None
        if zlib.crc32(body, zlib.crc32(_FRAME.pack(kind, at, size, 0))) != check:
            return None
        return RecordedFrame(at, _KINDS[kind], body)


class _File:
    """A regular file that is read front to back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._file = os.fdopen(fd, "rb")
        info = os.fstat(fd)
        self.size = info.st_size
        if not stat.S_ISREG(info.st_mode):
            self._file.close()
            raise OSError(0, "not a regular file")

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise _unusable(self._path, error) from error

    def seek(self, place: int) -> None:
        self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        "a recording cannot be used", where=str(path), found=error.strerror or str(error)
    )


# --- again --------------------------------------------------------------------------------------


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    Attributes
    ----------
    job
        Job of the recording.
    frames, reports, refused
        Frames that were read; reports that were taken; messages that were not.
    rounds
        Rounds that were made.
    seconds
        From the first frame to the last.
    unread
        Bytes behind the last whole frame.
    changes
        Those rounds that changed something, with their moment: seconds since the first frame.
    incidents
        As they were at the end.
    cpu_s
        CPU seconds of all rounds.
    """

    job: str
    frames: int
    sheets: int
    refused: int
    rounds: int
    seconds: float
    unread: int
    changes: tuple[tuple[float, Changes], ...]
    incidents: tuple[Incident, ...]
    cpu_s: float


def replay(path: Path, settings: WatchSettings | None = None) -> Replay:
    """Run the watch over a recording; the same file and settings give the same result.

    Rounds are made where the recording has them, and otherwise once every ``period_s`` of its
    time. A recording of a watch that was under way begins as a daemon that was started then.

    Raises
    ------
    NotFoundError, CorruptError, StoreError
        As of `JobRecording`. What a single frame holds raises nothing: it is counted as refused.
    """
    settings = settings or WatchSettings()
    recording = JobRecording(path, settings.sheets)
    again = _Again(JobWatch(recording.job, settings, epoch=recording.epoch), settings)
    for frame in recording.frames():
        again.take(frame)
    again.end()
    return Replay(
        job=recording.job,
        frames=again.frames,
        sheets=again.sheets,
        refused=again.refused,
        rounds=again.watch.rounds,
        seconds=again.now - again.first,
        unread=recording.unread,
        changes=tuple(again.changes),
        incidents=again.watch.incidents,
        cpu_s=again.cpu_s,
    )


class _Again:
    """A watch that is fed frames, with rounds in between."""

    def __init__(self, watch: JobWatch, settings: WatchSettings) -> None:
        self.watch = watch
        self.changes: list[tuple[float, Changes]] = []
        self.frames = self.sheets = self.refused = 0
        self.first = self.now = 0.0
        self.cpu_s = 0.0
        self._settings = settings
        self._due = 0.0
        self._recorded = False

    def take(self, frame: RecordedFrame) -> None:
        """Take a frame, after the rounds that were due before it."""
        if not self.frames:
            self.first = self.now = frame.at
            self._due = frame.at
        self.frames += 1
        self.now = max(self.now, frame.at)
        if frame.kind == ROUND:
            self._recorded = True
            self._round(self.now)
            return
        if not self._recorded:
            self._catch_up()
        self._message(frame)

    def _catch_up(self) -> None:
        if self.now - self._due > MOST_ROUNDS * self._settings.period_s:
            self._due = self.now
        while self._due <= self.now:
            self._round(self._due)
            self._due += max(self._settings.period_s, 1e-3)

    def _message(self, frame: RecordedFrame) -> None:
        try:
            if frame.kind == SHEET:
                report = unpack_report(frame.body, self._settings.sheets)
                self.watch.take(report, self.now)
                self.sheets += 1
                # As the daemon does: the watch must know later which evidence it ordered.
                self.watch.orders(report.source, self.now)
            elif frame.kind == FENCING:
                self.watch.fence(unpack_fencing(frame.body, self._settings.sheets), self.now)
            else:
                found = unpack_evidence(frame.body, self._settings.sheets)
                self.watch.take_found(found, self.now)
        except CkptdError:
            self.refused += 1

    def _round(self, now: float) -> None:
        changes = self.watch.round(now)
        self.cpu_s += self.watch.round_cpu_s
        if changes.opened or changes.updated or changes.closed:
            self.changes.append((now - self.first, changes))

    def end(self) -> None:
        """Judge what came last."""
        if self.frames and not self._recorded:
            self._round(self.now + self._settings.period_s)
