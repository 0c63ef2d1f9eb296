"""Digests of blocks and chunks, in one pass over a data section that comes in slices."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ckptd.format.digest import BLOCK_BYTES, DigestIndex, digest

__all__ = ["Digester"]


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
