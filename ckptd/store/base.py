"""The store contract: objects under names, and nothing else.

A *key* is a relative POSIX path: segments of ``[A-Za-z0-9._=+@,%-]`` joined by ``/``, no empty,
``.`` or ``..`` segment, at most 255 bytes a segment and 512 in all. Stores are thread-safe: callers
bring the threads. Every call either returns after its effect, or raises one of the errors below; a
call never returns a short result.

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
    Will not heal by itself. Kind ``root-gone``: see `Store.anchor`.
`TransientStoreError`
    May heal: time-out, throttling, 5xx, connection reset.
`RefusedError` (kind ``no-create-only``)
    A create-only put on a store that cannot decide a race (``capabilities.create_only`` is False).
`UsageError` (kinds ``bad-key``, ``size``, ``closed``)
    The key breaks the rule above (checked before the store is touched); a writer got more or fewer
    bytes than announced; a writer is used after `Writer.commit` or `Writer.abort`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from ckptd.errors import NotFoundError, StoreError, UsageError
from ckptd.store.buffers import as_bytes_view
from ckptd.store.osio import open_plain
from ckptd.types import ByteRange

if TYPE_CHECKING:
    from ckptd.store.spec import StoreSpec

__all__ = [
    "Capabilities",
    "Names",
    "ObjectInfo",
    "OpenFile",
    "Store",
    "Watchable",
    "Writer",
    "check_key",
    "check_prefix",
    "children_of",
    "is_segment",
    "root_gone",
]

_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,%-]{1,255}")
MAX_KEY_BYTES = 512
"""Longest key in bytes; half of what S3 allows, so that a store's prefix has room."""
Names = list[str]
"""A list of names; inside `Store`, ``list`` is a method."""


def root_gone(where: str) -> StoreError:
    """Return the error for a folder that was a root and is none any more."""
    return StoreError(
        "the root is gone: this folder is no root any more",
        kind="root-gone",
        where=where,
        hint="it was renamed, deleted or unmounted: bring it back, and the next save goes on",
    )


def is_segment(name: str) -> bool:
    """Tell whether `name` may be one segment of a key; other names in a store are not objects."""
    return name not in (".", "..") and _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` when it is legal, raise `UsageError` otherwise (stops ``../`` at the door)."""
    parts = key.split("/")
    if len(key) > MAX_KEY_BYTES or not all(is_segment(p) for p in parts):
        raise UsageError(
            "not a legal object name",
            kind="bad-key",
            where=key[:200],
            wanted="segments of letters, digits and ._=+@,%- joined by /",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` when it is "" or a legal key and "/", raise `UsageError` otherwise."""
    if prefix and not prefix.endswith("/"):
        raise UsageError(
            "a prefix names a folder", kind="bad-key", where=prefix[:200], wanted='"" or "folder/"'
        )
    if prefix:
        check_key(prefix[:-1])
    return prefix


def children_of(keys: Iterable[str], prefix: str) -> Names:
    """Return the names directly below `prefix` of objects `keys` that lie there, sorted."""
    parts = (key[len(prefix) :].partition("/") for key in keys)
    return sorted({head + slash for head, slash, _ in parts})


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


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An object's bytes behind a descriptor: byte ``x`` of the object lies at ``x + shift``.

    Attributes
    ----------
    fd
        Open for reading, with ``O_CLOEXEC``; whoever got this closes it. A regular file or a
        memory file; `os.pread` and `mmap.mmap` work.
    shift
        In bytes; negative where the object begins before the file does (its header lies
        elsewhere), and then only bytes with ``x + shift >= 0`` are there.
    """

    fd: int
    shift: int


