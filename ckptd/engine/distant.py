"""A store of another node that is connected to when something is wanted of it.

A job of thousands of nodes has as many agents. A rank needs a few files, which a few of them hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.store.base import (
    Capabilities,
    Names,
    ObjectInfo,
    OpenFile,
    Store,
    check_prefix,
)
from ckptd.store.readonly import ReadOnlyStore
from ckptd.types import ByteRange

__all__ = ["Distant"]

_SERVED = Capabilities(
    create_only=False,
    consistent_list=True,
    durable=False,
    local_files=False,
    shared=True,
    parallel=4,
    block_bytes=8 << 20,
)
"""Of what agents serve: known before anybody is asked."""


class Distant(ReadOnlyStore):
    """Read-only view of another node's store, connected to when it is first asked. Thread-safe.

    Parameters
    ----------
    url
        Where it is.
    open_store
        Opens it.
    """

    def __init__(self, url: str, open_store: Callable[[], Store]) -> None:
        self.url = url
        self.options = {}
        self.capabilities = _SERVED
        self._open_store = open_store
        self._lock = threading.Lock()
        self._store: Store | None = None

    def _opened(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Pass on."""
        return self._opened().get(key, byte_range)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Pass on."""
        self._opened().read_into(key, offset, buffer)

    def stat(self, key: str) -> ObjectInfo:
        """Pass on."""
        return self._opened().stat(key)

    def open_file(self, key: str) -> OpenFile | None:
        """Pass on."""
        return self._opened().open_file(key)

    def local_path(self, key: str) -> Path | None:
        """Pass on."""
        return self._opened().local_path(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        return self._opened().list(check_prefix(prefix))

    def children(self, prefix: str = "") -> Names:
        """Pass on."""
        return self._opened().children(check_prefix(prefix))

    def close(self) -> None:
        """Close it, if it was opened. Idempotent."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()
