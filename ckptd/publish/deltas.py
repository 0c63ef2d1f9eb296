"""Encoding of a changed block: sparse, byte planes, whole, compressed; which form is smallest.

In it: from which share of changed elements on a form is not tried; samples that tell whether
packing pays.

A delta is the XOR of a block's old and new bytes, so NaNs, signs of zeros and types without
arithmetic are as any other bits, and deltas of successive versions are joined without
either. Its first byte says which form is the smallest:

- nothing: no more bytes;
- sparse: which elements changed, and their XOR, byte plane by byte plane: the sign and exponent of
  a weight hardly ever change;
- planes: the XOR of all, byte plane by byte plane;
- whole: the new bytes themselves.

The n places of a sparse one stand as Elias and Fano code them: of each the low bits, so many as the
second byte says, one after the other; then of the rest, in a row of bits, a one for each place
behind as many zeros as it is above the one before. Where a bit an element takes no more, those
stand there (second byte 255). A plane whose bytes are all the same is one byte; one that is skewed
is packed by zstd. What comes from elsewhere is checked before memory is taken for it.

Native code makes the sparse form in one pass, with the digest of the new bytes; numpy makes the
same bytes where that is not built.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptd.base.runtime.copier import RunChange, change_of
from ckptd.errors import CorruptError

U8 = NDArray[np.uint8]

NOTHING, SPARSE, PLANES, WHOLE = b"\x00", b"\x01", b"\x02", b"\x03"
"""The first byte of a delta."""
WIDEST = 8
"""Bytes of an element, at most; of longer ones halves are compared."""

_HEAD = struct.Struct("<BBI")
_LENGTH = struct.Struct("<I")
_PACKED, _SAME = 1 << 31, 1 << 30
_BITS = 255
_MOST_LOW = 15
_SPARSE_SHARE = 0.75
_SAMPLE, _LEAST_PACKED = 256, 64
_local = threading.local()  # contexts of zstd serve one thread each

# A plane is skewed and has no repeats: short ones found by chance cost more than they save.
_PLANES_ALONE = zstandard.ZstdCompressionParameters(
    format=zstandard.FORMAT_ZSTD1_MAGICLESS,
    window_log=18,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
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
    delta, _ = changed(old, new, size)
    return WHOLE + new.tobytes() if delta is None else delta


def changed(old: U8, new: U8, size: int) -> tuple[bytes | None, bytes]:
    """Return a delta as `encode`, None for the block as a whole; and the digest of the new bytes.

    The latter is empty where it was not made.
    """
    size = min(size, WIDEST)
    count = len(new) // size
    most = max(1, int(_SPARSE_SHARE * count))
    found = change_of(old, new, size, most) or _changed(old, new, size, most)
    delta = found.sparse
    if found.planes:
        packs = (found.packs >> i & 1 for i in range(size))
        delta = PLANES + b"".join(map(_stream, found.planes, packs))
    elif delta:
        delta = _packed(found, size, count) if found.packs else delta
    elif delta is not None:
        delta = NOTHING
    return (delta if delta is None or len(delta) <= len(new) else None), found.digest


def _changed(old: U8, new: U8, size: int, most: int) -> RunChange:
    """Do as `change_of` does, by numpy."""
    xor = old.view(f"<u{size}") ^ new.view(f"<u{size}")
    at = np.flatnonzero(xor)
    if not len(at):
        return RunChange(b"", 0)
    few, whole = len(at) <= most, xor.view(np.uint8).reshape(-1, size).T
    planes = xor[at].view(np.uint8).reshape(-1, size).T if few else whole
    packs = sum(_is_skewed(plane) << i for i, plane in enumerate(planes))
    streams = []
    for i, plane in enumerate(planes if few else ()):
        same = len(at) > 1 and bool(np.all(plane == plane[0]))
        if same or len(at) < _LEAST_PACKED:
            packs &= ~(1 << i)
        head = _LENGTH.pack(1 | _SAME if same else len(plane))
        streams.append(head + plane[: 1 if same else None].tobytes())
    if not few or (packs and 2 * len(at) > len(xor)):
        return RunChange(None, packs, tuple(p.tobytes() for p in whole) if packs else ())
    low, *_ = least = _places(len(at), len(xor))
    head = _HEAD.pack(SPARSE[0], low, len(at))
    if low == _BITS:
        places = np.packbits(xor != 0, bitorder="little").tobytes()
    else:
        bits = np.unpackbits(at.astype("<u2").view(np.uint8), bitorder="little")
        bits = bits.reshape(-1, 16)[:, :low]
        rest = np.zeros(8 * least[2], np.uint8)
        rest[(at >> low) + np.arange(len(at))] = 1
        places = b"".join(
            np.packbits(x.reshape(-1), bitorder="little").tobytes() for x in (bits, rest)
        )
    return RunChange(head + places + b"".join(streams), packs)


def _places(number: int, count: int) -> tuple[int, int, int]:
    """Return low bits of each place, and bytes of all of these, and of the rest."""
    bits, low = min((number * (i + 1) + (count - 1 >> i), i) for i in range(_MOST_LOW + 1))
    if bits >= count:
        return _BITS, 0, -(-count // 8)
    return low, -(-number * low // 8), -(-(number + (count - 1 >> low)) // 8)


def _is_skewed(plane: U8) -> bool:
    """Tell by some bytes whether so many are equal that packing pays."""
    counts = np.bincount(plane[:: max(1, len(plane) // _SAMPLE)][:_SAMPLE])
    drawn = int(counts.sum())
    return bool((counts * (counts - 1)).sum() // 2 * 1024 > 5 * drawn * (drawn - 1))


def _packed(found: RunChange, size: int, count: int) -> bytes:
    """Pack the planes of a sparse form that are skewed."""
    data = found.sparse or b""
    number = _HEAD.unpack_from(data)[2]
    at = _HEAD.size + sum(_places(number, count)[1:])
    out = [data[:at]]
    for i in range(size):
        end = at + _LENGTH.size + (_LENGTH.unpack_from(data, at)[0] & ~_SAME)
        packs = found.packs >> i & 1
        out.append(_stream(data[at + _LENGTH.size : end], packs) if packs else data[at:end])
        at = end
    return b"".join(out)


def _stream(raw: bytes | memoryview, packs: int) -> bytes:
    if packs:
        if not hasattr(_local, "packer"):
            _local.packer = zstandard.ZstdCompressor(compression_params=_PLANES_ALONE)
        packed = _local.packer.compress(raw)
        if len(packed) < len(raw):
            return bytes(_LENGTH.pack(len(packed) | _PACKED) + packed)
    return _LENGTH.pack(len(raw)) + raw


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
        planes = _unpacked(delta[1:], len(values), size)
        values ^= _joined(planes, size)
        return
    count, low, number = len(values), 0, 0
    if len(delta) >= _HEAD.size and delta[:1] == SPARSE:
        _, low, number = _HEAD.unpack_from(delta)
    right, *lengths = _places(number, count) if 0 < number <= count else (-1,)
    if right != low:
        raise _no_delta("a form that there is, and so many elements")
    ends = list(accumulate(lengths, initial=_HEAD.size))
    if len(delta) < ends[2]:
        raise _no_delta("all of its places")
    lows, rest = (np.frombuffer(delta[a:b], np.uint8) for a, b in pairwise(ends))
    at = np.flatnonzero(np.unpackbits(rest, bitorder="little").view(np.bool_))
    if len(at) != number:
        raise _no_delta(f"{number} elements", f"{len(at)} elements")
    if low != _BITS:
        bits = np.zeros((number, 16), np.uint8)
        bits[:, :low] = np.unpackbits(lows, count=number * low, bitorder="little").reshape(
            number, low
        )
        at = (at - np.arange(number)) << low
        at |= np.packbits(bits.reshape(-1), bitorder="little").view("<u2")
        if not np.all(at[1:] > at[:-1]):
            raise _no_delta("places that rise")
    if at[-1] >= count:
        raise _no_delta("elements of the block")
    values[at] ^= _joined(_unpacked(delta[ends[2] :], number, size), size)


def _unpacked(data: memoryview, length: int, number: int) -> list[U8]:
    """Return streams, each of which has so many bytes."""
    if not hasattr(_local, "opener"):
        _local.opener = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    out: list[U8] = []
    for _ in range(number):
        if len(data) < _LENGTH.size:
            raise _no_delta("all of its streams")
        said = int(_LENGTH.unpack_from(data)[0])
        end = _LENGTH.size + (said & ~(_PACKED | _SAME))
        raw: bytes | memoryview = data[_LENGTH.size : end]
        if len(data) < end:
            raise _no_delta("all of its streams")
        if said & _PACKED:
            try:
                # Where a stream says how long it is, that much is allocated whatever is allowed.
                frame = zstandard.get_frame_parameters(raw, zstandard.FORMAT_ZSTD1_MAGICLESS)
                if frame.content_size != zstandard.CONTENTSIZE_UNKNOWN:
                    raise _no_delta("streams that do not say their length", str(frame.content_size))
                raw = _local.opener.decompress(raw, max_output_size=length, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise _no_delta("streams that unpack", str(error)[:200]) from None
        if len(raw) != (1 if said & _SAME else length):
            raise _no_delta(f"{length} bytes", f"{len(raw)} bytes")
        plane = np.frombuffer(raw, np.uint8)
        out.append(np.broadcast_to(plane, length) if said & _SAME else plane)
        data = data[end:]
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
