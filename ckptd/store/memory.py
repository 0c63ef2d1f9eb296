"""`MemoryStore`: objects in this process (``memory://``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ckptd.errors import ConflictError, NotFoundError, StoreError, UsageError
from ckptd.store import base
from ckptd.types import ByteRange


class MemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``memory://``: none."""


class _Space:
    """The objects of one name: key to (bytes, time of writing)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes | bytearray, float]] = {}


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


def open_memory(url: str, options: dict[str, Any]) -> MemoryStore:
    """Open ``memory://name``."""
    base.parse_options(url, options, MemoryOptions)
    return MemoryStore(url.partition("://")[2])


def forget_memory(name: str) -> None:
    """Drop every object of ``memory://name``; stores that are open keep what they have."""
    with _spaces_lock:
        _spaces.pop(name.strip("/"), None)


class MemoryStore(base.Store):
    """Objects in the memory of this process, shared by all that open the same name.

    Parameters
    ----------
    name
        Objects of one name are one store; they live until `forget_memory` or the process's end.
    """

    capabilities = base.Capabilities(
        create_only=True,
        consistent_list=True,
        durable=False,
        local_files=False,
        shared=False,
        parallel=4,
        block_bytes=8 << 20,
    )

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        if not name:
            raise UsageError("a memory store needs a name", wanted="memory://name", found=name)
        self.url = f"memory://{name}"
        self.options: dict[str, Any] = {}
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space())

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        data = self._find(key)[0]
        if byte_range is None:
            return bytes(data)
        return bytes(self._cut(key, data, byte_range.start, byte_range.end))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object."""
        view = base.as_bytes_view(buffer)
        view[:] = self._cut(key, self._find(key)[0], offset, offset + len(view))

    def _find(self, key: str) -> tuple[bytes | bytearray, float]:
        base.check_key(key)
        with self._space.lock:
            found = self._space.objects.get(key)
        if found is None:
            raise NotFoundError("no such object", where=f"{self.url}/{key}")
        return found

    def _cut(self, key: str, data: bytes | bytearray, start: int, end: int) -> memoryview:
        base.check_end(f"{self.url}/{key}", end, len(data))
        return memoryview(data)[start:end]

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Keep a copy of `data`."""
        self._store(base.check_key(key), bytes(data), create_only)

    def _store(self, key: str, data: bytes | bytearray, create_only: bool) -> None:
        with self._space.lock:
            if create_only and key in self._space.objects:
                raise ConflictError(
                    "the object exists already", kind="exists", where=f"{self.url}/{key}"
                )
            self._space.objects[key] = (data, time.time())

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin an object of exactly `size` bytes; it appears with `Writer.commit`."""
        return _MemoryWriter(self, base.check_key(key), size)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        data, modified = self._find(key)
        return base.ObjectInfo(key, len(data), modified)

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order."""
        base.check_prefix(prefix)
        with self._space.lock:
            found = sorted((k, v) for k, v in self._space.objects.items() if k.startswith(prefix))
        for key, (data, modified) in found:
            yield base.ObjectInfo(key, len(data), modified)

    def children(self, prefix: str = "") -> base.Names:
        """Return names directly below `prefix`, sorted."""
        with self._space.lock:
            return base.children_of(self._space.objects, base.check_prefix(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        checked = [base.check_key(k) for k in keys]
        with self._space.lock:
            for key in checked:
                self._space.objects.pop(key, None)

    def sync(self, prefix: str) -> None:
        """Do nothing: memory has no durability to wait for."""
        base.check_prefix(prefix)


class _MemoryWriter(base.SizedWriter):
    def __init__(self, store: MemoryStore, key: str, size: int) -> None:
        super().__init__(key, size)
        self._store = store
        try:
            self._data = bytearray(size)
        except MemoryError:
            raise StoreError(
                "no memory left", kind="no-space", where=key, wanted=f"{size} bytes"
            ) from None

    def _append(self, view: memoryview) -> None:
        self._data[self.written : self.written + len(view)] = view

    def _shorten(self) -> None:
        del self._data[self.size :]

    def _finish(self) -> None:
        self._store._store(self.key, self._data, create_only=False)

    def _drop(self) -> None:
        self._data = bytearray()
