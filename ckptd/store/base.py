"""`Store`: the contract; keys and limits, specs of wrappers and their defaults, schemes of URLs.

In it: retry defaults; faults; plugins of stores; secrets hidden in texts; largest whole object.

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

import contextlib
import importlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from ckptd.decoding import converter, json_decoder
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError, UsageError
from ckptd.plugins import entries, origin
from ckptd.store.osio import open_plain
from ckptd.types import ByteRange

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9._=+@,%-]{1,255}"
_SEGMENT, _KEY = re.compile(_NAME), re.compile(f"{_NAME}(?:/{_NAME})*")
MOST_WHOLE_BYTES = 1 << 30
"""Of an object that is got whole, over a network: these are records and manifests."""
MAX_KEY_BYTES = 512
"""Longest key in bytes; half of what S3 allows, so that a store's prefix has room."""
_READERS = 16
Names = list[str]
"""A list of names; inside `Store`, ``list`` is a method."""


def root_gone(where: str) -> StoreError:
    """Return the error for a folder that was a root and is none any more."""
    return StoreError(
        "the root is gone: this folder is no longer a root",
        kind="root-gone",
        where=where,
        hint="it was renamed, deleted or unmounted: restore it, and the next save continues",
    )


def is_segment(name: str) -> bool:
    """Tell whether `name` may be one segment of a key; other names in a store are not objects."""
    return _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` when it is legal, raise `UsageError` otherwise (stops ``../`` at the door)."""
    if len(key) > MAX_KEY_BYTES or _KEY.fullmatch(key) is None:
        raise UsageError(
            "invalid object name",
            kind="bad-key",
            where=key[:200],
            wanted="segments of letters, digits and ._=+@,%- joined by /",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` when it is "" or a legal key and "/", raise `UsageError` otherwise."""
    if prefix and not prefix.endswith("/"):
        raise UsageError(
            "invalid prefix", kind="bad-key", where=prefix[:200], wanted='"" or "folder/"'
        )
    if prefix:
        check_key(prefix[:-1])
    return prefix


def children_of(keys: Iterable[str], prefix: str) -> Names:
    """Return the names directly below `prefix` of those objects `keys` that lie there, sorted."""
    start = len(prefix)
    return sorted({k[start : k.find("/", start) + 1 or None] for k in keys if k.startswith(prefix)})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of a store.

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
    """One object.

    Attributes
    ----------
    key, size
        Its name, and its length in bytes.
    modified
        When it was last written, in seconds since 1970.
    tag
        Changes when the object is written again, also within the clock's step and with the time
        kept: an ETag, an inode. Only `Store.stat` need give it; empty where the store has none.
    """

    key: str
    size: int
    modified: float
    tag: str = ""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An object's bytes behind a descriptor: byte ``x`` of the object lies at ``x + shift``.

    Attributes
    ----------
    fd
        Open for reading, with ``O_CLOEXEC``; the caller closes it. A regular file or a
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
        """Return when every byte is durable; its name too, after a `Store.sync` or `Store.put`.

        That is one of its folder, or into it.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up; remove what can be removed. Never raises; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class Store(ABC):
    """Keeps objects under names. See the module docstring for the rules."""

    url: str
    capabilities: Capabilities
    options: dict[str, Any]
    """Options with which `ckptd.store.open_store` opens this store again from its URL: plain,
    JSON-able data. They may hold secrets, so they travel over private pipes only."""

    def describe(self) -> StoreSpec:
        """Return plain data from which another process opens the same store."""
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

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Write small new objects of one folder: durable on return, and their names.

        Before that any of them may be absent or partial, also after an error; a reader learns of
        them only by what is put later. One that exists is replaced.
        """
        *most, (last, raw) = objects.items()
        for key, data in most:
            with self.writer(key, len(data)) as writer:
                writer.write(memoryview(data))
                writer.commit()
        self.put(last, raw)

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

    def check_unchanged(self) -> None:
        """Look again at the files of other programs that this store's objects were made from.

        Without effect where a store keeps objects as they were written: those are never changed.

        Raises
        ------
        CorruptError
            kind ``replaced`` among others.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix` ("" or ending in "/"), in key order.

        Leftovers of interrupted puts are not objects and are not listed.
        """

    def last(self, prefix: str = "") -> ObjectInfo | None:
        """Return the last object of `list`, None if there is none; with less work where it can."""
        found = None
        for info in self.list(prefix):
            found = info
        return found

    def read_all(
        self, prefix: str = "", *, most_bytes: int
    ) -> Iterator[tuple[ObjectInfo, bytes | None]]:
        """Yield every object below `prefix`, in key order, with its bytes; for many small ones.

        None in place of the bytes where there are more than `most_bytes`, and where the object was
        deleted meanwhile. A store that has bytes in its listings asks for nothing twice.
        """

        def read(info: ObjectInfo) -> tuple[ObjectInfo, bytes | None]:
            try:
                return info, self.get(info.key) if info.size <= most_bytes else None
            except NotFoundError:
                return info, None

        infos = [*self.list(prefix)]
        # One after the other, thousands of a bucket's would take minutes.
        with ThreadPoolExecutor(min(self.capabilities.parallel, _READERS), "ckptd-read") as pool:
            yield from pool.map(read, infos)

    def children(self, prefix: str = "") -> Names:
        """Return names directly below the folder `prefix`, sorted; folders end in "/".

        A store that need not list all that is below them for it does it better.
        """
        return children_of((info.key for info in self.list(prefix)), prefix)

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

        A store that keeps plain files would make a folder again that was renamed or deleted, and
        fill the disk under the mount point of one that was unmounted: then it raises `StoreError`
        (kind ``root-gone``). Stores without folders have nothing to do.
        """
        check_key(key)

    def fleeting(self, prefix: str) -> None:
        """Allow puts and deletes directly below `prefix` to be volatile, where that saves time.

        For what serves only processes that live. A power cut may then undo the call, or leave an
        object that is empty or begins with a zero byte; it must not, where a process of another
        machine may go on.
        """
        check_prefix(prefix)

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

    def __exit__(self, *_: object) -> None:
        self.close()


@runtime_checkable
class Watchable(Protocol):
    """A store that can report the steps inside its calls, for fault campaigns."""

    def watch(self, hook: Callable[[str, str], None]) -> None:
        """Call ``hook(point, name)`` before each inner step from now on.

        `point` is a stable name such as ``os.link``; what the hook raises fails that step.
        """


def as_bytes_view(data: memoryview) -> memoryview:
    """Return `data` as flat bytes without a copy; `UsageError` when it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise UsageError("a buffer must be C-contiguous")
    return view.cast("B") if view.ndim != 1 or view.format != "B" else view


def check_end(where: str, end: int, size: int) -> None:
    """Raise `CorruptError` when an object of `size` bytes has no byte `end` - 1."""
    if end > size:
        raise CorruptError(
            "the object is shorter than the range asked for",
            kind="truncated",
            where=where,
            wanted=f"{end} bytes",
            found=f"{size} bytes",
        )


class SizedWriter(Writer):
    """A writer of exactly `size` bytes; stores fill in the three steps below."""

    def __init__(self, key: str, size: int) -> None:
        if size < 0:
            raise UsageError("a size must not be negative", kind="size", where=key, found=size)
        self.key = key
        self.size = size
        self.written = 0
        self._state = "open"

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        self._check_open()
        view = as_bytes_view(data)
        if self.written + len(view) > self.size:
            raise self._size_error(self.written + len(view))
        try:
            self._append(view)
        except BaseException:
            self._state = "failed"
            raise
        self.written += len(view)

    def cut(self) -> None:
        """End the object at what was written."""
        self._check_open()
        self.size = self.written
        self._shorten()

    def commit(self) -> None:
        """Return when every byte is durable."""
        self._check_open()
        if self.written != self.size:
            raise self._size_error(self.written)
        self._state = "failed"
        self._finish()
        self._state = "committed"

    def abort(self) -> None:
        """Give up; remove what can be removed."""
        if self._state in ("committed", "aborted"):
            return
        self._state = "aborted"
        # The caller is on its way out with the error that matters; a second one would hide it.
        with contextlib.suppress(CkptdError, OSError):
            self._drop()

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(
                "the writer has finished",
                kind="closed",
                where=self.key,
                found=self._state,
                hint="open a new one with Store.writer",
            )

    def _size_error(self, found: int) -> UsageError:
        return UsageError(
            "a writer takes exactly the bytes that were announced",
            kind="size",
            where=self.key,
            wanted=f"{self.size} bytes",
            found=f"{found} bytes",
        )

    @abstractmethod
    def _append(self, view: memoryview) -> None:
        """Take `view`, which fits into the announced size."""

    def _shorten(self) -> None:
        """Give up what was set aside beyond `size`, by now or in `_finish`."""

    @abstractmethod
    def _finish(self) -> None:
        """Make all bytes durable."""

    @abstractmethod
    def _drop(self) -> None:
        """Release everything and remove what was written; may raise."""


class RetrySpec(msgspec.Struct, frozen=True, tag="retry", forbid_unknown_fields=True):
    """Try again after a `TransientStoreError`.

    Attributes
    ----------
    deadline_s
        No new try begins later than this after the first failure, in seconds.
    first_s
        Longest wait before the second try, in seconds.
    factor
        Growth of the longest wait from one try to the next.
    longest_s
        Upper bound of the longest wait, in seconds.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    factor: float = 2.0
    longest_s: float = 10.0


class ThrottleSpec(msgspec.Struct, frozen=True, tag="throttle", forbid_unknown_fields=True):
    """Bound the rate, in bytes per second, of what is read and written; None is no bound."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


class PackSpec(msgspec.Struct, frozen=True, tag="pack", forbid_unknown_fields=True):
    """Store large objects as byte planes under zstd; `RetrySpec` belongs outside of it.

    Attributes
    ----------
    level
        Of zstd, 1 to 22; 1 is set up for planes of numbers, and nearly always right. None packs
        nothing and reads what is packed.
    suffix
        Only objects whose names end in it have a packed form.
    """

    level: int | None = 1
    suffix: str = ".safetensors"


class TrustSpec(msgspec.Struct, frozen=True, tag="trust", forbid_unknown_fields=True):
    """Read checkpoints as one of these public keys (PEM) has signed them; belongs outermost."""

    keys: tuple[str, ...]


class MeterSpec(msgspec.Struct, frozen=True, tag="meter", forbid_unknown_fields=True):
    """Count calls, bytes, seconds and errors."""


FaultAction = Literal[
    "error", "lost", "torn", "short", "flip", "delay", "kill", "kill-after", "die", "die-after"
]


def _transient() -> dict[str, str | None]:
    return {"class": "TransientStoreError", "message": "injected fault", "kind": "injected"}


class FaultRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault and when it strikes.

    A rule matches an operation when every condition that is set holds. It strikes at matches
    ``skip < n <= skip + times`` (all later ones when `times` is 0).

    Attributes
    ----------
    action
        ``error``: raise before the operation, which has no effect. ``lost``: do it, then raise, as
        when the answer is lost. ``torn``: write half of the bytes, then raise (writers only;
        ``error`` elsewhere). ``short``: give back fewer bytes than asked, silently. ``flip``: flip
        one bit of what is read. ``delay``: wait `delay_s` first. ``kill``, ``kill-after``: SIGKILL
        this process before or after. ``die``, ``die-after``: the same for a store that lives in
        this process: this and every later operation raises, and has no effect.
    number
        Number of the operation, counted from 1 by this wrapper in this process.
    op, key
        Shell patterns for the operation's name and its key.
    error
        What to raise, as `CkptdError.to_dict` gives it.
    errno
        Raise an ``OSError`` with this number instead (inner steps only, where the store turns it
        into one of its own errors).
    delay_s
        Seconds of the delay.
    """

    action: FaultAction
    number: int | None = None
    op: str | None = None
    key: str | None = None
    skip: int = 0
    times: int = 1
    error: dict[str, str | None] = msgspec.field(default_factory=_transient)
    errno: int | None = None
    delay_s: float = 0.0


class FaultSpec(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True):
    """Faults by schedule.

    Attributes
    ----------
    rules
        Looked at in order; the first that strikes decides.
    inner
        Also count, and strike at, the steps inside a call (``os.link``, ``s3.put_object``).
    log
        Path of a file to which each operation is appended as one JSON line before it begins, so
        that a campaign knows what a killed process was about to do. None: no file.
    """

    rules: tuple[FaultRule, ...] = ()
    inner: bool = False
    log: str | None = None


WrapperSpec = RetrySpec | ThrottleSpec | MeterSpec | FaultSpec | PackSpec | TrustSpec

_SECRET = re.compile(r"key|secret|token|password|credential|sas", re.IGNORECASE)


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _SECRET.search(str(k)) else _hide(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(v) for v in value]
    return value


class StoreSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store as plain, JSON-able data.

    Attributes
    ----------
    url, options
        Arguments of `ckptd.store.open_store`.
    wrappers
        Innermost first.
    """

    url: str
    options: dict[str, Any] = {}
    wrappers: tuple[WrapperSpec, ...] = ()

    def open(self) -> Store:
        """Open the store with its wrappers; errors as `ckptd.store.open_store`."""
        store = open_store(self.url, **self.options)
        for wrapper in self.wrappers:
            store = wrap(store, wrapper)
        return store

    def wrapped(self, *wrappers: WrapperSpec) -> StoreSpec:
        """Return this store with more wrappers around it."""
        return msgspec.structs.replace(self, wrappers=(*self.wrappers, *wrappers))

    def redacted(self) -> dict[str, Any]:
        """Return the fields as plain data, without secrets; for logs and messages."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data["options"] = _hide(data["options"])
        data["url"] = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", self.url)
        return data

    def to_json(self) -> bytes:
        """Return the description as JSON, secrets included."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes | str) -> StoreSpec:
        """Return the description that `to_json` encoded; `UsageError` when it is none."""
        try:
            return _specs.decode(data)
        except msgspec.MsgspecError as error:
            raise UsageError("invalid description of a store", found=error) from None

    def __repr__(self) -> str:
        return f"StoreSpec({self.redacted()})"


_specs = json_decoder(StoreSpec)


class ReadOnlyStore(Store):
    """Refuses whatever would change something: `UsageError`."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Refuse."""
        self._refuse(check_key(key))

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Refuse."""
        self._refuse(next(iter(objects), ""))

    def writer(self, key: str, size: int) -> Writer:
        """Refuse."""
        self._refuse(check_key(key))

    def delete(self, keys: Iterable[str]) -> None:
        """Refuse."""
        self._refuse(", ".join([*keys][:4]))

    def sync(self, prefix: str) -> None:
        """Refuse."""
        self._refuse(prefix)

    def _refuse(self, where: str) -> NoReturn:
        raise UsageError("this view of a store is read-only", where=where)


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

    def check_unchanged(self) -> None:
        """Pass on."""
        self.inner.check_unchanged()

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

    def fleeting(self, prefix: str) -> None:
        """Pass on."""
        self.inner.fleeting(prefix)

    def local_path(self, key: str) -> Path | None:
        """Pass on."""
        return self.inner.local_path(key)

    def open_file(self, key: str) -> OpenFile | None:
        """Pass on."""
        return self.inner.open_file(key)

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


def holds(store: Store, key: str, data: bytes) -> bool:
    """Tell whether a create-only put whose answer was lost made the object that is there."""
    try:
        return store.get(key) == data
    except NotFoundError:
        return False


def innermost(store: Store) -> Store:
    """Return the store inside all wrappers."""
    while isinstance(store, Wrapper):
        store = store.inner
    return store


GROUP = "ckptd.stores"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

Opener = Callable[[str, dict[str, Any]], Store]
_Options = TypeVar("_Options", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RegistryProblem:
    """A store that was announced and cannot be used: its scheme, its package, and why."""

    scheme: str
    origin: str
    message: str


_lock = threading.Lock()
_openers: dict[str, Opener | str] = {}


def register_store(scheme: str, opener: Opener | str, *, replace: bool = False) -> None:
    """Make `opener` open URLs of `scheme`.

    Parameters
    ----------
    scheme
        Lower case, without ``://``.
    opener
        A callable ``(url, options) -> Store``, or ``"module:attribute"``, imported on first use.
    replace
        Take the scheme over when it is registered already; otherwise that is a `UsageError`.
    """
    if not _SCHEME.fullmatch(scheme):
        raise UsageError("invalid URL scheme", where=scheme)
    with _lock:
        if scheme in _openers and not replace:
            raise UsageError("this URL scheme is already registered", where=scheme)
        _openers[scheme] = opener


def parse_options(url: str, options: dict[str, Any], form: type[_Options]) -> _Options:
    """Return `options` as `form`; an unknown name or a wrong type is a `UsageError`."""
    try:
        return converter(form)(options)
    except msgspec.ValidationError as error:
        raise UsageError(
            "the store does not take these options",
            where=url,
            wanted=", ".join(form.__struct_fields__),
            found=error,
        ) from None


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _installed() -> dict[str, EntryPoint]:
    """Return the first entry point of each scheme."""
    return {e.name: e for e in reversed(entries(GROUP))}


def find_opener(scheme: str) -> Opener | None:
    """Return what opens `scheme`, or None when nothing is registered for it.

    Raises
    ------
    UsageError
        An installed package announced the scheme and does not load.
    """
    with _lock:
        opener = _openers.get(scheme)
    if opener is not None:
        found: Opener = _load(opener) if isinstance(opener, str) else opener
        return found
    entry = _installed().get(scheme)
    if entry is None:
        return None
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            "the package that opens this URL scheme fails to load",
            where=f"{scheme}:// from {origin(entry)}",
            found=f"{type(error).__name__}: {error}",
            hint="reinstall or remove that package; `ckptd doctor` lists such problems",
        ) from error
    return found


def registered_schemes() -> list[str]:
    """Return every scheme with a store of its own, sorted; other schemes go to fsspec."""
    with _lock:
        return sorted({*_openers, *_installed()})


def registry_problems() -> list[RegistryProblem]:
    """Load every installed store and return what is wrong with them; [] when all is well."""
    problems = []
    seen: set[str] = set()
    for entry in entries(GROUP):
        message = _check(entry, seen)
        seen.add(entry.name)
        if message is not None:
            problems.append(RegistryProblem(entry.name, origin(entry), message))
    return problems


def _check(entry: EntryPoint, seen: set[str]) -> str | None:
    with _lock:
        taken = entry.name in _openers
    if taken or entry.name in seen:
        return "another store has this URL scheme; this one is never used"
    if not _SCHEME.fullmatch(entry.name):
        return "the entry point's name is not a URL scheme"
    try:
        loaded = entry.load()
    except CkptdError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything; it is logged
        return f"{type(error).__name__}: {error}"
    return None if callable(loaded) else "the entry point is not callable"


for _scheme, _target in {
    "ckptd": "ckptd.store.net:open_net",
    "ckptd+unix": "ckptd.store.net:open_net",
    "file": "ckptd.store.local:open_local",
    "memory": "ckptd.store.memory:open_memory",
    "s3": "ckptd.store.s3:open_s3",
}.items():
    register_store(_scheme, _target)


_NEARLY = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)
_COMMON = ("abfs", "az", "gcs", "gs", "hdfs", "http", "https", "s3a", "sftp", "ssh", "webhdfs")
"""Schemes that fsspec's packages have, which need not be installed to be meant."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_GENERIC = "ckptd.store.generic:open_generic"
_WRAPPERS: dict[type[WrapperSpec], str] = {
    RetrySpec: "ckptd.store.wrap:Retry",
    ThrottleSpec: "ckptd.store.wrap:Throttle",
    MeterSpec: "ckptd.store.wrap:Meter",
    FaultSpec: "ckptd.store.fault:Fault",
    PackSpec: "ckptd.store.pack:Pack",
    TrustSpec: "ckptd.store.signed:SignedStore",
}
"""Imported on first use, as the openers are: these modules are built on this one."""


def checked_url(url: object) -> str:
    """Return a URL or path as text.

    Raises
    ------
    UsageError
        It is neither, or it would name a folder where a store was meant.
    """
    text = url if isinstance(url, str) else None
    if isinstance(url, os.PathLike):
        text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            "invalid URL of a store",
            where=repr(url)[:200],
            wanted="a path, file:///path, s3://bucket/prefix, or another URL, as text",
            found=type(url).__name__,
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("a path is not UTF-8", where=repr(text)[:200], wanted="text") from None
    found = _NEARLY.match(text)
    if found and not _URL.match(text.lstrip()) and found.group(1).lower() in _known():
        name, rest = found.group(1).lower(), found.group(2).lstrip("/")
        raise UsageError(
            f"a URL needs two slashes after {name}:",
            where=text[:200],
            wanted=f"{name}:///{rest}" if name == "file" else f"{name}://{rest}",
            hint=f"for a folder of that name write ./{text.strip()[:100]}; give URLs as str: a "
            f"Path merges their slashes",
        )
    if text != text.strip() and _URL.match(text.strip()):
        raise UsageError("a URL must not have spaces around it", where=repr(text)[:200])
    return text


def _known() -> set[str]:
    return {*registered_schemes(), *_COMMON}


def scheme_of(url: str) -> str:
    """Return the scheme of `url` in lower case; a plain path has ``file``."""
    head, separator, _ = url.partition("://")
    if separator and "::" in head:
        return "fsspec"  # fsspec's chained form, such as simplecache::gs://bucket
    found = _URL.match(url)
    return found.group(1).lower() if found else "file"


def open_store(url: str | os.PathLike[str], **options: Any) -> Store:
    """Open the place that `url` names. Nothing is created or contacted before the first call.

    Parameters
    ----------
    url
        A path or ``file:///path`` (`LocalStore`), ``memory://name`` (`MemoryStore`),
        ``s3://bucket/prefix`` (`S3Store`), a scheme that an installed package registers, or any
        other URL that fsspec knows (`FsspecStore`; ``fsspec+SCHEME://`` forces that one).
    options
        Passed to the store: plain, JSON-able values, listed in ``docs/reference/stores.md``.

    Raises
    ------
    UsageError
        Nothing opens it. An option the store does not know. The package that would open it does
        not load.
    """
    text = checked_url(url)
    scheme = scheme_of(text)
    generic = scheme == "fsspec" or scheme.startswith("fsspec+")
    opener = None if generic else find_opener(scheme)
    return (opener or _load(_GENERIC))(text, options)


def wrap(store: Store, spec: WrapperSpec) -> Store:
    """Return `store` inside the wrapper that `spec` describes."""
    wrapper: Callable[[Store, WrapperSpec], Store] = _load(_WRAPPERS[type(spec)])
    return wrapper(store, spec)
