"""One frame of a packed object: byte planes, then zstd; see ``docs/spec/pack-1.md``.

The bytes of numbers that lie near one another in size differ most in their low bytes. Put plane by
plane (all first bytes, all second bytes, ...) the high ones compress well, and the noise of the
low ones is told apart from them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ckptd.errors import CorruptError

__all__ = ["FRAME_BYTES", "RAW", "WIDTHS", "ZSTD", "Frame", "decode_frame", "encode_frame"]

FRAME_BYTES = 1 << 20
"""Logical bytes of a frame: what one digest covers, so that a block is checked from one frame."""
RAW, ZSTD = 0, 1
WIDTHS = (1, 2, 4, 8)
_WORTH = 0.95  # of the bytes, at most; else the frame is stored as it is
_ALIKE = 1.01
_SLICES, _SLICE_BYTES = 8, 4096
_local = threading.local()  # contexts of zstd serve one thread each

# A plane of exponents is skewed and has no repeats: looking for short ones costs time, and those
# that are found by chance take more room than the entropy coder needs. So level 1 looks for long
# ones only, in a small table: about twice as fast on planes as zstd's own level 1, and no larger.
_FOR_PLANES = zstandard.ZstdCompressionParameters(
    window_log=20, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=8
)

_U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Frame:
    """What is stored of a frame.

    Attributes
    ----------
    data
        The stored bytes.
    codec
        `RAW` or `ZSTD`.
    width
        Number of byte planes, of `WIDTHS`; 1 for a raw frame.
    check
        XXH3-64 of `data`.
    """

    data: bytes | memoryview
    codec: int
    width: int
    check: int


def encode_frame(view: memoryview, level: int) -> Frame:
    """Pack at most `FRAME_BYTES` bytes; stored as they are where packing saves less than 5 %."""
    raw = np.frombuffer(view, np.uint8)
    width = _best_width(raw, level)
    if width:
        data = _compressor(level).compress(_planes(raw, width).data)
        if len(data) <= _WORTH * len(raw):
            return Frame(data, ZSTD, width, xxhash.xxh3_64_intdigest(data))
    return Frame(view, RAW, 1, xxhash.xxh3_64_intdigest(view))


def decode_frame(frame: Frame, out: memoryview, where: str) -> None:
    """Fill `out`, which is as long as the frame's logical bytes.

    Raises
    ------
    CorruptError
        Kind ``bad-pack``: the bytes are not what was stored, or do not give `out`.
    """
    if xxhash.xxh3_64_intdigest(frame.data) != frame.check:
        raise CorruptError("a frame is not what was stored", kind="bad-pack", where=where)
    if frame.codec == RAW:
        if len(frame.data) != len(out):
            raise _wrong_length(where, len(out), len(frame.data))
        out[:] = frame.data
        return
    _from_planes(np.frombuffer(_expand(frame.data, len(out), where), np.uint8), frame.width, out)


def _expand(data: bytes | memoryview, size: int, where: str) -> bytes:
    try:
        # Said by the data themselves: to be compared before that much is allocated.
        said = zstandard.get_frame_parameters(data).content_size
        if said != size:
            raise _wrong_length(where, size, said)
        found = _decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(
            "a frame does not decompress", kind="bad-pack", where=where, found=error
        ) from None
    if len(found) != size:
        raise _wrong_length(where, size, len(found))
    return found


def _wrong_length(where: str, wanted: int, found: int) -> CorruptError:
    return CorruptError(
        "a frame has the wrong length",
        kind="bad-pack",
        where=where,
        wanted=f"{wanted} bytes",
        found=f"{found} bytes",
    )


def _best_width(raw: _U8, level: int) -> int:
    """Return the number of planes that packs a sample best; 0 where none packs it."""
    sample = _sample(raw)
    if not len(sample):
        return 0
    sizes = [_plane_sizes(sample, width, level) for width in WIDTHS]
    least = min(sizes)
    if least > _WORTH * len(sample) + 64:
        return 0
    # The fewest planes of those that do about as well: they are the quickest.
    return next(w for w, size in zip(WIDTHS, sizes, strict=True) if size <= _ALIKE * least)


def _plane_sizes(sample: _U8, width: int, level: int) -> int:
    """Return the bytes of all planes, packed one by one: in a frame each fills its own blocks."""
    step = -(-len(sample) // width)
    data, packer = _planes(sample, width).data, _compressor(level)
    return sum(len(packer.compress(data[i : i + step])) for i in range(0, len(sample), step))


def _sample(raw: _U8) -> _U8:
    """Return pieces from all over the frame; each begins at a multiple of every width."""
    if len(raw) <= _SLICES * _SLICE_BYTES:
        return raw
    step = (len(raw) - _SLICE_BYTES) // (_SLICES - 1) // 8 * 8
    return np.concatenate([raw[i * step : i * step + _SLICE_BYTES] for i in range(_SLICES)])


def _planes(raw: _U8, width: int) -> _U8:
    """Return the bytes plane by plane; what is left of a last number follows as it is."""
    count = len(raw) // width
    if width == 1 or not count:
        return raw
    out = np.empty(len(raw), np.uint8)
    planes = out[: count * width].reshape(width, count)
    # Shifts and narrowing are vector instructions; copies with a stride are not.
    words = raw[: count * width].view(f"<u{width}")
    for i in range(width):
        np.copyto(planes[i], words >> words.dtype.type(8 * i), casting="unsafe")
    out[count * width :] = raw[count * width :]
    return out


def _from_planes(data: _U8, width: int, out: memoryview) -> None:
    target = np.frombuffer(out, np.uint8)
    count = len(data) // width
    if width == 1 or not count:
        target[:] = data
        return
    planes = data[: count * width].reshape(width, count)
    words = np.empty(count, f"<u{width}")
    words[:] = planes[width - 1]
    for i in range(width - 2, -1, -1):
        np.left_shift(words, words.dtype.type(8), out=words)
        np.bitwise_or(words, planes[i], out=words)
    target[: count * width] = words.view(np.uint8)
    target[count * width :] = data[count * width :]


def _compressor(level: int) -> zstandard.ZstdCompressor:
    kept: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("packers", {})
    if level not in kept:
        kept[level] = (
            zstandard.ZstdCompressor(compression_params=_FOR_PLANES)
            if level == 1
            else zstandard.ZstdCompressor(level=level)
        )
    return kept[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "expander", None)
    if found is None:
        found = _local.expander = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)
    return found
