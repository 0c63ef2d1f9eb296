"""Header of a stream between live ranks: table of types, numbers and samples; its check.

In it: the error where the two ends mean different streams.

Both ends know its length from their plans. It holds facts that only the giver knows (which tensors
it has, of which type), and values that prove that the two ends mean the same stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.errors import CkptdError
from ckptd.reshard.live.check import MOST_SAMPLES, Sample
from ckptd.reshard.live.plan import StreamSegment
from ckptd.types import DTYPES, DType

U8 = NDArray[np.uint8]

_MAGIC = 0x31307661_6C64_7463
_PREFIX = struct.Struct("<QQQQ")
PREFIX_BYTES = _PREFIX.size
_CODES = {name: code for code, name in enumerate(sorted(DTYPES), 1)}
_NAMES = {code: name for name, code in _CODES.items()}
_VALUE = 16
_SAMPLE = struct.Struct("<qq16s")


def prefix(segments: Sequence[StreamSegment], message_bytes: int) -> bytes:
    """Return what tells one stream from another."""
    text = "\n".join(f"{s.target} {s.source} {s.numel} {s.span}" for s in segments)
    digest = xxhash.xxh3_64_intdigest(text.encode())
    return _PREFIX.pack(_MAGIC, message_bytes, len(segments), digest)


def check_prefix(
    found: bytes, segments: Sequence[StreamSegment], message_bytes: int, peer: int
) -> None:
    """Compare what the giver says with what the taker expects.

    Raises
    ------
    CkptdError
        The two ends have different layouts, budgets or plans.
    """
    wanted = prefix(segments, message_bytes)
    if found != wanted:
        theirs, mine = _PREFIX.unpack(found), _PREFIX.unpack(wanted)
        raise CkptdError(
            "two ranks have different plans",
            where=f"from rank {peer}",
            wanted=f"{mine[2]} tensors in messages of {mine[1]} bytes",
            found=f"{theirs[2]} tensors in messages of {theirs[1]} bytes"
            + (", other tensors" if theirs[1:3] == mine[1:3] else ""),
            hint="pass the same two layouts and the same budget on every rank",
        )


@dataclass(frozen=True, eq=False)
class StreamTable:
    """The table of a stream.

    Attributes
    ----------
    dtypes
        Type of each segment; None where the giver does not have it.
    scalars
        For each segment, by number of the scalar: its type and bytes, or None.
    samples
        Elements to look at.
    values
        Their bytes.
    """

    dtypes: Sequence[DType | None]
    scalars: Sequence[Sequence[tuple[DType, bytes] | None]]
    samples: Sequence[Sample]
    values: Sequence[bytes]

    def encode(self, scalar_count: int) -> U8:
        """Return the bytes: as many as `table_bytes` says."""
        out = bytearray()
        for dtype, scalars in zip(self.dtypes, self.scalars, strict=True):
            out.append(0 if dtype is None else _CODES[dtype.name])
            for number in range(scalar_count):
                scalar = scalars[number] if number < len(scalars) else None
                out.append(0 if scalar is None else _CODES[scalar[0].name])
                out += (b"" if scalar is None else scalar[1]).ljust(_VALUE, b"\0")
        for i in range(MOST_SAMPLES):
            if i < len(self.samples):
                sample = self.samples[i]
                out += _SAMPLE.pack(sample.segment, sample.target, self.values[i])
            else:
                out += _SAMPLE.pack(-1, 0, b"")
        return np.frombuffer(out, dtype=np.uint8)

    @staticmethod
    def decode(data: U8, count: int, scalar_count: int) -> StreamTable:
        """Invert `encode`.

        Raises
        ------
        CkptdError
            These are no types.
        """
        raw = data.tobytes()
        dtypes: list[DType | None] = []
        scalars: list[list[tuple[DType, bytes] | None]] = []
        at = 0
        for _ in range(count):
            dtypes.append(_dtype(raw[at]))
            at += 1
            found: list[tuple[DType, bytes] | None] = []
            for _ in range(scalar_count):
                dtype = _dtype(raw[at])
                value = raw[at + 1 : at + 1 + _VALUE]
                found.append(None if dtype is None else (dtype, value[: dtype.itemsize]))
                at += 1 + _VALUE
            scalars.append(found)
        samples, values = [], []
        for number, target, value in _SAMPLE.iter_unpack(raw[at:]):
            if 0 <= number < count:
                samples.append(Sample(number, 0, target))
                values.append(value)
        return StreamTable(dtypes, scalars, samples, values)


def table_bytes(count: int, scalar_count: int) -> int:
    """Return how long the table of a stream of `count` segments is."""
    return count * (1 + scalar_count * (1 + _VALUE)) + MOST_SAMPLES * _SAMPLE.size


def _dtype(code: int) -> DType | None:
    if code == 0:
        return None
    if code not in _NAMES:
        raise CkptdError("unknown dtype", found=code)
    return DTYPES[_NAMES[code]]
