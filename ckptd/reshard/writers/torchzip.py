"""Zip container of torch.save around streamed bytes: alignment, checksums, directory.

Nothing is compressed. Sizes are known before the first byte of a storage and checksums after its
last one, so checksums stand behind it, and in the directory, as they do in torch's own files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ckptd.base.digest import digest
from ckptd.reshard.writers.pickling import StorageTensor, dump
from ckptd.types import DTYPES, Box

ALIGN = 64
_TOP = "archive/"
_NONE32, _NONE16 = 0xFFFFFFFF, 0xFFFF
_FLAGS = 0x0808
"""Checksum and sizes follow the bytes; names are UTF-8."""


class _Zip:
    """A zip that grows: where its next byte lies, and its directory."""

    def __init__(self) -> None:
        self.at = 0
        self._crcs = 0
        self._directory: list[bytes] = []
        self._open_at = 0

    def entry(self, name: str, raw: bytes) -> bytes:
        """Return a whole entry."""
        head = self.open(name, len(raw))
        self.at += len(raw)
        return head + raw + self.close(name, len(raw), zlib.crc32(raw))

    def open(self, name: str, size: int) -> bytes:
        """Return the local header of an entry, as long as its bytes need to be aligned."""
        encoded = (_TOP + name).encode()
        wide = size >= _NONE32
        extra = struct.pack("<HH2Q", 1, 16, 0, 0) if wide else b""
        fill = -(self.at + 30 + len(encoded) + len(extra) + 4) % ALIGN
        extra += b"FB" + struct.pack("<H", fill) + b"Z" * fill
        size32 = _NONE32 if wide else 0
        lengths = (len(encoded), len(extra))
        fields = (b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, size32, size32, *lengths)
        raw = struct.pack("<4s5H3I2H", *fields) + encoded + extra
        self._open_at = self.at
        self.at += len(raw)
        return raw

    def close(self, name: str, size: int, crc: int) -> bytes:
        """Return what stands behind the bytes of an entry."""
        encoded = (_TOP + name).encode()
        wide = size >= _NONE32
        raw = struct.pack("<4sI2Q" if wide else "<4s3I", b"PK\x07\x08", crc, size, size)
        far = self._open_at >= _NONE32
        numbers = [size, size] * wide + [self._open_at] * far
        extra = (
            struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        )
        size32, at32 = _NONE32 if wide else size, _NONE32 if far else self._open_at
        lengths = (len(encoded), len(extra), 0, 0, 0, 0)
        fields = (b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, size32, size32, *lengths, at32)
        self._directory.append(struct.pack("<4s6H3I5H2I", *fields) + encoded + extra)
        self._crcs = zlib.crc32(struct.pack("<I", crc), self._crcs)
        self.at += len(raw)
        return raw

    def end(self, about: int) -> bytes:
        """Return the last entries, and the directory."""
        mark = f"{about:020d}{self._crcs:020d}".encode()
        raw = self.entry("version", b"3\n") + self.entry(".data/serialization_id", mark)
        directory = b"".join(self._directory)
        count, size, first = len(self._directory), len(directory), self.at
        ends = b""
        if count >= _NONE16 or size >= _NONE32 or first >= _NONE32:
            whole = (b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, first)
            ends = struct.pack("<4sQ2H2I4Q", *whole)
            ends += struct.pack("<4sIQI", b"PK\x06\x07", 0, first + size, 1)
        count, size, first = min(count, _NONE16), min(size, _NONE32), min(first, _NONE32)
        last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, first, 0)
        self.at += len(directory) + len(ends) + len(last)
        return raw + directory + ends + last


class TorchFrame:
    """Bytes around storages of some sizes in a file of torch.save.

    Parameters
    ----------
    value
        Value to pickle; its `StorageTensor` refer to storages as ``"0"``, ``"1"``, ...
    sizes
        Bytes of each storage.

    Attributes
    ----------
    head
        Bytes before the first storage; the whole file if there is none.
    ends
        End of each storage, counted without the bytes between them.
    nbytes
        Length of the file.
    """

    def __init__(self, value: Any, sizes: Sequence[int] = ()) -> None:
        self.sizes = sizes
        self.pickle = dump(value)
        self.ends = list(accumulate(sizes))
        self.nbytes = 0  # not yet known to the joints that measure it
        joints = TorchJoints(self)
        self.head = joints.head
        for number in range(len(sizes)):
            joints.after(number, 0)
        self.nbytes = joints.at


class TorchJoints:
    """Bytes between and after the storages of one file, as it is written.

    Attributes
    ----------
    head
        Bytes before the first storage.
    ends, nbytes
        As `ckptd.reshard.execute.Joints` has them.
    """

    def __init__(self, frame: TorchFrame) -> None:
        self._sizes = frame.sizes
        self._about = int.from_bytes(digest(frame.pickle)[:8], "little")
        self._zip = _Zip()
        parts = [
            self._zip.entry("data.pkl", frame.pickle),
            self._zip.entry(".format_version", b"1"),
            self._zip.entry(".storage_alignment", str(ALIGN).encode()),
            self._zip.entry("byteorder", b"little"),
            self._next(0),
        ]
        self.head = b"".join(parts)
        self.ends: Sequence[int] = frame.ends
        self.nbytes = frame.nbytes - len(self.head) - sum(self._sizes)

    @property
    def at(self) -> int:
        """Where the next byte lies in the file."""
        return self._zip.at

    def after(self, number: int, crc: int) -> bytes:
        """Return what follows storage `number`."""
        self._zip.at += self._sizes[number]
        closed = self._zip.close(f"data/{number}", self._sizes[number], crc)
        return closed + self._next(number + 1)

    def _next(self, number: int) -> bytes:
        if number < len(self._sizes):
            return self._zip.open(f"data/{number}", self._sizes[number])
        return self._zip.end(self._about)


@lru_cache(4096)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> TorchFrame:
    """Return what stands around one tensor that is all of a file."""
    size = Box.whole(shape).numel * DTYPES[dtype].itemsize
    return TorchFrame(StorageTensor("0", dtype, shape), [size])


def torch_file(value: Any, storages: Sequence[bytes] = ()) -> bytes:
    """Return a whole file of plain values, and small storages that they refer to."""
    joints = TorchJoints(TorchFrame(value, [len(raw) for raw in storages]))
    parts = [joints.head]
    for number, raw in enumerate(storages):
        parts += [raw, joints.after(number, zlib.crc32(raw))]
    return b"".join(parts)
