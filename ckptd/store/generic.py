"""`FsspecStore`: URLs of fsspec (Google, Azure, ...): capabilities claimed, errors translated.

What fsspec says about a file system does not include whether a put is durable, or has one winner.
So a capability is claimed only where the service documents it and fsspec's driver uses it: Google
Cloud Storage and Azure decide a create-only put on the server. Elsewhere such a put is refused
unless the option ``single_writer`` says that there is no race to lose.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeVar

from ckptd.errors import (
    CkptdError,
    ConflictError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.store import base
from ckptd.store.osio import explain, while_folders_vanish
from ckptd.types import ByteRange

_TEMPORARY = "~"
_T = TypeVar("_T")
# Services whose put appears whole or not at all, survives, and shows in the next listing.
_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "s3", "s3a"}
# Of these, where fsspec's mode="create" is one conditional request that the server decides.
_CREATE_ONLY = {"abfs", "abfss", "az", "gcs", "gs"}
_IN_THIS_PROCESS = {"memory"}
# Google's ETag is another one when only what is said of an object changes, as where it is stored.
_TAGS = ("generation", "ETag", "etag")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def open_generic(url: str, options: dict[str, Any]) -> FsspecStore:
    """Open any URL of fsspec; ``fsspec+SCHEME://`` means ``SCHEME://``."""
    return FsspecStore(url, **options)


