"""Writing one rank's data file and its digest index from a staging buffer."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from ckptd import events
from ckptd.engine.digester import Digester
from ckptd.engine.telling import saving_file
from ckptd.format.digest import digest_hex
from ckptd.format.names import digests_key
from ckptd.store.base import Store

__all__ = ["FileResult", "Packed", "write_file"]

SLICE_BYTES = 8 << 20
"""Bytes digested and written at a time; a multiple of the block and of the direct-I/O unit."""


@dataclass(frozen=True, slots=True)
class FileResult:
    """What the manifest needs to know of a written file, and the joined digests of its chunks."""

    data_start: int
    data_bytes: int
    index: str
    digests: bytes = b""


class Packed:
    """Ranges of a buffer as one data section; each slice is a copy of its own, page-aligned.

    Parameters
    ----------
    ranges
        ``(start, end)``, rising, not empty.
    """

    def __init__(self, data: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        self._data = data
        self._ranges = ranges
        self._ends = list(accumulate(end - start for start, end in ranges))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, wanted: slice) -> memoryview:
        start, end, _ = wanted.indices(len(self))
        # Direct I/O wants aligned memory, and stores keep what they are given until the commit.
        out = memoryview(mmap.mmap(-1, end - start))
        at = bisect_right(self._ends, start)
        done = 0
        while start + done < end:
            last = self._ranges[at][1]
            here = last - (self._ends[at] - (start + done))
            take = min(last - here, end - start - done)
            out[done : done + take] = self._data[here : here + take]
            done, at = done + take, at + 1
        return out


def write_file(
    store: Store,
    key: str,
    header: bytes,
    data: memoryview | Packed,
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
        index = digester.index()
        raw = index.encode()
        store.put(digests_key(key), raw)
    return FileResult(len(header), len(data), digest_hex(raw), index.chunks)


def _write_data(
    store: Store,
    key: str,
    header: bytes,
    data: memoryview | Packed,
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
            for part, end, done in ahead:
                with writing.piece(len(part)):
                    writer.write(part)
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
    data: memoryview | Packed,
    wait: Callable[[int], None],
) -> Iterator[tuple[memoryview, int, Future[None]]]:
    def digest(part: memoryview) -> None:
        with digesting.piece(len(part)):
            digester.update(part)

    for start in range(0, len(data), SLICE_BYTES):
        end = min(start + SLICE_BYTES, len(data))
        wait(end)
        part = data[start:end]
        yield part, end, pool.submit(digest, part)


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)
