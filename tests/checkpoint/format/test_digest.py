from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.digest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    DigestIndex,
    block_count,
    digest,
    digest_hex,
    is_digest,
)
from ckptd.errors import CorruptError


def test_known_digests() -> None:
    # From the XXH3 reference implementation; they must never change.
    assert digest_hex(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_hex(b"ckptd") == xxhash.xxh3_128(b"ckptd").hexdigest()
    assert digest(b"ckptd").hex() == digest_hex(b"ckptd")
    assert is_digest(digest_hex(b"x"))


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", "٣" * 32]
)
def test_other_texts_are_no_digests(text: str) -> None:
    assert not is_digest(text)


@given(st.integers(0, 40 * BLOCK_BYTES))
def test_blocks_cover_the_data(nbytes: int) -> None:
    blocks = block_count(nbytes)
    assert blocks * BLOCK_BYTES >= nbytes
    assert not nbytes or (blocks - 1) * BLOCK_BYTES < nbytes


@given(st.integers(0, 5 * BLOCK_BYTES), st.integers(0, 7))
def test_round_trip(nbytes: int, nchunks: int) -> None:
    blocks = [bytes([i]) * DIGEST_BYTES for i in range(block_count(nbytes))]
    chunks = [bytes([100 + i]) * DIGEST_BYTES for i in range(nchunks)]
    index = DigestIndex.build(nbytes, blocks, chunks)
    back = DigestIndex.decode(index.encode(), "x.digests")
    assert back == index
    assert back.nchunks == nchunks
    assert [back.block(i) for i in range(len(blocks))] == blocks
    assert [back.chunk(i) for i in range(nchunks)] == chunks


def header(
    magic: bytes = b"CKPTDIG1",
    block: int = BLOCK_BYTES,
    flags: int = 0,
    nbytes: int = 0,
    n: int = 0,
) -> bytes:
    return struct.pack("<8sIIQQ", magic, block, flags, nbytes, n)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        header()[:-1],
        header(magic=b"CKPTDIG2"),
        header(block=BLOCK_BYTES * 2),
        header(flags=1),
        header(nbytes=1),
        header(nbytes=2**64 - 1),
        header(n=1),
        header(n=2**64 - 1),
        header(nbytes=2**63, n=2**63),
        header() + b"\x00",
        header(n=1) + b"\x00" * 15,
    ],
)
def test_broken_indexes(raw: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        DigestIndex.decode(raw, "r00000.digests")
    assert caught.value.message in (
        "digest index has the wrong length",
        "digest index too short",
        "not a digest index of format 1",
    )
    assert caught.value.where == "r00000.digests"


def test_layout_of_the_file() -> None:
    # Spec 5, spelled out: files of version 1 must read for ever.
    index = DigestIndex.build(BLOCK_BYTES + 1, [b"A" * 16, b"B" * 16], [b"C" * 16])
    raw = bytes.fromhex("434b505444494731000010000000000001001000000000000100000000000000")
    assert index.encode() == raw + b"A" * 16 + b"B" * 16 + b"C" * 16
