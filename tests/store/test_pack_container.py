"""Packed objects that are damaged, or made to do damage."""

from __future__ import annotations

import re
import struct
import tracemalloc
import uuid
from contextlib import suppress

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CorruptError
from ckptd.store import PackSpec, StoreSpec
from ckptd.store.pack import (
    FRAME_BYTES,
    HEADER,
    RAW,
    WIDTHS,
    ZSTD,
    PackFrame,
    bound,
    decode_frame,
    encode_frame,
    frame_end,
    lead_of,
    table_bytes,
)
from ckptd.types import ByteRange

KEY = "a.safetensors"
TRAILER = 56
ROW = 16


def packed(data: bytes) -> bytes:
    with StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(PackSpec()).open() as store:
        with store.writer(KEY, len(data)) as writer:
            writer.write(memoryview(data))
            writer.commit()
        raw: bytes = store.inner.get(KEY + ".zp")  # type: ignore[attr-defined]
    return raw


def read(raw: bytes) -> bytes:
    """Read `raw` as a packed object, in every way there is."""
    with StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(PackSpec(None)).open() as store:
        store.inner.put(KEY + ".zp", raw)  # type: ignore[attr-defined]
        list(store.list())
        size = store.stat(KEY).size
        if size > 64 << 20:
            store.get(KEY, ByteRange(size - 1, size))
            raise AssertionError("more than the object can hold")
        return store.get(KEY)


def sample() -> bytes:
    weights = np.random.default_rng(0).normal(0, 0.02, 400_000).astype("<f4").tobytes()
    return (4088).to_bytes(8, "little") + b" " * 4088 + weights + bytes(50_001)


GOOD = sample()
STORED = packed(GOOD)


def sealed(rows: bytes, size: int, lead: int, count: int, frames: bytes = b"") -> bytes:
    """Return a packed object whose digest is right, whatever it says."""
    head = struct.pack("<IIQQQ", 1, FRAME_BYTES, size, lead, count)
    return HEADER + frames + rows + head + xxhash.xxh3_128_digest(rows + head) + b"CKPTPAKE"


def row(data: bytes, codec: int = ZSTD, width: int = 1, zero: int = 0, check: int = -1) -> bytes:
    found = xxhash.xxh3_64_intdigest(data) if check < 0 else check
    return struct.pack("<IBBHQ", len(data), codec, width, zero, found)


def refused(raw: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        read(raw)
    assert re.search("packed object|frame|packed by a newer ckptd", caught.value.message)


def test_the_sample_is_read() -> None:
    assert read(STORED) == GOOD


def test_the_document_and_the_code_agree() -> None:
    """A reader written from docs/spec/pack-1.md alone."""
    version, unit, size, lead, count = struct.unpack("<IIQQQ", STORED[-56:-24])
    assert (version, unit, size, lead) == (1, 1 << 20, len(GOOD), 4096)
    assert STORED[:16] == b"CKPTPAK1" + struct.pack("<II", 1, 1 << 20)
    table = STORED[-56 - 16 * count : -56]
    assert xxhash.xxh3_128_digest(STORED[-56 - 16 * count : -24]) == STORED[-24:-8]
    out, at = b"", 16
    for i in range(count):
        stored, codec, width, zero, check = struct.unpack_from("<IBBHQ", table, 16 * i)
        data = STORED[at : at + stored]
        at += stored
        assert zero == 0
        assert xxhash.xxh3_64_intdigest(data) == check
        if codec == 1:
            data = zstandard.ZstdDecompressor().decompress(data)
            n = len(data) // width
            planes = [data[p * n : (p + 1) * n] for p in range(width)]
            data = (
                bytes(b for number in zip(*planes, strict=True) for b in number) + data[n * width :]
            )
        out += data
    assert at == len(STORED) - 56 - 16 * count
    assert out == GOOD


@pytest.mark.parametrize(
    "at", [0, 10, 20, 5000, -1, -8, -9, -24, -25, -32, -40, -48, -56, -57, -72]
)
def test_a_flipped_bit_is_noticed(at: int) -> None:
    raw = bytearray(STORED)
    raw[at] ^= 1
    if 0 <= at < len(HEADER):
        assert read(bytes(raw)) == GOOD  # for people and `file`; a reader goes by the trailer
    else:
        refused(bytes(raw))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 55, 56, 71, 72, 100, 5000, len(STORED) - 1])
def test_a_truncated_object_is_noticed(size: int) -> None:
    refused(STORED[:size])
    refused(STORED[:size] + bytes(len(STORED) - size))


@pytest.mark.parametrize(
    ("size", "lead", "count"),
    [
        (1 << 62, 0, 1),
        ((1 << 64) - 1, 0, (1 << 44) + 1),
        (100, 101, 1),
        (100, 0, 0),
        (100, 0, 2),
        (0, 0, 1),
        (FRAME_BYTES + 1, 0, 1),
        (5, (1 << 64) - 1, 1),
        (100, 0, (1 << 64) - 1),
    ],
)
def test_impossible_sizes_are_refused(size: int, lead: int, count: int) -> None:
    data = b"x" * 10
    refused(sealed(row(data), size, lead, count, data))


