"""The container of a packed object: header, frames, table, trailer; see ``docs/spec/pack-1.md``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.errors import CorruptError
from ckptd.store.pack_frame import FRAME_BYTES, RAW, WIDTHS, ZSTD, Frame

__all__ = ["HEADER", "Table", "bound", "frame_end", "lead_of", "load_table", "table_bytes"]

_VERSION = 1
_MAGIC = b"CKPTPAK1"
_END_MAGIC = b"CKPTPAKE"
HEADER = struct.pack("<8sII", _MAGIC, _VERSION, FRAME_BYTES)
_TRAILER = struct.Struct("<IIQQQ16s8s")
_SUMMED = _TRAILER.size - 24  # what of the trailer the digest covers
_ROW = np.dtype(
    [("stored", "<u4"), ("codec", "u1"), ("width", "u1"), ("zero", "<u2"), ("check", "<u8")]
)
_TAIL_BYTES = 64 << 10  # read at once: trailer and table of 4 GiB
_LEAD_MOST = 100_000_000  # bytes of the longest header that readers of safetensors accept


def lead_of(first: bytes, size: int) -> int:
    """Return where the frames of the data begin: behind the header that `first` announces.

    Parameters
    ----------
    first
        The first eight bytes of the object, which in safetensors are the length of its header.
    size
        Bytes of the object.
    """
    lead = 8 + int.from_bytes(first[:8], "little")
    return lead if len(first) >= 8 and lead <= min(size, _LEAD_MOST) else 0


def frame_end(at: int, lead: int, size: int) -> int:
    """Return where the frame that begins at `at` ends."""
    return min(at + FRAME_BYTES, lead if at < lead else size, size)


def bound(size: int) -> int:
    """Return the bytes that packing `size` bytes takes at most."""
    return len(HEADER) + size + (size // FRAME_BYTES + 2) * _ROW.itemsize + _TRAILER.size


def table_bytes(size: int, lead: int, frames: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Return table and trailer for frames of (stored length, codec, width, check)."""
    rows = np.array([(s, c, w, 0, k) for s, c, w, k in frames], dtype=_ROW).tobytes()
    head = _TRAILER.pack(_VERSION, FRAME_BYTES, size, lead, len(frames), bytes(16), _END_MAGIC)
    summed = xxhash.xxh3_128_digest(rows + head[:_SUMMED])
    return rows + head[:_SUMMED] + summed + _END_MAGIC


@dataclass(frozen=True, slots=True)
class Table:
    """Where the frames of one packed object are.

    Attributes
    ----------
    size
        Logical bytes.
    lead
        Where the data begin that digests cover: frames are counted from there.
    offsets
        Of the stored frames in the object; one more than there are frames.
    rows
        Codec, width and check of each frame.
    digest
        Of table and trailer: names this very object.
    stored, modified
        Bytes of the packed object, and when it was written.
    """

    size: int
    lead: int
    offsets: NDArray[np.int64]
    rows: NDArray[np.void]
    digest: bytes
    stored: int
    modified: float

    def index(self, at: int) -> int:
        """Return the number of the frame that holds logical byte `at`."""
        if at < self.lead:
            return at // FRAME_BYTES
        return -(-self.lead // FRAME_BYTES) + (at - self.lead) // FRAME_BYTES

    def span(self, index: int) -> tuple[int, int]:
        """Return the logical bytes of frame `index`: first, and one behind the last."""
        before = -(-self.lead // FRAME_BYTES)
        start = index * FRAME_BYTES
        if index >= before:
            start = self.lead + (index - before) * FRAME_BYTES
        return start, frame_end(start, self.lead, self.size)

    def frame(self, index: int, data: memoryview) -> Frame:
        """Return frame `index`, whose stored bytes are `data`."""
        row = self.rows[index]
        return Frame(data, int(row["codec"]), int(row["width"]), int(row["check"]))


def load_table(
    where: str, stored: int, modified: float, read: Callable[[int, int], bytes]
) -> Table:
    """Read and check the table of a packed object of `stored` bytes.

    Parameters
    ----------
    read
        Gives the bytes from its first argument up to its second.

    Raises
    ------
    CorruptError
        Kind ``bad-pack``: no whole packed object, or its table breaks a rule; kind ``version``.
    """
    start = max(0, stored - _TAIL_BYTES)
    tail = read(start, stored)
    if len(tail) < len(HEADER) + _TRAILER.size and start == 0:
        raise _bad("too short", where, stored)
    version, unit, size, lead, count, digest, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
    if magic != _END_MAGIC:
        raise _bad("not finished, or no packed object", where, magic)
    if version != _VERSION or unit != FRAME_BYTES:
        raise CorruptError(
            "packed by a newer ckptd", kind="version", where=where, wanted=_VERSION, found=version
        )
    room = stored - len(HEADER) - _TRAILER.size
    if lead > size or count != _frame_count(size, lead) or count * _ROW.itemsize > room:
        raise _bad("impossible sizes", where, f"{size} bytes, {lead} first, {count} frames")
    begin = stored - _TRAILER.size - count * _ROW.itemsize
    raw = tail[begin - start :] if begin >= start else read(begin, start) + tail
    if xxhash.xxh3_128_digest(raw[:-24]) != digest:
        raise _bad("the table is not what was written", where, digest.hex())
    rows = np.frombuffer(raw, _ROW, count)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(rows["stored"], out=offsets[1:])
    offsets += len(HEADER)
    table = Table(size, lead, offsets, rows, digest, stored, modified)
    _check_rows(table, begin, where)
    return table


def _frame_count(size: int, lead: int) -> int:
    return -(-lead // FRAME_BYTES) + -(-(size - lead) // FRAME_BYTES)


def _check_rows(table: Table, end: int, where: str) -> None:
    """Check every frame's lengths, so that reading one allocates no more than a frame."""
    rows, count = table.rows, len(table.rows)
    before = -(-table.lead // FRAME_BYTES)
    logical = np.full(count, FRAME_BYTES, np.int64)
    for last in {before - 1, count - 1} & set(range(count)):
        start, stop = table.span(last)
        logical[last] = stop - start
    raw, packed = rows["codec"] == RAW, rows["codec"] == ZSTD
    fits = np.where(raw, rows["stored"] == logical, rows["stored"] < logical)
    known = (raw | packed) & np.isin(rows["width"], WIDTHS) & (rows["zero"] == 0)
    if not (fits & known & (rows["stored"] > 0)).all() or table.offsets[-1] != end:
        raise _bad("the frames do not fill the object", where, f"{count} frames")


def _bad(what: str, where: str, found: object) -> CorruptError:
    return CorruptError(f"a packed object: {what}", kind="bad-pack", where=where, found=found)
