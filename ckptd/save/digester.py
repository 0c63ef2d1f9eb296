"""Digests of blocks and chunks, in one pass over a data section that comes in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from ckptd import events
from ckptd.format.digest import BLOCK_BYTES, DigestIndex, digest
from ckptd.format.filemap import ChunkRef
from ckptd.save.unchanged import LEAST_BYTES, Digests

__all__ = ["Digester", "digest_chunks"]

_SLICE_BYTES = 8 << 20


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


def digest_chunks(
    data: memoryview,
    chunks: Sequence[ChunkRef],
    wait: Callable[[int], None],
    activity: events.Activity,
) -> Digests:
    """Return the digests of the chunks that are large enough to be looked for; of others zeros.

    Parameters
    ----------
    data
        Where they lie, which may still be filling up.
    wait
        Called with an offset; returns when the data before it is in place, or raises.
    activity
        Counts the time, without that of waiting.
    """
    table = np.zeros((len(chunks), 2), dtype=np.uint64)
    for number, chunk in enumerate(chunks):
        if chunk.end - chunk.start < LEAST_BYTES:
            continue
        state = xxhash.xxh3_128()
        for start in range(chunk.start, chunk.end, _SLICE_BYTES):
            end = min(start + _SLICE_BYTES, chunk.end)
            wait(end)
            with activity.piece(end - start):
                state.update(data[start:end])
        table[number] = np.frombuffer(state.digest(), dtype=np.uint64)
    return table
