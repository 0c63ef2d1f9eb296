"""`Retry`: tries again what may heal."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptd.errors import (
    CkptdError,
    ConflictError,
    NotFoundError,
    TransientStoreError,
    UsageError,
)
from ckptd.store.base import Names, ObjectInfo, Store, Writer
from ckptd.store.spec import RetrySpec
from ckptd.store.wrap import Wrapper
from ckptd.types import ByteRange

__all__ = ["Backoff", "Retry"]

_T = TypeVar("_T")


class Backoff:
    """The waits between tries of one call: exponential, with full jitter, up to a deadline."""

    def __init__(self, spec: RetrySpec) -> None:
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


class Retry(Wrapper):
    """Repeats a call after a `TransientStoreError`, until it succeeds or the deadline passes.

    A create-only put is repeated safely: when a repeated one finds the key taken, the object is
    read back, and equal bytes are our own earlier success (records carry a unique write id). A
    writer is repeated whole, from the buffers that it was given; they must not change anyway.
    """

    spec: RetrySpec

    def __init__(self, inner: Store, spec: RetrySpec | None = None) -> None:
        super().__init__(inner, spec or RetrySpec())

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
                if backoff.tries > 1 and self._holds(key, data):
                    return None
                raise

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except NotFoundError:
            return False

    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object."""
        return _RetryWriter(self, key, size)

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object."""
        return self._retry(lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """Tell whether the object exists."""
        return self._retry(lambda: self.inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
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

    def children(self, prefix: str = "") -> Names:
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
    ) -> Names:
        """Remove leftovers."""
        return self._retry(lambda: self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep))


class _RetryWriter(Writer):
    """Keeps the buffers (not copies) to write them again into a new writer."""

    def __init__(self, store: Retry, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._given: list[memoryview] = []
        self._inner: Writer | None = None
        self._done = False
        self._is_cut = False
        self._attempt(lambda writer: None)

    def _attempt(self, act: Callable[[Writer], None]) -> None:
        """Do `act` on a writer that has every buffer given so far."""
        if self._done:
            raise UsageError("the writer is done", kind="closed", where=self._key)
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

    def _current(self) -> Writer:
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