class Writer(ABC):
    """A new object, written front to back; used by one thread at a time.

    An object that exists under the key is replaced. Buffers passed to `write` must not change
    until `commit` or `abort` has returned: a store may upload from them in the background without
    a copy. Leaving the ``with`` block without `commit` aborts. Until `commit` returns the object
    may be absent or partial; a reader learns of it only through a commit record, so no temporary
    name is needed.
    """

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append all of `data`; an error of a background upload may surface here."""

    def cut(self) -> None:
        """End the object here: fewer bytes than were announced are right then.

        For a caller that knows a bound of the size only; `commit` follows, and no `write`.

        Raises
        ------
        UsageError
            Kind ``size``: this store needs the exact size.
        """
        raise UsageError("this store needs the exact size of an object", kind="size")

    @abstractmethod
    def commit(self) -> None:
        """Return when every byte is durable (its name too, after `Store.sync` of its folder)."""

    @abstractmethod
    def abort(self) -> None:
        """Give up; remove what can be removed. Never raises; idempotent."""

    def __enter__(self) -> Self:
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
    options: dict[str, Any]
    """What `ckptd.store.open_store` needs besides the URL to open this store again: plain,
    JSON-able data. It may hold secrets, so it travels over private pipes only."""

    def describe(self) -> StoreSpec:
        """Return plain data from which another process opens the same store."""
        from ckptd.store.spec import StoreSpec

        return StoreSpec(url=self.url, options=dict(self.options))

    @abstractmethod
    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, C-contiguous) from `offset` of the object."""
        view = as_bytes_view(buffer)
        view[:] = self.get(key, ByteRange(offset, offset + len(view)))

    @abstractmethod
    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole, atomically and durably: name included, on return.

        With `create_only` exactly one writer wins; the others get `ConflictError`. A store that
        may lose its own acknowledgement reads the object back and takes equal bytes for its own
        success, so what is created must carry an id that no other writer has. Without
        `create_only` an existing object is replaced; a reader sees the old bytes or the new, never
        a mixture.
        """

    @abstractmethod
    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object of exactly `size` bytes (used for part sizes and preallocation)."""

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object."""

    def exists(self, key: str) -> bool:
        """Tell whether the object exists."""
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
    def children(self, prefix: str = "") -> Names:
        """Return names directly below the folder `prefix`, sorted; folders end in "/"."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error. Empty folders vanish too.

        Durable on return: a deleted name does not come back after a power cut. Within one call
        there is no order; callers that need one make two calls.
        """

    @abstractmethod
    def sync(self, prefix: str) -> None:
        """Make the names below folder `prefix`, and the folder's own name, durable."""

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> Names:
        """Remove leftovers of interrupted calls below `prefix` and return their names.

        Leftovers are temporary files or unfinished multipart uploads, last touched more than
        `older_than_s` seconds ago (so that a call still under way keeps its own). Not `deep`: only
        those directly below `prefix`, for a folder that others use as well.
        """
        check_prefix(prefix)
        return []

    def anchor(self, key: str) -> None:
        """Make no folder here from now on while the object `key` is not there.

        A store that keeps plain files would make a folder anew that was renamed or deleted, and
        fill the disk under the mount point of one that was unmounted: then it raises `StoreError`
        (kind ``root-gone``). Stores without folders have nothing to do.
        """
        check_key(key)

    def local_path(self, key: str) -> Path | None:
        """Return the file behind `key` where the store keeps plain files, else None."""
        check_key(key)
        return None

    def open_file(self, key: str) -> OpenFile | None:
        """Open the object for reading without copies, or return None where that cannot be.

        The descriptor shows the object as it is now; one that is deleted later stays readable.
        Errors are those of `get`.
        """
        path = self.local_path(key)
        return None if path is None else OpenFile(open_plain(str(path)), 0)

    def close(self) -> None:
        """Release connections and threads. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@runtime_checkable
class Watchable(Protocol):
    """A store that can report the steps inside its calls, for fault campaigns."""

    def watch(self, hook: Callable[[str, str], None]) -> None:
        """Call ``hook(point, name)`` before each inner step from now on.

        `point` is a stable name such as ``os.link``; what the hook raises fails that step.
        """
