"""Writing one rank's data file and its digest index from a staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from ckptd.format.digest import BLOCK_BYTES, DigestIndex, digest, digest_hex
from ckptd.format.names import digests_key
from ckptd.store.base import Store

__all__ = ["FileResult", "write_file"]

SLICE_BYTES = 8 << 20
"""Bytes digested and written at a time; a multiple of the block and of the direct-I/O unit."""


@dataclass(frozen=True, slots=True)
class FileResult:
    """What the manifest needs to know of a written file."""

    data_start: int
    data_bytes: int
    index: str


def write_file(
    store: Store,
    key: str,
    header: bytes,
    data: memoryview,
    ends: Sequence[int],
    wait: Callable[[int], None],
    progress: Callable[[int], None],
) -> FileResult:
    """Write header and data front to back, then the digest index; durable on return.

    Digesting runs one slice ahead of writing in another thread, both release the interpreter
    lock, so the digest costs nothing while the disk is the limit.

    Parameters
    ----------
    header
        Padded header; its length is a multiple of 4096.
    data
        The data section, which may still be filling up.
    ends
        End of each chunk in `data`, rising.
    wait
        Called with an offset; returns when the data before it is in place, or raises.
    progress
        Called with the bytes written so far.

    Raises
    ------
    StoreError, ConflictError
        As the store says. The file is removed as far as that is possible.
    """
    with (
        ThreadPoolExecutor(1, thread_name_prefix="ckptd-digest") as pool,
        store.writer(key, len(header) + len(data)) as writer,
    ):
        digester = _Digester(data, ends)
        ahead = _slices(pool, digester, len(data), wait)
        writer.write(_aligned(header))
        for start, end, done in ahead:
            writer.write(data[start:end])
            done.result()
            progress(end)
        index = digester.index()
        writer.commit()
    raw = index.encode()
    store.put(digests_key(key), raw)
    return FileResult(len(header), len(data), digest_hex(raw))


def _slices(
    pool: ThreadPoolExecutor, digester: _Digester, nbytes: int, wait: Callable[[int], None]
) -> Iterator[tuple[int, int, Future[None]]]:
    for start in range(0, nbytes, SLICE_BYTES):
        end = min(start + SLICE_BYTES, nbytes)
        wait(end)
        yield start, end, pool.submit(digester.update, start, end)


class _Digester:
    """Block and chunk digests in one pass over the data."""

    def __init__(self, data: memoryview, ends: Sequence[int]) -> None:
        self._data = data
        self._ends = ends
        self._blocks: list[bytes] = []
        self._chunks: list[bytes] = []
        self._open = xxhash.xxh3_128()

    def update(self, start: int, end: int) -> None:
        """Digest ``data[start:end]``; calls come in order, `start` on a block boundary."""
        for at in range(start, end, BLOCK_BYTES):
            stop = min(at + BLOCK_BYTES, end)
            self._blocks.append(digest(self._data[at:stop]))
            self._update_chunks(at, stop)

    def _update_chunks(self, at: int, stop: int) -> None:
        # The bytes are in the processor's cache from the block digest, so this second pass is
        # nearly free.
        while len(self._chunks) < len(self._ends) and self._ends[len(self._chunks)] <= stop:
            end = self._ends[len(self._chunks)]
            self._open.update(self._data[at:end])
            self._chunks.append(self._open.digest())
            self._open.reset()
            at = end
        if at < stop:
            self._open.update(self._data[at:stop])

    def index(self) -> DigestIndex:
        """Return the finished index."""
        while len(self._chunks) < len(self._ends):  # empty chunks at the end of an empty file
            self._chunks.append(self._open.digest())
            self._open.reset()
        return DigestIndex.build(len(self._data), self._blocks, self._chunks)


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    import mmap

    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)
