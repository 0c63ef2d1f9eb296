"""`Throttle`: bounds the bytes per second, so that a save leaves room for the job's own traffic."""

from __future__ import annotations

import threading
import time

from ckptd.errors import UsageError
from ckptd.store.base import Store, Writer
from ckptd.store.buffers import as_bytes_view
from ckptd.store.spec import ThrottleSpec
from ckptd.store.wrap import Wrapper
from ckptd.types import ByteRange

__all__ = ["Throttle", "TokenBucket"]

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


class Throttle(Wrapper):
    """Bounds reads and writes, each by a rate of its own, over all threads of this store."""

    spec: ThrottleSpec

    def __init__(self, inner: Store, spec: ThrottleSpec) -> None:
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

    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object whose writes keep to the rate."""
        inner = self.inner.writer(key, size)
        return inner if self._writes is None else _ThrottledWriter(inner, self._writes)


class _ThrottledWriter(Writer):
    def __init__(self, inner: Writer, bucket: TokenBucket) -> None:
        self._inner = inner
        self._bucket = bucket

    def write(self, data: memoryview) -> None:
        """Append `data` in pieces, so that the rate is even and not in bursts."""
        view = as_bytes_view(data)
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
        raise UsageError("a rate is above zero", kind="bad-option", found=rate)
    return TokenBucket(rate)