def test_rows_that_break_a_rule_are_refused() -> None:
    data = zstandard.compress(bytes(1000))
    right = row(data)
    assert read(sealed(right, 1000, 0, 1, data)) == bytes(1000)
    for wrong in [
        row(data, codec=2),
        row(data, width=3),
        row(data, width=0),
        row(data, zero=1),
        row(data, codec=RAW),
        row(data, check=5),
        row(data[:-1]),
        row(b""),
        row(data + b"1"),
    ]:
        refused(sealed(wrong, 1000, 0, 1, data))
    refused(sealed(right, 1000, 0, 1, data + b"gap"))


@pytest.mark.parametrize(
    "data",
    [
        zstandard.compress(bytes(FRAME_BYTES * 64)),  # says so itself
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        zstandard.compress(bytes(999)),
        zstandard.compress(bytes(1000))[:-1],
        zstandard.compress(bytes(1000)) + zstandard.compress(bytes(1000)),
        b"no zstd",
        b"\x28\xb5\x2f\xfd",
    ],
)
def test_frames_that_do_not_give_their_length_are_refused(data: bytes) -> None:
    tracemalloc.start()
    try:
        refused(sealed(row(data), 1000, 0, 1, data))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_size_that_the_frames_cannot_have_costs_no_memory() -> None:
    rows, frames = b"", b""
    one = zstandard.compress(bytes(FRAME_BYTES))
    for _ in range(4096):
        rows += row(one)
        frames += one
    raw = sealed(rows, 4096 * FRAME_BYTES, 0, 4096, frames)
    with StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(PackSpec(None)).open() as store:
        store.inner.put(KEY + ".zp", raw)  # type: ignore[attr-defined]
        tracemalloc.start()
        try:
            assert store.stat(KEY).size == 4 << 30
            assert store.get(KEY, ByteRange((4 << 30) - 3, 4 << 30)) == bytes(3)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


@settings(deadline=None)
@given(st.data())
def test_whatever_the_bytes_are_they_are_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(STORED)
    for _ in range(data.draw(st.integers(1, 4))):
        # The interesting places: first frame, table and trailer.
        at = data.draw(st.one_of(st.integers(0, 200), st.integers(len(raw) - 120, len(raw) - 1)))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # with a digest that fits
        raw[-24:-8] = xxhash.xxh3_128_digest(bytes(raw[-56 - 3 * ROW : -24]))
    with suppress(CorruptError):
        read(bytes(raw))


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(WIDTHS), st.integers(0, 400))
def test_any_frame_is_decoded_or_refused(data: bytes, width: int, size: int) -> None:
    out = memoryview(bytearray(size))
    check = xxhash.xxh3_64_intdigest(data)
    with pytest.raises(CorruptError):
        decode_frame(PackFrame(data, ZSTD, width, check), out, "here")


@settings(deadline=None)
@given(
    st.integers(0, 70_000),
    st.sampled_from(["<u2", "<f4", "<f8", "u1", "<i8"]),
    st.integers(0, 1 << 30),
    st.sampled_from([1, 3, 19]),
)
def test_a_frame_goes_round(size: int, dtype: str, seed: int, level: int) -> None:
    values = np.random.default_rng(seed).normal(0, 100, size // 8 + 1).astype(dtype)
    data = values.tobytes()[:size]
    frame = encode_frame(memoryview(data), level)
    assert len(frame.data) <= len(data)
    out = bytearray(len(data))
    decode_frame(frame, memoryview(out), "here")
    assert out == data


def test_the_width_is_that_of_the_numbers() -> None:
    rng = np.random.default_rng(0)
    floats = rng.normal(0, 0.02, 1 << 18).astype("<f4")
    assert encode_frame(memoryview(floats.tobytes()), 1).width == 4
    bf16 = (floats.view("<u4") >> 16).astype("<u2")
    assert encode_frame(memoryview(bf16.tobytes()), 1).width == 2
    words = rng.integers(0, 1000, 1 << 17).astype("<i8")
    assert encode_frame(memoryview(words.tobytes()), 1).width == 8
    assert encode_frame(memoryview(bytes(1 << 20)), 1).width == 1
    noise = encode_frame(memoryview(rng.bytes(1 << 20)), 1)
    assert (noise.codec, len(noise.data)) == (RAW, 1 << 20)


def test_where_frames_begin() -> None:
    assert lead_of((4088).to_bytes(8, "little"), 10_000) == 4096
    assert lead_of((4088).to_bytes(8, "little"), 4095) == 0
    assert lead_of(b"\xff" * 8, 1 << 40) == 0
    assert lead_of(b"", 0) == 0
    ends, at = [], 0
    while at < 4_000_000:
        at = frame_end(at, 1_500_000, 4_000_000)
        ends.append(at)
    assert ends == [
        FRAME_BYTES,
        1_500_000,
        1_500_000 + FRAME_BYTES,
        1_500_000 + 2 * FRAME_BYTES,
        4_000_000,
    ]


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 62))
def test_the_bound_is_one(size: int, length: int) -> None:
    lead = lead_of(length.to_bytes(8, "little"), size)
    count = -(-lead // FRAME_BYTES) + -(-(size - lead) // FRAME_BYTES)
    assert len(HEADER) + size + count * ROW + len(table_bytes(0, 0, [])) <= bound(size)
