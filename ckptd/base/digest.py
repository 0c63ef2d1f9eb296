"""Digests (XXH3-128) of blocks and chunks, and the index beside each data file; block size.

The index is ``header | block digests | chunk digests``. Blocks are 1 MiB slices of the data
section (not of the header), the last one short; chunks follow in file order. Fixed width makes
it range-readable: half a chunk is verified with at most two extra blocks.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import msgspec
import xxhash

from ckptd.errors import CorruptError

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16
_MAGIC = b"CKPTDIG1"
_HEADER = struct.Struct("<8sIIQQ")
MAX_CHUNKS = 1 << 24
_HEX = re.compile(r"[0-9a-f]{32}")


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 of `data`, 16 bytes, big-endian (the canonical form)."""
    return xxhash.xxh3_128_digest(data)


def digest_hex(data: bytes | memoryview) -> str:
    """XXH3-128 of `data` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def is_digest(text: str) -> bool:
    """Tell whether `text` has the form that `digest_hex` gives."""
    return _HEX.fullmatch(text) is not None


def unlike(what: str, where: str, wanted: str, found: str) -> CorruptError:
    """Return the error of bytes that have another digest than they should."""
    message = f"{what} is corrupt: digest mismatch"
    return CorruptError(message, kind="digest", where=where, wanted=wanted, found=found)


def block_count(data_bytes: int) -> int:
    """Number of blocks of a data section of `data_bytes` bytes."""
    return -(-data_bytes // BLOCK_BYTES)


class DigestIndex(msgspec.Struct, frozen=True):
    """Digests of one data file.

    Attributes
    ----------
    data_bytes
        Length of the data section.
    blocks
        Concatenated 16-byte digests of its 1 MiB blocks.
    chunks
        Concatenated 16-byte digests of its chunks, in file order.
    """

    data_bytes: int
    blocks: bytes
    chunks: bytes

    @staticmethod
    def build(data_bytes: int, blocks: Sequence[bytes], chunks: Sequence[bytes]) -> DigestIndex:
        """Join lists of digests."""
        return DigestIndex(data_bytes, b"".join(blocks), b"".join(chunks))

    def block(self, index: int) -> bytes:
        """Digest of block `index`."""
        return self.blocks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def chunk(self, index: int) -> bytes:
        """Digest of chunk `index`, in file order."""
        return self.chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    @property
    def nchunks(self) -> int:
        """Number of chunks."""
        return len(self.chunks) // DIGEST_BYTES

    def encode(self) -> bytes:
        """Return the bytes of the index file."""
        head = _HEADER.pack(_MAGIC, BLOCK_BYTES, 0, self.data_bytes, self.nchunks)
        return head + self.blocks + self.chunks

    @staticmethod
    def decode(raw: bytes, where: str) -> DigestIndex:
        """Parse an index file.

        Raises
        ------
        CorruptError
            Wrong magic, block size or length.
        """
        if len(raw) < _HEADER.size:
            raise _bad("digest index too short", where, f"{_HEADER.size} bytes", len(raw))
        magic, block_bytes, flags, data_bytes, nchunks = _HEADER.unpack_from(raw)
        if magic != _MAGIC or block_bytes != BLOCK_BYTES or flags != 0:
            raise _bad("not a digest index of format 1", where, _MAGIC, magic)
        blocks_end = _HEADER.size + block_count(data_bytes) * DIGEST_BYTES
        wanted = blocks_end + nchunks * DIGEST_BYTES
        if nchunks > MAX_CHUNKS or len(raw) != wanted:
            raise _bad("digest index has the wrong length", where, f"{wanted} bytes", len(raw))
        return DigestIndex(data_bytes, raw[_HEADER.size : blocks_end], raw[blocks_end:])


def _bad(what: str, where: str, wanted: object, found: object) -> CorruptError:
    return CorruptError(what, where=where, wanted=wanted, found=found)


class Digester:
    """Block and chunk digests of one data section.

    Parameters
    ----------
    ends
        End of each chunk in the data section, rising.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._blocks: list[bytes] = []
        self._chunks: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._at = 0

    def update(self, data: memoryview) -> None:
        """Digest the next slice; every one but the last is a multiple of the block."""
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self._blocks.append(digest(block))
            self._update_chunks(block)
            self._at += len(block)

    def _update_chunks(self, block: memoryview) -> None:
        # The bytes are in the processor's cache from the block digest, so this second pass is
        # nearly free.
        at, stop = 0, len(block)
        while len(self._chunks) < len(self._ends):
            end = self._ends[len(self._chunks)] - self._at
            if end > stop:
                break
            self._open.update(block[at:end])
            self._close()
            at = end
        if at < stop:
            self._open.update(block[at:])

    def _close(self) -> None:
        self._chunks.append(self._open.digest())
        self._open.reset()

    def index(self) -> DigestIndex:
        """Return the finished index."""
        while len(self._chunks) < len(self._ends):  # empty chunks at the end of an empty file
            self._close()
        return DigestIndex.build(self._at, self._blocks, self._chunks)
