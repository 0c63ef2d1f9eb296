"""Writing one rank's data file and its digest index from a staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ckptd.engine.digester import Digester
from ckptd.format.digest import digest_hex
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
        digester = Digester(ends)
        ahead = _slices(pool, digester, data, wait)
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
    pool: ThreadPoolExecutor, digester: Digester, data: memoryview, wait: Callable[[int], None]
) -> Iterator[tuple[int, int, Future[None]]]:
    for start in range(0, len(data), SLICE_BYTES):
        end = min(start + SLICE_BYTES, len(data))
        wait(end)
        yield start, end, pool.submit(digester.update, data[start:end])


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    import mmap

    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)
