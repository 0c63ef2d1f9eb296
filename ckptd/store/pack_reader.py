"""The reader of `Pack`: tables that are kept, frames that are read and unpacked."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ckptd.errors import CorruptError, UsageError
from ckptd.store.base import ObjectInfo, Store
from ckptd.store.buffers import check_end
from ckptd.store.pack_container import Table, load_table
from ckptd.store.pack_frame import decode_frame
from ckptd.store.pack_writer import STALL_S, result_of
from ckptd.types import ByteRange

__all__ = ["PackReader"]

_T = TypeVar("_T")

_MOST_FRAMES = 1 << 21  # of all tables that are kept: 24 bytes each
_GROUP_BYTES = 32 << 20  # stored bytes of one read
_RECENT = 16  # frames that were read in part and are kept, whole


class PackReader:
    """Reads packed objects of `inner` by their physical names; thread-safe.

    Parameters
    ----------
    pool
        Gives the threads that unpack.
    """

    def __init__(self, inner: Store, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._inner = inner
        self._pool = pool
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._frames = 0
        # Many small tensors lie in one frame, and are read one by one.
        self._recent: OrderedDict[tuple[bytes, int], memoryview] = OrderedDict()

    # -- tables ----------------------------------------------------------------------------------

    def knows(self, name: str) -> bool:
        """Tell whether the table of `name` was read before."""
        return name in self._tables

    def forget(self, name: str) -> None:
        """Drop what is known of `name`."""
        with self._lock:
            table = self._tables.pop(name, None)
            if table is not None:
                self._frames -= len(table.rows)

    def table(self, name: str, info: ObjectInfo | None = None) -> Table:
        """Return the table of `name`; `info`, where known, saves asking for the size.

        Raises
        ------
        NotFoundError, CorruptError
        """
        with self._lock:
            kept = self._tables.get(name)
            if kept is not None:
                self._tables.move_to_end(name)
        if kept is not None and (
            info is None or (info.size, info.modified) == (kept.stored, kept.modified)
        ):
            return kept
        return self._load(name, info or self._inner.stat(name))

    def _load(self, name: str, info: ObjectInfo) -> Table:
        table = load_table(
            f"{self._inner.url}/{name}",
            info.size,
            info.modified,
            lambda start, end: self._inner.get(name, ByteRange(start, end)),
        )
        self.forget(name)
        with self._lock:
            self._tables[name] = table
            self._frames += len(table.rows)
            while self._frames > _MOST_FRAMES and len(self._tables) > 1:
                self._frames -= len(self._tables.popitem(last=False)[1].rows)
        return table

    # -- bytes -----------------------------------------------------------------------------------

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` from logical byte `offset`.

        Raises
        ------
        NotFoundError, CorruptError
        """
        self._with_table(name, lambda table: self._fill(name, table, offset, view))

    def get(self, name: str, byte_range: ByteRange | None) -> bytes:
        """Return all logical bytes, or exactly `byte_range`; errors as `read`."""

        def act(table: Table) -> bytes:
            start, end = (byte_range.start, byte_range.end) if byte_range else (0, table.size)
            check_end(f"{self._inner.url}/{name}", end, table.size)  # before it is allocated
            data = bytearray(end - start)
            self._fill(name, table, start, memoryview(data))
            return bytes(data)

        return self._with_table(name, act)

    def _with_table(self, name: str, act: Callable[[Table], _T]) -> _T:
        """Do `act`; again where the table was an old one, of an object that was replaced since."""
        known = self.knows(name)
        table = self.table(name)
        try:
            return act(table)
        except CorruptError:
            again = self._load(name, self._inner.stat(name)) if known else table
            if again.digest == table.digest:
                raise
            return act(again)

    def _fill(self, name: str, table: Table, offset: int, view: memoryview) -> None:
        where = f"{self._inner.url}/{name}"
        check_end(where, offset + len(view), table.size)
        if not len(view):
            return
        first, last = table.index(offset), table.index(offset + len(view) - 1)
        if first == last:
            self._fill_one(name, table, first, offset, view)
            return
        flying: deque[list[Future[None]]] = deque()
        try:
            for start, stop in _groups(table, first, last + 1):
                lo, hi = int(table.offsets[start]), int(table.offsets[stop])
                data = memoryview(self._inner.get(name, ByteRange(lo, hi)))
                calls = [
                    _Call(
                        table, i, data[int(table.offsets[i]) - lo : int(table.offsets[i + 1]) - lo]
                    )
                    for i in range(start, stop)
                ]
                flying.append([])
                for call in calls:
                    flying[-1].append(self._start(call, offset, view, where))
                if len(flying) > 1:
                    _finish(flying[0], where)
                    flying.popleft()
            while flying:
                _finish(flying[0], where)
                flying.popleft()
        finally:
            # Until they are over, threads write into the caller's memory.
            wait([f for group in flying for f in group if not f.cancel()], STALL_S)

    def _fill_one(self, name: str, table: Table, index: int, offset: int, view: memoryview) -> None:
        """Fill `view` from a single frame: no threads, and the frame is kept for the next call."""
        start, stop = table.span(index)
        with self._lock:
            frame = self._recent.get((table.digest, index))
        if frame is None:
            stored = ByteRange(int(table.offsets[index]), int(table.offsets[index + 1]))
            call = _Call(table, index, memoryview(self._inner.get(name, stored)))
            where = f"{self._inner.url}/{name}"
            if len(view) == stop - start:
                call.run(offset, view, where)
                return
            frame = memoryview(bytearray(stop - start))
            call.run(start, frame, where)
            with self._lock:
                self._recent[table.digest, index] = frame
                while len(self._recent) > _RECENT:
                    self._recent.popitem(last=False)
        view[:] = frame[offset - start : offset - start + len(view)]

    def _start(self, call: _Call, offset: int, view: memoryview, where: str) -> Future[None]:
        try:
            return self._pool().submit(call.run, offset, view, where)
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=where) from None


class _Call:
    """One frame to unpack."""

    def __init__(self, table: Table, index: int, data: memoryview) -> None:
        self._table = table
        self._index = index
        self._data = data

    def run(self, offset: int, view: memoryview, where: str) -> None:
        """Write what of the frame belongs into `view`, which begins at logical byte `offset`."""
        start, stop = self._table.span(self._index)
        lo, hi = max(start, offset), min(stop, offset + len(view))
        place = view[lo - offset : hi - offset]
        frame = self._table.frame(self._index, self._data)
        where = f"frame {self._index} of {where}"
        if (lo, hi) == (start, stop):
            decode_frame(frame, place, where)
            return
        whole = memoryview(bytearray(stop - start))
        decode_frame(frame, whole, where)
        place[:] = whole[lo - start : hi - start]


def _groups(table: Table, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut frames into runs that are read at once."""
    while first < end:
        stop = first + 1
        while stop < end and table.offsets[stop + 1] - table.offsets[first] <= _GROUP_BYTES:
            stop += 1
        yield first, stop
        first = stop


def _finish(group: list[Future[None]], where: str) -> None:
    """Wait for all of `group`, and raise what the first met."""
    for future in group:
        result_of(future, where)
