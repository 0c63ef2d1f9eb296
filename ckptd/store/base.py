"""The store contract: objects under names, and nothing else.

A *key* is a relative POSIX path: segments of ``[A-Za-z0-9._=+@,%-]`` joined by ``/``, no empty,
``.`` or ``..`` segment. Stores are thread-safe: callers bring the threads. Every call either
returns after its effect, or raises one of the errors below; a call never returns a short result.

Every implementation passes `ckptd.testing.store.StoreContract`.

Errors of every method
----------------------
`NotFoundError`
    The key does not exist.
`ConflictError` (kind ``exists``)
    A create-only put found the key taken by *another* writer. A store that may lose its own
    acknowledgement (S3, NFS) resolves that before raising.
`CorruptError` (kind ``truncated``)
    The object is shorter than the range that was asked for.
`StoreError` (kinds ``no-space``, ``permission``, ``store``)
    Will not heal by itself.
`TransientStoreError`
    May heal: time-out, throttling, 5xx, connection reset.
`UsageError` (kind ``bad-key``)
    The key breaks the rule above; checked before the store is touched.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ckptd.errors import UsageError
from ckptd.types import ByteRange

__all__ = ["Capabilities", "ObjectInfo", "Store", "Writer", "check_key"]

_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,%-]{1,255}")
MAX_KEY_BYTES = 1024


def check_key(key: str) -> str:
    """Return `key` when it is legal, raise `UsageError` otherwise (stops ``../`` at the door)."""
    parts = key.split("/")
    if len(key) > MAX_KEY_BYTES or any(
        p in (".", "..") or not _SEGMENT.fullmatch(p) for p in parts
    ):
        raise UsageError(
            "not a legal object name",
            kind="bad-key",
            where=key[:200],
            wanted="segments of letters, digits and ._=+@,%- joined by /",
        )
    return key


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store promises.

    Attributes
    ----------
    create_only
        ``put(create_only=True)`` has exactly one winner, also between hosts.
    consistent_list
        A listing shows every put that returned before it began.
    durable
        What was put survives a power cut.
    local_files
        `Store.local_path` gives real files, which may be memory-mapped.
    shared
        Another process that opens the same URL sees the same objects.
    parallel
        Number of concurrent calls that is worth making.
    block_bytes
        Size of one write or ranged read that is worth making, in bytes.
    """

    create_only: bool
    consistent_list: bool
    durable: bool
    local_files: bool
    shared: bool
    parallel: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: its key, its size in bytes, and when it was last written (seconds since 1970)."""

    key: str
    size: int
    modified: float


class Writer(ABC):
    """A new object, written front to back.

    Buffers passed to `write` must not change until `commit` or `abort` has returned: a store may
    upload from them in the background without a copy. Leaving the ``with`` block without
    `commit` aborts. Until `commit` returns the object may be absent or partial; a reader learns
    of it only through a commit record, so no temporary name is needed.
    """

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append all of `data`."""

    @abstractmethod
    def commit(self) -> None:
        """Return when every byte is durable (its name too, after `Store.sync` of its folder)."""

    @abstractmethod
    def abort(self) -> None:
        """Give up; remove what can be removed. Never raises; idempotent."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


class Store(ABC):
    """Keeps objects under names. See the module docstring for the rules."""

    url: str
    capabilities: Capabilities

    @abstractmethod
    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, C-contiguous bytes) from `offset` of the object."""
        buffer[:] = self.get(key, ByteRange(offset, offset + len(buffer)))

    @abstractmethod
    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole, atomically and durably: name included, on return.

        With `create_only` exactly one writer wins; the others get `ConflictError`. Without, an
        existing object is replaced; a reader sees the old bytes or the new, never a mixture.
        """

    @abstractmethod
    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object of exactly `size` bytes (used for part sizes and preallocation)."""

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object."""

    def exists(self, key: str) -> bool:
        """Tell whether the object exists."""
        from ckptd.errors import NotFoundError

        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix` ("" or ending in "/"), in key order.

        Leftovers of interrupted puts are not objects and are not listed.
        """

    @abstractmethod
    def children(self, prefix: str = "") -> list[str]:
        """Return names directly below the folder `prefix`, sorted; folders end in "/"."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error. Empty folders vanish too."""

    @abstractmethod
    def sync(self, prefix: str) -> None:
        """Make the names below folder `prefix`, and the folder's own name, durable."""

    def local_path(self, key: str) -> Path | None:
        """Return the file behind `key` where the store keeps plain files, else None."""
        return None

    def close(self) -> None:
        """Release connections and threads. Idempotent."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
