"""Where everything lies in a rank's ring file: one memory-mapped file, all sizes fixed.

header | slots | groups | members | texts

- *header*: who the rank is (checksummed, never changes), then 8-byte counters that the rank
  stores one at a time.
- *slots*: one for each of the last calls. Its first 8 bytes are the commit index: 0 while the rest
  is written, then the number of the call, counted from 1. Call ``n`` lies in slot
  ``(n - 1) % slots``.
- *groups*: one row for each group of the rank, never moved and never reused.
- *members*: global ranks of groups whose ranks are not an arithmetic progression.
- *texts*: what hashes stand for: operations, element types, call sites.

Little-endian throughout. Counters are stored whole by the machine; everything else becomes visible
through a counter or a commit index that is stored after it.
"""

from __future__ import annotations

import enum
import zlib
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "COUNTER",
    "GROUP_ROW",
    "HEADER_BYTES",
    "IDENTITY",
    "LIMITS",
    "MAGIC",
    "MAKING",
    "SLOT",
    "TEXT",
    "VERSION",
    "Counter",
    "RecorderState",
    "RingShape",
    "text_hash",
]

MAGIC = b"CKPTRING"
VERSION = 1
HEADER_BYTES = 4096

IDENTITY: np.dtype[Any] = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("slots", "<u4"),
        ("groups", "<u4"),
        ("members", "<u4"),
        ("texts", "<u4"),
        ("rank", "<u4"),
        ("world", "<u4"),
        ("pid", "<u4"),
        ("generation", "<u4"),
        ("padding", "<u4"),
        ("started_ns", "<u8"),  # wall clock, for people
        ("birth", "<u8"),  # start of the process in kernel ticks: tells a reused pid
        ("job", "S64"),
        ("node", "S64"),
        ("checksum", "<u4"),  # of all bytes before it
    ]
)

COUNTER = 256
"""Offset of the counters in the header."""


class Counter(enum.IntEnum):
    """The header's counters: signed 8 bytes each. Times are nanoseconds of the monotonic clock."""

    HEARTBEAT = 0
    """When a Python thread of the rank last ran; 0 before the first."""
    INTERPRETED = 1
    """When the main thread last ran Python code that another thread left for it (pending call)."""
    PHASE = 2
    PHASE_SINCE = 3
    STEP = 4
    """-1 while steps are not marked."""
    STEP_SINCE = 5
    STEPS_DONE = 6
    WRITTEN = 7
    """Highest call number that is committed."""
    GROUPS = 8
    MEMBERS = 9
    TEXTS = 10
    STATE = 11
    """See `RecorderState`."""
    LOST = 12
    """Calls that found no room in the table of groups, and so have no slot."""
    COST = 13
    """Nanoseconds that recording a call costs, measured at the start; 0 is not measured."""
    COUNTED = 14
    """1 if steps are those of an optimizer, which ranks may make differently often."""


class RecorderState(enum.IntEnum):
    """What the recorder itself is doing."""

    OFF = 0
    """Ended in good order; the ring stays as it was."""
    CALLS = 1
    """Records every call."""
    COUNTERS = 2
    """Knows only how far each group is, from the flight recorder: no slots."""
    ASIDE = 3
    """Failed and stepped aside: nothing is recorded any more. The job goes on."""


SLOT: np.dtype[Any] = np.dtype(
    [
        ("commit", "<u8"),
        ("start", "<u8"),
        ("end", "<u8"),  # 0 while the call is under way
        ("bytes", "<i8"),  # -1 is unknown
        ("seq", "<u4"),
        ("op", "<u4"),
        ("dtype", "<u4"),
        ("root", "<i4"),  # rank within the group; -1 is none
        ("step", "<i4"),
        ("site", "<u4"),
        ("group", "<u2"),
        ("flags", "u1"),
        ("phase", "u1"),
        ("padding", "<u4"),
    ]
)

GROUP_ROW: np.dtype[Any] = np.dtype(
    [
        ("ident", "<u8"),
        ("size", "<u4"),
        ("me", "<u4"),
        ("first", "<i4"),  # global ranks are first + i * stride, or
        ("stride", "<i4"),  # 0: members[first : first + size]; -1 as first: not known
        ("entered_at", "<u8"),
        ("completed_at", "<u8"),
        ("entered", "<u8"),
        ("completed", "<u8"),
        ("name", "S40"),
        ("kind", "S24"),
        ("timeout_ms", "<u8"),  # of the group's calls, by its backend; 0 is unknown
    ]
)

MAKING = "making"
"""Name and kind of a row that counts how often its members have made a process group together.

Its calls have no slots.
"""

TEXT: np.dtype[Any] = np.dtype([("hash", "<u4"), ("text", "S124")])


class RingLimits(NamedTuple):
    """The most that a file may claim; also what the reader is ready to allocate."""

    slots: int = 1 << 17
    groups: int = 1 << 14
    members: int = 1 << 20
    texts: int = 1 << 13
    world: int = 1 << 24


LIMITS = RingLimits()


class RingShape(NamedTuple):
    """How many of each a ring has. The defaults make a file of 0.5 MiB."""

    slots: int = 4096
    groups: int = 512
    members: int = 32768
    texts: int = 512

    def fits(self) -> bool:
        """Whether this is within `LIMITS`."""
        return all(0 < mine <= limit for mine, limit in zip(self, LIMITS, strict=False))

    @property
    def groups_at(self) -> int:
        """Offset of the table of groups."""
        return HEADER_BYTES + self.slots * SLOT.itemsize

    @property
    def members_at(self) -> int:
        """Offset of the members."""
        return self.groups_at + self.groups * GROUP_ROW.itemsize

    @property
    def texts_at(self) -> int:
        """Offset of the texts."""
        return self.members_at + 4 * self.members

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.texts_at + self.texts * TEXT.itemsize


def text_hash(text: str) -> int:
    """Return the 32-bit hash under which a text is known in all rings; never 0."""
    return zlib.crc32(text.encode()) or 1