class FsspecStore(base.Store):
    """Objects behind an fsspec file system.

    Parameters
    ----------
    url
        As fsspec takes it, chained forms included, or with ``fsspec+`` before the scheme.
    single_writer
        Allow create-only puts where the service cannot decide a race: the caller promises that
        no other process creates the same key at the same time.
    options
        Passed to fsspec's file system: credentials, endpoints.
    """

    def __init__(self, url: str, *, single_writer: bool = False, **options: Any) -> None:
        self.url = url
        self.options = dict(options)
        if single_writer:
            self.options["single_writer"] = True
        self._single_writer = single_writer
        self._fs, self._root = _connect(url.removeprefix("fsspec+"), options)
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._whole_puts = bool(protocols & _OBJECT_STORES)
        self.capabilities = base.Capabilities(
            create_only=bool(protocols & _CREATE_ONLY),
            consistent_list=self._whole_puts or "file" in protocols or "memory" in protocols,
            durable=self._whole_puts,
            local_files=False,
            shared=not protocols & _IN_THIS_PROCESS,
            parallel=8,
            block_bytes=16 << 20,
        )

    def _path(self, key: str) -> str:
        return self._join(base.check_key(key))

    def _join(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        path = self._path(key)
        if byte_range is None:
            with _translated(path):
                return bytes(self._fs.cat_file(path))
        if byte_range.length == 0:
            base.check_end(path, byte_range.end, self.stat(key).size)
            return b""
        try:
            with _translated(path):
                data = bytes(self._fs.cat_file(path, start=byte_range.start, end=byte_range.end))
        except StoreError:
            # Some services refuse a range past the end, others give what there is.
            base.check_end(path, byte_range.end, self.stat(key).size)
            raise
        if len(data) != byte_range.length:
            base.check_end(path, byte_range.end, byte_range.start + len(data))
            raise StoreError("the store sent more bytes than requested", where=path)
        return data

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object; time is 0 where the file system tells none."""
        path = self._path(key)
        with _translated(path):
            info = self._fs.info(path)
        if info["type"] != "file":
            raise NotFoundError("no such object", where=path, found=info["type"])
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return base.ObjectInfo(key, int(info["size"]), _time_of(info), tag)

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order."""
        folder = self._join(base.check_prefix(prefix)).rstrip("/")
        self._fs.invalidate_cache()
        with _translated(folder):
            try:
                found = self._fs.find(folder, detail=True)
            except FileNotFoundError:
                return
        infos = []
        for path, info in found.items():
            key = path[len(self._root) :].lstrip("/")
            legal = len(key) <= base.MAX_KEY_BYTES and all(
                base.is_segment(p) for p in key.split("/")
            )
            if legal and info["type"] == "file" and key.startswith(prefix):
                infos.append(base.ObjectInfo(key, int(info["size"]), _time_of(info)))
        yield from sorted(infos, key=lambda i: i.key)

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole: in one request, or by rename where that is what there is."""
        path = self._path(key)
        if create_only:
            self._create(key, path, data)
        elif self._whole_puts:
            with _translated(path):
                self._fs.pipe_file(path, data)
        else:
            self._put_by_rename(path, data)

    def _create(self, key: str, path: str, data: bytes) -> None:
        if self.capabilities.create_only:
            with _translated(path):
                try:
                    self._fs.pipe_file(path, data, mode="create")
                    return
                except FileExistsError:
                    pass
            # The driver repeats requests by itself, so "exists" may be our own success.
            if self.get(key) != data:
                raise ConflictError("the object exists already", kind="exists", where=path)
            return
        if not self._single_writer:
            raise RefusedError(
                "this store lacks atomic create-if-absent",
                kind="no-create-only",
                where=path,
                hint="use s3://, gs://, az:// or a path; or open it with single_writer=True if no "
                "other process writes there",
            )
        if self.exists(key):
            raise ConflictError("the object exists already", kind="exists", where=path)
        self._put_by_rename(path, data)

    def _put_by_rename(self, path: str, data: bytes) -> None:
        temporary = f"{self._fs._parent(path)}/{_TEMPORARY}{secrets.token_hex(12)}.put"

        def act() -> None:
            try:
                with self._fs.open(temporary, "wb") as file:
                    file.write(data)
                self._fs.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

        self._in_folder(path, act)

    def _in_folder(self, path: str, act: Callable[[], _T]) -> _T:
        """Run `act` with the folder there, which a concurrent delete may remove as empty."""

        def attempt() -> _T:
            # "Exists": gone and made again between two looks of makedirs.
            with suppress(FileExistsError):
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            return act()

        with _translated(path):
            return while_folders_vanish(attempt, path)

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object of exactly `size` bytes."""
        return _FsspecWriter(self, self._path(key), size)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and folders that became empty."""
        paths = [self._path(k) for k in keys]
        for path in paths:
            with _translated(path), suppress(FileNotFoundError):
                self._fs.rm_file(path)
        self._fs.invalidate_cache()
        if not self._whole_puts:
            for folder in {self._fs._parent(p) for p in paths}:
                self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        # What rmdir raises for a folder with objects in it is up to each driver.
        with suppress(Exception):
            while folder != self._root and folder.startswith(self._root + "/"):
                if self._fs.ls(folder, detail=False):
                    return
                self._fs.rmdir(folder)
                folder = self._fs._parent(folder)

    def sync(self, prefix: str) -> None:
        """Do nothing: fsspec knows no durability beyond the end of a put."""
        base.check_prefix(prefix)


class _FsspecWriter(base.SizedWriter):
    def __init__(self, store: FsspecStore, path: str, size: int) -> None:
        super().__init__(path, size)
        self._fs = store._fs
        if store._whole_puts:
            with _translated(path):
                self._file = self._fs.open(path, "wb")
        else:
            self._file = store._in_folder(path, lambda: self._fs.open(path, "wb"))

    def _append(self, view: memoryview) -> None:
        with _translated(self.key):
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])

    def _finish(self) -> None:
        with _translated(self.key):
            self._file.close()

    def _drop(self) -> None:
        # fsspec completes an upload when its file is closed or collected: never let it.
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True
        with suppress(Exception):
            self._file.close()
        with suppress(Exception):
            self._fs.rm_file(self.key)


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        # No cached instances and no cached listings: another process changes the store.
        fs, root = fsspec.url_to_fs(
            url, skip_instance_cache=True, use_listings_cache=False, **options
        )
    except ImportError as error:
        raise UsageError(
            "a package for this kind of store is missing",
            kind="missing-package",
            where=url,
            found=error,
            hint="pip install the package that it names; `pip install 'ckptd[s3]'` for s3://",
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            "no store for this URL scheme",
            where=url,
            wanted="a path, file://, memory://, s3://, or a scheme that fsspec knows",
            found=error,
        ) from error
    return fs, str(root).rstrip("/")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn whatever a driver raises into an error of the store contract."""
    try:
        yield
    except CkptdError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError("no such object", where=path) from error
    except (TimeoutError, ConnectionError) as error:
        raise TransientStoreError("no answer", where=path, found=repr(error)) from error
    except PermissionError as error:  # drivers leave its number out
        raise StoreError(
            "not permitted", kind="permission", where=path, found=repr(error)
        ) from error
    except OSError as error:
        raise explain(error, path, "the store failed", None) from error
    except Exception as error:
        raise StoreError("the store failed", where=path, found=repr(error)) from error


def _time_of(info: dict[str, Any]) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return 0.0
