"""Zip container of torch.save: directory, entries, zip64; limits of entries and directory.

The directory at the end and the local headers of what is used are read, and nothing else. A file
of DCP holds one zip after the other; each is a span of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ckptd.base.grids.grid import is_packed
from ckptd.checkpoint.format.container import foreign_start
from ckptd.errors import CorruptError, RefusedError
from ckptd.readers.pickles import MAX_PICKLE_BYTES, PickledTensor, read_pickle
from ckptd.types import DTYPES

ReadRange = Callable[[int, int], bytes]
"""Returns bytes ``[start, end)`` of a file."""

MAX_ENTRIES = 1 << 18
_MAX_DIRECTORY = 1 << 28
_END, _END_BYTES = b"PK\x05\x06", 22
_END64, _END64_BYTES = b"PK\x06\x06", 56
_LOCATOR, _LOCATOR_BYTES = b"PK\x06\x07", 20
_CENTRAL, _CENTRAL_BYTES = b"PK\x01\x02", 46
_LOCAL, _LOCAL_BYTES = b"PK\x03\x04", 30
_ENDS64 = _LOCATOR_BYTES + _END64_BYTES
_TAIL = _END_BYTES + _ENDS64
_NONE32, _NONE16 = 0xFFFFFFFF, 0xFFFF
_OLD = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The number that a file of torch before 1.6 begins with, as a pickle writes it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the elements of a piece lie in a file.

    Attributes
    ----------
    start
        First byte of its first element.
    strides
        In elements; None where elements follow each other in row-major order.
    """

    start: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    local: int
    size: int
    crc: int
    end: int
    """Where the next entry, or the directory, begins."""


class TorchZip:
    """A zip of `torch.save` in bytes ``[start, end)`` of a file.

    Attributes
    ----------
    value
        What its pickle holds.
    first_name
        The name of the file as torch wrote it, without what follows the last dot; ``archive`` where
        it was written into a stream.
    """

    def __init__(
        self,
        read: ReadRange,
        start: int,
        where: str,
        entries: dict[str, _Entry],
        first_name: str,
    ) -> None:
        self.first_name = first_name
        self._read = read
        self._start = start
        self._where = where
        self._entries = entries
        self._found: dict[str, tuple[int, int]] = {}
        order = entries.get("byteorder")
        if order is not None and (order.size > 16 or self._bytes("byteorder") != b"little"):
            raise RefusedError("unsupported byte order", kind="unreadable-format", where=where)
        self.value = read_pickle(self._bytes("data.pkl"), where, storages=True)

    def _bytes(self, name: str) -> bytes:
        first, size = self.locate(name)
        if size > MAX_PICKLE_BYTES:
            raise CorruptError("a pickle is too large", where=self._where)
        return self._read(first, first + size)

    def checksum(self, key: str) -> tuple[int, int]:
        """Return what the directory says of a storage: its CRC (0: none), and its length."""
        entry = self._entries.get(f"data/{key}")
        return (entry.crc, entry.size) if entry else (0, 0)

    def number(self, tensor: PickledTensor, where: str) -> float:
        """Read a tensor of one real element."""
        first, dtype = extent_of(self, tensor, where).start, DTYPES[tensor.dtype]
        raw = self._read(first, first + dtype.itemsize)
        return float(np.frombuffer(raw, dtype.numpy)[0])

    def locate(self, name: str) -> tuple[int, int]:
        """Return ``(first byte, length)`` of an entry; compares its local header.

        Raises
        ------
        CorruptError
            kind ``bad-zip``.
        """
        found = self._found.get(name)
        if found is not None:
            return found
        entry = self._entries.get(name)
        if entry is None:
            raise _bad("a zip lacks an entry", f"{self._where}: {name[:200]}")
        at = self._start + entry.local
        raw = self._read(at, at + _LOCAL_BYTES + len(entry.name))
        names, extra = struct.unpack("<HH", raw[26:30])
        first = entry.local + _LOCAL_BYTES + names + extra
        good = raw[:4] == _LOCAL and raw[30:] == entry.name and names == len(entry.name)
        if not good or raw[8:10] != b"\0\0" or first + entry.size > entry.end:
            raise _bad("a zip's directory and its entry disagree", f"{self._where}: {name}")
        self._found[name] = self._start + first, entry.size
        return self._found[name]


def extent_of(file: TorchZip, tensor: PickledTensor, where: str) -> Extent:
    """Return where a tensor lies.

    Raises
    ------
    CorruptError
        Its storage is shorter.
    """
    first, size = file.locate(f"data/{tensor.storage.key}")
    item = DTYPES[tensor.dtype].itemsize
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    empty = 0 in tensor.shape
    # `UntypedStorage` counts in bytes, and so does a view as another type.
    stated = tensor.storage.numel * DTYPES[tensor.storage.dtype].itemsize
    end = (tensor.offset + (0 if empty else reach + 1)) * item
    if end > min(size, stated):
        raise CorruptError(
            "a tensor lies outside of its storage",
            where=where,
            wanted=f"{end} bytes",
            found=f"{size} bytes of storage {tensor.storage.key[:80]}, which states {stated}",
        )
    dense = is_packed(tensor.shape, tensor.strides)
    return Extent(first + tensor.offset * item, None if dense or empty else tensor.strides)


