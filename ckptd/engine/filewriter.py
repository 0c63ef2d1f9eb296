"""Writing one rank's data file and its digest index from a staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ckptd import events
from ckptd.engine.digester import Digester
from ckptd.engine.telling import saving_file
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
    with saving_file(store, key):
        digester = Digester(ends)
        _write_data(store, key, header, data, digester, wait, progress)
        raw = digester.index().encode()
        store.put(digests_key(key), raw)
    return FileResult(len(header), len(data), digest_hex(raw))


def _write_data(
    store: Store,
    key: str,
    header: bytes,
    data: memoryview,
    digester: Digester,
    wait: Callable[[int], None],
    progress: Callable[[int], None],
) -> None:
    digesting, writing = events.Activity("digest"), events.Activity("write")
    error: BaseException | None = None
    try:
        with (
            ThreadPoolExecutor(1, thread_name_prefix="ckptd-digest") as pool,
            store.writer(key, len(header) + len(data)) as writer,
        ):
            ahead = _slices(pool, digester, digesting, data, wait)
            with writing.piece(len(header)):
                writer.write(_aligned(header))
            for start, end, done in ahead:
                with writing.piece(end - start):
                    writer.write(data[start:end])
                done.result()
                progress(end)
            with events.span("sync"):
                writer.commit()
    except BaseException as caught:
        error = caught
        raise
    finally:
        digesting.emit(error)
        writing.emit(error)


def _slices(
    pool: ThreadPoolExecutor,
    digester: Digester,
    digesting: events.Activity,
    data: memoryview,
    wait: Callable[[int], None],
) -> Iterator[tuple[int, int, Future[None]]]:
    def digest(part: memoryview) -> None:
        with digesting.piece(len(part)):
            digester.update(part)

    for start in range(0, len(data), SLICE_BYTES):
        end = min(start + SLICE_BYTES, len(data))
        wait(end)
        yield start, end, pool.submit(digest, data[start:end])


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    import mmap

    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)
