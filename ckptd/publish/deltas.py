"""The change of a block of values, in as few bytes as that takes; exact to the bit.

A delta is the XOR of a block's old and new bytes, so NaNs, signs of zeros and types without
arithmetic are as any other bits, and deltas of successive versions are joined without
either. Its first byte says which form is the smallest:

- nothing: no more bytes;
- sparse: which elements changed, as the number of elements between one and the next, and their XOR,
  byte plane by byte plane: the sign and exponent of a weight hardly ever change;
- planes: the XOR of all, byte plane by byte plane;
- whole: the new bytes themselves.

Streams of bytes are packed by zstd, each by itself, where that makes them fewer. What comes from
elsewhere is checked before memory is taken for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptd.base.runtime.copier import differing
from ckptd.errors import CorruptError

U8 = NDArray[np.uint8]

NOTHING, SPARSE, PLANES, WHOLE = b"\x00", b"\x01", b"\x02", b"\x03"
"""The first byte of a delta."""
WIDEST = 8
"""Bytes of an element, at most; of longer ones halves are compared."""

_HEAD = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_PACKED = 1 << 31
_SPARSE_SHARE = 0.75
_MAYBE_PLANES = 0.5
_FAR_APART = 128
"""Elements between changed ones on average, from where on two bytes tell it in less room."""
_local = threading.local()  # contexts of zstd serve one thread each

# A plane is skewed and has no repeats: short ones found by chance cost more than they save.
_PLANES_ALONE = zstandard.ZstdCompressionParameters(
    format=zstandard.FORMAT_ZSTD1_MAGICLESS,
    window_log=18,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=8,
    write_content_size=False,
)


def encode(old: U8, new: U8, size: int) -> bytes:
    """Return the delta of a block whose elements have `size` bytes, in its smallest form.

    Parameters
    ----------
    old, new
        As long as each other.
    size
        1, 2, 4, 8, or a multiple of 8.
    """
    size = min(size, WIDEST)
    count = len(new) // size
    found = differing(old, new, size, max(1, int(_SPARSE_SHARE * count)))
    forms = [WHOLE + new.tobytes()] if found is None else [_sparse(*found, count)]
    if found is None or len(found[0]) > _MAYBE_PLANES * count:
        xor = (old ^ new).reshape(-1, size)
        forms.append(PLANES + b"".join(_streams(xor[:, i] for i in range(size))))
    least = min(forms, key=len)
    return least if len(least) <= len(new) else WHOLE + new.tobytes()


def _sparse(gaps: NDArray[np.uint32], planes: U8, count: int) -> bytes:
    if not len(gaps):
        return NOTHING
    width = 1 if len(gaps) * _FAR_APART > count else 2
    words = _told(gaps, (1 << 8 * width) - 1).astype(f"<u{width}")
    streams = _streams([*words.view(np.uint8).reshape(-1, width).T, *planes])
    return _HEAD.pack(SPARSE[0] | width << 4, len(gaps)) + b"".join(streams)


def _told(gaps: NDArray[np.uint32], more: int) -> NDArray[np.uint32]:
    """Return numbers in words of which `more` is added to the next one."""
    if not gaps.max() >= more:
        return gaps
    before, last = np.divmod(gaps, np.uint32(more))
    ends = np.cumsum(before + 1, dtype=np.int64) - 1
    out = np.full(int(ends[-1]) + 1, more, np.uint32)
    out[ends] = last
    return out


def _streams(planes: Iterable[U8]) -> Iterator[bytes]:
    if not hasattr(_local, "packer"):
        _local.packer = zstandard.ZstdCompressor(compression_params=_PLANES_ALONE)
    for plane in planes:
        raw = plane.tobytes()
        packed = _local.packer.compress(raw)
        if len(packed) < len(raw):
            yield _LENGTH.pack(len(packed) | _PACKED) + packed
        else:
            yield _LENGTH.pack(len(raw)) + raw


def apply(base: U8, delta: bytes | memoryview, size: int) -> None:
    """Make a block's old bytes the new ones, where they are; with zeros, the XOR of both.

    Raises
    ------
    CorruptError
        It is no delta of a block of that length.
    """
    delta, size = memoryview(delta), min(size, WIDEST)
    if len(delta) == 1 and delta == NOTHING:
        return
    if delta[:1] == WHOLE:
        if len(delta) != 1 + len(base):
            raise _no_delta("as many bytes as the block has")
        base[:] = np.frombuffer(delta[1:], np.uint8)
        return
    values = base.view(f"<u{size}")
    if delta[:1] == PLANES:
        planes = _unpacked(delta[1:], [(len(values), len(values))] * size)
        values ^= _joined(planes, size)
        return
    width = delta[0] >> 4 if len(delta) >= _HEAD.size and delta[0] & 15 == SPARSE[0] else 0
    count = _HEAD.unpack_from(delta)[1] if width in (1, 2) else 0
    if not 0 < count <= len(values):
        raise _no_delta("a form that there is, and so many elements")
    more = (1 << 8 * width) - 1
    told = (count, count + len(values) // more)
    streams = _unpacked(delta[_HEAD.size :], [told] * width + [(count, count)] * size)
    if len({len(s) for s in streams[:width]}) != 1:
        raise _no_delta("words of one length")
    words = _joined(streams[:width], width)
    ends = words != more
    if np.count_nonzero(ends) != count or not ends[-1]:
        raise _no_delta(f"{count} elements")
    at = np.cumsum(words, dtype=np.int64)[ends] + np.arange(count)
    if at[-1] >= len(values):
        raise _no_delta("elements of the block")
    values[at] ^= _joined(streams[width:], size)


def _unpacked(data: memoryview, lengths: Sequence[tuple[int, int]]) -> list[U8]:
    """Return streams, each of which has at least and at most so many bytes."""
    if not hasattr(_local, "opener"):
        _local.opener = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    out: list[U8] = []
    for least, most in lengths:
        if len(data) < _LENGTH.size:
            raise _no_delta("all of its streams")
        said = int(_LENGTH.unpack_from(data)[0])
        length = said & ~_PACKED
        raw: bytes | memoryview = data[_LENGTH.size : _LENGTH.size + length]
        if len(raw) != length:
            raise _no_delta("all of its streams")
        if said & _PACKED:
            try:
                # Where a stream says how long it is, that much is allocated whatever is allowed.
                frame = zstandard.get_frame_parameters(raw, zstandard.FORMAT_ZSTD1_MAGICLESS)
                if frame.content_size != zstandard.CONTENTSIZE_UNKNOWN:
                    raise _no_delta("streams that do not say their length", str(frame.content_size))
                raw = _local.opener.decompress(raw, max_output_size=most, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise _no_delta("streams that unpack", str(error)[:200]) from None
        if not least <= len(raw) <= most:
            raise _no_delta(f"{least} to {most} bytes", f"{len(raw)} bytes")
        out.append(np.frombuffer(raw, np.uint8))
        data = data[_LENGTH.size + length :]
    if len(data):
        raise _no_delta("no bytes behind it")
    return out


def _joined(planes: Sequence[U8], size: int) -> NDArray[np.unsignedinteger]:
    out = np.empty((len(planes[0]), size), np.uint8)
    for i, plane in enumerate(planes):
        out[:, i] = plane
    return out.view(f"<u{size}").reshape(-1)


def _no_delta(wanted: str, found: str | None = None) -> CorruptError:
    return CorruptError("malformed delta of a block", wanted=wanted, found=found)
