"""`Meter`: counts calls, bytes, seconds and errors of each operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from ckptd.store.base import Names, ObjectInfo, Store, Writer
from ckptd.store.spec import MeterSpec
from ckptd.store.wrap import Wrapper
from ckptd.types import ByteRange

__all__ = ["Meter", "OperationMeter"]

_T = TypeVar("_T")


class OperationMeter(msgspec.Struct):
    """What one operation did so far.

    Attributes
    ----------
    calls, errors
        Number of calls, and how many of them raised.
    moved_bytes
        Bytes read or written by calls that succeeded.
    seconds
        Time inside the calls, summed over threads.
    """

    calls: int = 0
    errors: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0


class Meter(Wrapper):
    """Counts what passes through; `snapshot` gives the numbers."""

    def __init__(self, inner: Store, spec: MeterSpec | None = None) -> None:
        super().__init__(inner, spec or MeterSpec())
        self._lock = threading.Lock()
        self._meters: dict[str, OperationMeter] = {}

    def snapshot(self) -> dict[str, OperationMeter]:
        """Return a copy of the numbers by operation: plain data, encodable by msgspec."""
        with self._lock:
            return {op: msgspec.structs.replace(m) for op, m in self._meters.items()}

    def timed(self, op: str, act: Callable[[], _T], size: int | None = None) -> _T:
        """Do `act` and count it; `size` is the bytes it moves, by default its result's length."""
        start = time.monotonic()
        try:
            result = act()
        except BaseException:
            self._count(op, time.monotonic() - start, 0, errors=1)
            raise
        moved = len(result) if size is None and isinstance(result, bytes) else size or 0
        self._count(op, time.monotonic() - start, moved, errors=0)
        return result

    def _count(self, op: str, seconds: float, moved: int, errors: int) -> None:
        with self._lock:
            meter = self._meters.setdefault(op, OperationMeter())
            meter.calls += 1
            meter.errors += errors
            meter.moved_bytes += moved
            meter.seconds += seconds

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Pass on and count."""
        return self.timed("get", lambda: self.inner.get(key, byte_range))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Pass on and count."""
        size = buffer.nbytes
        self.timed("read_into", lambda: self.inner.read_into(key, offset, buffer), size)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Pass on and count."""
        self.timed("put", lambda: self.inner.put(key, data, create_only=create_only), len(data))

    def writer(self, key: str, size: int) -> Writer:
        """Pass on and count; writes and the commit count too."""
        return _MeteredWriter(self, self.timed("writer", lambda: self.inner.writer(key, size)))

    def stat(self, key: str) -> ObjectInfo:
        """Pass on and count."""
        return self.timed("stat", lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """Pass on and count as ``stat``; an object that is not there is no error."""
        return self.timed("stat", lambda: self.inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Pass on and count; the listing is read whole, so that its time can be told."""
        return iter(self.timed("list", lambda: [*self.inner.list(prefix)]))

    def children(self, prefix: str = "") -> Names:
        """Pass on and count."""
        return self.timed("children", lambda: self.inner.children(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Pass on and count."""
        found = [*keys]
        self.timed("delete", lambda: self.inner.delete(found))

    def sync(self, prefix: str) -> None:
        """Pass on and count."""
        self.timed("sync", lambda: self.inner.sync(prefix))

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> Names:
        """Pass on and count."""
        return self.timed(
            "sweep", lambda: self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep)
        )


class _MeteredWriter(Writer):
    def __init__(self, meter: Meter, inner: Writer) -> None:
        self._meter = meter
        self._inner = inner

    def write(self, data: memoryview) -> None:
        """Pass on and count."""
        self._meter.timed("write", lambda: self._inner.write(data), data.nbytes)

    def cut(self) -> None:
        """Pass on."""
        self._inner.cut()

    def commit(self) -> None:
        """Pass on and count."""
        self._meter.timed("commit", self._inner.commit)

    def abort(self) -> None:
        """Pass on."""
        self._inner.abort()
