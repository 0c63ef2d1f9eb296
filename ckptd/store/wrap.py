"""Wrappers of stores: `Retry` and its pauses, `Throttle` of bytes a second, `Meter`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from ckptd.errors import CkptdError, ConflictError, TransientStoreError, UsageError
from ckptd.store import base
from ckptd.types import ByteRange

_T = TypeVar("_T")


class Backoff:
    """The waits between tries of one call: exponential, with full jitter, up to a deadline."""

    def __init__(self, spec: base.RetrySpec) -> None:
        self._spec = spec
        self._longest = spec.first_s
        self._deadline: float | None = None
        self.tries = 1

    def wait(self, error: TransientStoreError) -> None:
        """Wait before the next try, or raise `error` when that would begin past the deadline."""
        # Full jitter: many ranks fail at the same moment, and must not return at the same moment.
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._spec.deadline_s
        pause = random.uniform(0.0, self._longest)
        if now + pause > self._deadline:
            error.add_note(f"given up after {self.tries} tries in {self._spec.deadline_s:g} s")
            raise error
        time.sleep(pause)
        self.tries += 1
        self._longest = min(self._longest * self._spec.factor, self._spec.longest_s)


class Retry(base.Wrapper):
    """Repeats a call after a `TransientStoreError`, until it succeeds or the deadline passes.

    A create-only put is repeated safely: when a repeated one finds the key taken, the object is
    read back, and equal bytes are our own earlier success (records carry a unique write id). A
    writer is repeated whole, from the buffers that it was given; they must not change anyway.
    """

    spec: base.RetrySpec

    def __init__(self, inner: base.Store, spec: base.RetrySpec | None = None) -> None:
        super().__init__(inner, spec or base.RetrySpec())

    def _retry(self, act: Callable[[], _T]) -> _T:
        backoff = Backoff(self.spec)
        while True:
            try:
                return act()
            except TransientStoreError as error:
                backoff.wait(error)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        return self._retry(lambda: self.inner.get(key, byte_range))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object."""
        self._retry(lambda: self.inner.read_into(key, offset, buffer))

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole."""
        backoff = Backoff(self.spec)
        while True:
            try:
                return self.inner.put(key, data, create_only=create_only)
            except TransientStoreError as error:
                backoff.wait(error)
            except ConflictError:
                if backoff.tries > 1 and base.holds(self, key, data):
                    return None
                raise

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Write small new objects of one folder."""
        self._retry(lambda: self.inner.put_together(objects))

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object."""
        return _RetryWriter(self, key, size)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        return self._retry(lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """Tell whether the object exists."""
        return self._retry(lambda: self.inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`; after a failure goes on behind the last one given."""
        last = ""
        backoff = Backoff(self.spec)
        while True:
            try:
                for info in self.inner.list(prefix):
                    if info.key > last:
                        last = info.key
                        backoff = Backoff(self.spec)
                        yield info
                return
            except TransientStoreError as error:
                backoff.wait(error)

    def children(self, prefix: str = "") -> base.Names:
        """Return names directly below `prefix`."""
        return self._retry(lambda: self.inner.children(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        found = [*keys]
        self._retry(lambda: self.inner.delete(found))

    def sync(self, prefix: str) -> None:
        """Make the names below `prefix` durable."""
        self._retry(lambda: self.inner.sync(prefix))

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> base.Names:
        """Remove leftovers."""
        return self._retry(lambda: self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep))


class _RetryWriter(base.Writer):
    """Keeps the buffers (not copies) to write them again into a new writer."""

    def __init__(self, store: Retry, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._given: list[memoryview] = []
        self._inner: base.Writer | None = None
        self._done = False
        self._is_cut = False
        self._attempt(lambda writer: None)

    def _attempt(self, act: Callable[[base.Writer], None]) -> None:
        """Do `act` on a writer that has every buffer given so far."""
        if self._done:
            raise UsageError("the writer has finished", kind="closed", where=self._key)
        backoff = Backoff(self._store.spec)
        while True:
            try:
                return act(self._current())
            except TransientStoreError as error:
                self._discard()
                try:
                    backoff.wait(error)
                except TransientStoreError:
                    self._done = True
                    raise
            except CkptdError:
                self.abort()
                raise

    def _current(self) -> base.Writer:
        if self._inner is None:
            self._inner = self._store.inner.writer(self._key, self._size)
            for data in self._given:
                self._inner.write(data)
            if self._is_cut:
                self._inner.cut()
        return self._inner

    def _discard(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.abort()

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        self._attempt(lambda writer: writer.write(data))
        self._given.append(data)

    def cut(self) -> None:
        """End the object at what was written."""
        self._attempt(lambda writer: writer.cut())
        self._is_cut = True

    def commit(self) -> None:
        """Return when every byte is durable."""
        self._attempt(lambda writer: writer.commit())
        self._done = True
        self._given.clear()

    def abort(self) -> None:
        """Give up; remove what can be removed."""
        if not self._done:
            self._done = True
            self._given.clear()
        self._discard()


_BURST_S = 0.25
_PIECE_BYTES = 1 << 20  # a multiple of every block size: splitting must not cost alignment


class TokenBucket:
    """Lets `rate` bytes per second pass; callers that come too early wait their turn.

    Debt is allowed, so a call larger than the bucket passes at once and later ones pay for it:
    the average holds, and no call waits for a bucket that can never get full enough.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Return when `count` bytes may pass."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._rate
            pause = self._free_at - count / self._rate - now
        if pause > 0:
            time.sleep(pause)


class Throttle(base.Wrapper):
    """Bounds reads and writes, each by a rate of its own, over all threads of this store."""

    spec: base.ThrottleSpec

    def __init__(self, inner: base.Store, spec: base.ThrottleSpec) -> None:
        super().__init__(inner, spec)
        self._writes = _bucket(spec.write_bytes_per_s)
        self._reads = _bucket(spec.read_bytes_per_s)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the object or `byte_range` of it, at the rate."""
        data = self.inner.get(key, byte_range)
        if self._reads is not None:
            self._reads.take(len(data))  # afterwards: only now is the size known
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, at the rate."""
        if self._reads is not None:
            self._reads.take(buffer.nbytes)
        self.inner.read_into(key, offset, buffer)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object, at the rate."""
        if self._writes is not None:
            self._writes.take(len(data))
        self.inner.put(key, data, create_only=create_only)

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object whose writes keep to the rate."""
        inner = self.inner.writer(key, size)
        return inner if self._writes is None else _ThrottledWriter(inner, self._writes)


class _ThrottledWriter(base.Writer):
    def __init__(self, inner: base.Writer, bucket: TokenBucket) -> None:
        self._inner = inner
        self._bucket = bucket

    def write(self, data: memoryview) -> None:
        """Append `data` in pieces, so that the rate is even and not in bursts."""
        view = base.as_bytes_view(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._bucket.take(len(piece))
            self._inner.write(piece)

    def cut(self) -> None:
        """Pass on."""
        self._inner.cut()

    def commit(self) -> None:
        """Pass on."""
        self._inner.commit()

    def abort(self) -> None:
        """Pass on."""
        self._inner.abort()


def _bucket(rate: float | None) -> TokenBucket | None:
    if rate is None:
        return None
    if not rate > 0:
        raise UsageError("a rate must be above zero", found=rate)
    return TokenBucket(rate)


class OperationMeter(msgspec.Struct):
    """The work of one operation so far.

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


class Meter(base.Wrapper):
    """Counts what passes through; `snapshot` gives the numbers."""

    def __init__(self, inner: base.Store, spec: base.MeterSpec | None = None) -> None:
        super().__init__(inner, spec or base.MeterSpec())
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

    def writer(self, key: str, size: int) -> base.Writer:
        """Pass on and count; writes and the commit count too."""
        return _MeteredWriter(self, self.timed("writer", lambda: self.inner.writer(key, size)))

    def stat(self, key: str) -> base.ObjectInfo:
        """Pass on and count."""
        return self.timed("stat", lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """Pass on and count as ``stat``; an object that is not there is no error."""
        return self.timed("stat", lambda: self.inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Pass on and count; the listing is read whole, so that its time is measured."""
        return iter(self.timed("list", lambda: [*self.inner.list(prefix)]))

    def children(self, prefix: str = "") -> base.Names:
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
    ) -> base.Names:
        """Pass on and count."""
        return self.timed(
            "sweep", lambda: self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep)
        )


class _MeteredWriter(base.Writer):
    def __init__(self, meter: Meter, inner: base.Writer) -> None:
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
