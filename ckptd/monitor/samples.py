"""Sample file of a rank: checksums of replicas, norms, non-finite values; its format.

In it: how many slots.

header | slots; a ring as that of calls: all sizes fixed, the commit index of a slot stored last.
The file of ``x.ring`` is ``x.samples``. A rank that takes no samples has none.

- *header*, 256 bytes: the rank's identity (checksummed), and at 128 the number of samples written.
- *slots*: sample ``n``, counted from 1, lies in slot ``(n - 1) % slots``.

A sample says: after `step`, the set `set` has `value`. Checksums of one set and step are equal on
all ranks that show them; norms of one set and step are comparable. Norms are the bits of an ``f8``.
The set of a call whose input was not finite is its group; the value is its number there, and the
hash of a text of the ring in the lower 32 bits.
"""

from __future__ import annotations

import enum
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ckptd.errors import UsageError
from ckptd.monitor.ring import RankFile, RingIdentity, process_birth, reserve

_MAGIC = b"CKPTSMPL"
_VERSION = 1
_HEADER_BYTES = 256
_WRITTEN = 128
_MOST_SLOTS = 1 << 16
_HEAD: np.dtype[Any] = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("slots", "<u4"),
        ("rank", "<u4"),
        ("world", "<u4"),
        ("pid", "<u4"),
        ("generation", "<u4"),
        ("birth", "<u8"),
        ("checksum", "<u4"),  # of all bytes before it
    ]
)
_BODY = struct.Struct("<QqQIIQ")  # SAMPLE without its commit index

SAMPLE: np.dtype[Any] = np.dtype(
    [
        ("number", "<u8"),  # from 1; the commit index
        ("set", "<u8"),  # who are comparable: the same number on all of them
        ("step", "<i8"),
        ("value", "<u8"),  # a checksum, or the bits of an f8
        ("what", "<u4"),  # SampleKind
        ("members", "<u4"),  # how many ranks the set has
        ("padding", "<u8"),
    ]
)


class SampleKind(enum.IntEnum):
    """Kinds of samples."""

    SUM = 1
    """A checksum of values that are the same on all members of the set."""
    NORM = 2
    """The norm of the gradients of a step, before their reduction among the members."""
    NOT_FINITE = 3
    """The first call whose input was not finite: its group, and `value` its number and a text."""


def samples_path(ring: Path) -> Path:
    """Return the path of the samples of the rank with this ring."""
    return ring.with_suffix(".samples")


class SampleWriter:
    """Makes the file and writes it; its methods never block.

    Parameters
    ----------
    path
        See `samples_path`. Made with mode 0600 and all its space, in one step.
    identity
        Rank and process that it belongs to.
    slots
        How many samples it keeps.

    Raises
    ------
    StoreError
        kind ``no-space``: the file system has no room.
    UsageError
        There cannot be so many slots.
    """

    def __init__(self, path: Path, identity: RingIdentity, slots: int = 1024) -> None:
        if not 0 < slots <= _MOST_SLOTS:
            raise UsageError(
                "invalid number of sample slots",
                where=str(path),
                wanted=f"1 to {_MOST_SLOTS} slots",
                found=str(slots),
            )
        self.path = path
        total = _HEADER_BYTES + slots * SAMPLE.itemsize
        self._map = reserve(path, _head(identity, slots), total)
        self._words = memoryview(self._map).cast("Q")
        self._slots = slots
        self._written = 0

    def add(self, what: SampleKind, set_: int, members: int, step: int, value: int) -> None:
        """Write a sample down; `value` is a checksum or the bits of a norm (`norm_bits`)."""
        number = self._written + 1
        at = _HEADER_BYTES + (number - 1) % self._slots * SAMPLE.itemsize
        self._words[at // 8] = 0
        mask = (1 << 64) - 1
        _BODY.pack_into(self._map, at + 8, set_ & mask, step, value & mask, int(what), members, 0)
        self._words[at // 8] = number
        self._written = number
        self._words[_WRITTEN // 8] = number

    def norm(self, set_: int, members: int, step: int, norm: float) -> None:
        """Write the norm of a step's gradients down."""
        bits: int = struct.unpack("<Q", struct.pack("<d", norm))[0]
        self.add(SampleKind.NORM, set_, members, step, bits)


def _head(identity: RingIdentity, slots: int) -> bytes:
    row = np.zeros((), _HEAD)
    row["magic"], row["version"], row["slots"] = _MAGIC, _VERSION, slots
    row["rank"], row["world"] = identity.rank, identity.world
    row["pid"], row["generation"] = os.getpid(), identity.generation
    row["birth"] = process_birth(os.getpid())
    row["checksum"] = zlib.crc32(row.tobytes()[:-4])
    return row.tobytes()


class SampleReader(RankFile):
    """Reads the samples of a rank while it writes them, or long after. Trusts nothing in the file.

    Parameters
    ----------
    path
        The file.

    Attributes
    ----------
    rank, pid, birth
        Rank and process that it belongs to.

    Raises
    ------
    NotFoundError
        There is no such file.
    CorruptError
        It is not such a file, or damaged, or of another version.
    StoreError
        It cannot be opened or read.
    """

    WHAT = "file of a rank's samples"

    def __init__(self, path: Path) -> None:
        self._next = 1
        super().__init__(path)

    def new(self) -> np.ndarray[Any, Any]:
        """Return the `SAMPLE` rows written since the last call, oldest first.

        Those that were overwritten before anyone read them are left out. Errors as of the class.
        """
        raw = self._pread(8, _WRITTEN)
        written = min(int.from_bytes(raw, "little"), (1 << 62))
        first = max(self._next, written - self._slots + 1)
        if first > written:
            return np.zeros(0, SAMPLE)
        rows = np.frombuffer(self._pread(self._slots * SAMPLE.itemsize, _HEADER_BYTES), SAMPLE)
        again = np.frombuffer(self._pread(self._slots * SAMPLE.itemsize, _HEADER_BYTES), SAMPLE)
        numbers = np.arange(first, written + 1, dtype=np.uint64)
        at = ((numbers - 1) % self._slots).astype(np.int64)
        whole = (rows["number"][at] == numbers) & (again["number"][at] == numbers)
        self._next = written + 1
        kept: np.ndarray[Any, Any] = rows[at[whole]]
        return kept[np.isin(kept["what"], list(SampleKind))]

    def _read_identity(self) -> None:
        length = self._length(_HEADER_BYTES)
        raw = self._pread(_HEAD.itemsize, 0)
        row: np.void = np.frombuffer(raw, _HEAD)[0]
        if row["magic"] != _MAGIC or row["version"] != _VERSION:
            raise self._corrupt(f"samples of version {_VERSION}", repr(raw[:12]))
        if row["checksum"] != zlib.crc32(raw[:-4]):
            raise self._corrupt("the checksum of the header", f"{int(row['checksum']):#x}")
        slots = int(row["slots"])
        total = _HEADER_BYTES + slots * SAMPLE.itemsize
        if not 0 < slots <= _MOST_SLOTS or length != total:
            raise self._corrupt("the size that its header says", f"{length} bytes")
        self._slots = slots
        self.rank, self.pid, self.birth = int(row["rank"]), int(row["pid"]), int(row["birth"])
