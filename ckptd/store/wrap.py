"""Stores around stores: the base of all wrappers, and the way from a description to a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptd.store.base import Names, ObjectInfo, OpenFile, Store, Writer
from ckptd.store.spec import (
    FaultSpec,
    MeterSpec,
    PackSpec,
    RetrySpec,
    StoreSpec,
    ThrottleSpec,
    WrapperSpec,
)
from ckptd.types import ByteRange

__all__ = ["Wrapper", "innermost", "wrap"]


class Wrapper(Store):
    """Passes every call on to `inner`; subclasses change what they care for.

    `Store.local_path` and `Store.open_file` are passed on too: what is read through a descriptor or
    a memory map bypasses every wrapper.
    """

    spec: WrapperSpec

    def __init__(self, inner: Store, spec: WrapperSpec) -> None:
        self.inner = inner
        self.spec = spec
        self.url = inner.url
        self.options = inner.options
        self.capabilities = inner.capabilities

    def describe(self) -> StoreSpec:
        """Return plain data from which another process opens the same store, wrappers included."""
        return self.inner.describe().wrapped(self.spec)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Pass on."""
        return self.inner.get(key, byte_range)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Pass on."""
        self.inner.read_into(key, offset, buffer)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Pass on."""
        self.inner.put(key, data, create_only=create_only)

    def writer(self, key: str, size: int) -> Writer:
        """Pass on."""
        return self.inner.writer(key, size)

    def stat(self, key: str) -> ObjectInfo:
        """Pass on."""
        return self.inner.stat(key)

    def exists(self, key: str) -> bool:
        """Pass on."""
        return self.inner.exists(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        return self.inner.list(prefix)

    def children(self, prefix: str = "") -> Names:
        """Pass on."""
        return self.inner.children(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Pass on."""
        self.inner.delete(keys)

    def sync(self, prefix: str) -> None:
        """Pass on."""
        self.inner.sync(prefix)

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> Names:
        """Pass on."""
        return self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep)

    def anchor(self, key: str) -> None:
        """Pass on."""
        self.inner.anchor(key)

    def local_path(self, key: str) -> Path | None:
        """Pass on."""
        return self.inner.local_path(key)

    def open_file(self, key: str) -> OpenFile | None:
        """Pass on."""
        return self.inner.open_file(key)

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


def innermost(store: Store) -> Store:
    """Return the store inside all wrappers."""
    while isinstance(store, Wrapper):
        store = store.inner
    return store


def wrap(store: Store, spec: WrapperSpec) -> Store:
    """Return `store` inside the wrapper that `spec` describes."""
    match spec:
        case RetrySpec():
            from ckptd.store.retry import Retry

            return Retry(store, spec)
        case ThrottleSpec():
            from ckptd.store.throttle import Throttle

            return Throttle(store, spec)
        case MeterSpec():
            from ckptd.store.meter import Meter

            return Meter(store, spec)
        case FaultSpec():
            from ckptd.store.fault import Fault

            return Fault(store, spec)
        case PackSpec():
            from ckptd.store.pack import Pack

            return Pack(store, spec)