def open_zip(read: ReadRange, start: int, end: int, where: str) -> TorchZip:
    """Read the directory and the pickle of a zip.

    Parameters
    ----------
    read
        Reads the file.
    start, end
        The span of the zip.

    Raises
    ------
    RefusedError
        kind ``unreadable-format``: torch's legacy format, or the other byte order; kind
        ``unsafe-pickle``.
    CorruptError
        kind ``bad-zip``: no zip, or one whose directory lies; what `read_pickle` raises.
    """
    tail = read(max(start, end - _TAIL), end)
    if len(tail) < _END_BYTES or tail[-_END_BYTES:][:4] != _END:
        raise _no_zip(read, start, end, where)
    at = end - start - _END_BYTES
    _, disk, disk2, here, count, size, first, _ = struct.unpack("<4s4H2IH", tail[-_END_BYTES:])
    stop = at
    back = tail[-_END_BYTES - _LOCATOR_BYTES : -_END_BYTES]
    if len(back) == _LOCATOR_BYTES and back[:4] == _LOCATOR:
        (stop,) = struct.unpack("<Q", back[8:16])
        raw = read(start + stop, start + stop + _END64_BYTES) if stop <= at - _ENDS64 else b""
        if raw[:4] != _END64:
            raise _bad("a zip64 whose end is at the wrong position", where)
        disk, disk2, here, count, size, first = struct.unpack("<16x2I4Q", raw)
    elif _NONE16 in (here, count) or _NONE32 in (size, first):
        raise _bad("a zip64 without its locator", where)
    if disk or disk2 or here != count or count > MAX_ENTRIES or size > _MAX_DIRECTORY:
        raise _bad("a zip of several files, or with too many entries", where)
    if first + size != stop or first > at:
        raise _bad("a zip's directory is at the wrong position", where)
    raw = read(start + first, start + first + size)
    entries = _with_ends(_directory(raw, count, where), first, where)
    tops = {name.partition("/")[0] for name in entries}
    inner = {name.partition("/")[2]: entry for name, entry in entries.items()}
    if len(tops) != 1 or "data.pkl" not in inner:
        raise _bad("a zip that torch did not write", where, ", ".join(list(entries)[:4]))
    return TorchZip(read, start, where, inner, min(tops))


def _no_zip(read: ReadRange, start: int, end: int, where: str) -> Exception:
    if _OLD in read(start, min(end, start + 64)):
        return RefusedError(
            "unsupported legacy format of torch.save (not a zip file)",
            kind="unreadable-format",
            where=where,
            wanted="the zip format, the default of torch.save since 1.6",
            hint="torch.save(torch.load(OLD, weights_only=True), NEW) converts it",
        )
    head = read(start, min(end, start + 8))
    is_zip = head[: len(_LOCAL)] == _LOCAL
    hint = (
        "it starts like one but is cut short: check the download or copy"
        if is_zip
        else foreign_start(head)
    )
    return CorruptError("invalid torch.save file", kind="bad-zip", where=where, hint=hint)


def _bad(what: str, where: str, found: str = "") -> CorruptError:
    return CorruptError(what, kind="bad-zip", where=where, found=found[:200] or None)


def _directory(raw: bytes, count: int, where: str) -> list[tuple[bytes, int, int, int]]:
    """Return ``(name, place of the local header, size, checksum)`` of each entry."""
    out, at = [], 0
    for _ in range(count):
        head = raw[at : at + _CENTRAL_BYTES]
        if len(head) < _CENTRAL_BYTES or head[:4] != _CENTRAL:
            raise _bad("a zip's directory is damaged", where)
        flags, method = struct.unpack("<HH", head[8:12])
        crc, stored, size = struct.unpack("<III", head[16:28])
        names, extras, comments = struct.unpack("<HHH", head[28:34])
        (local,) = struct.unpack("<I", head[42:46])
        at += _CENTRAL_BYTES
        name, extra = raw[at : at + names], raw[at + names : at + names + extras]
        at += names + extras + comments
        if at > len(raw):
            raise _bad("a zip's directory is damaged", where)
        size, stored, local = _wide(extra, [size, stored, local], where)
        if method or flags & 1 or stored != size:
            raise _bad("an entry of a zip is compressed or encrypted", where, repr(name))
        out.append((name, local, size, crc))
    if at != len(raw):
        raise _bad("a zip's directory is longer than its entries", where)
    return out


def _wide(extra: bytes, values: list[int], where: str) -> list[int]:
    """Return size, stored size and place with those that stand in the field of zip64."""
    if _NONE32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack("<HH", extra[at : at + 4])
        if tag == 1:
            wide = struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8])
            numbers = iter(wide)
            return [next(numbers, -1) if v == _NONE32 else v for v in values]
        at += 4 + length
    raise _bad("an entry of a zip64 lacks its sizes", where)


def _with_ends(
    found: list[tuple[bytes, int, int, int]], first: int, where: str
) -> dict[str, _Entry]:
    """Check that entries lie before the directory, one after the other."""
    out: dict[str, _Entry] = {}
    ordered = sorted(found, key=lambda e: e[1])
    for number, (raw, local, size, crc) in enumerate(ordered):
        end = ordered[number + 1][1] if number + 1 < len(ordered) else first
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise _bad("a name in a zip is not text", where, repr(raw)) from None
        if local < 0 or size < 0 or local + _LOCAL_BYTES + len(raw) + size > end or end > first:
            raise _bad("entries of a zip overlap, or lie outside of it", where, repr(name))
        if name in out:
            raise _bad("two entries of a zip have one name", where, repr(name))
        out[name] = _Entry(raw, local, size, crc, end)
    return out
