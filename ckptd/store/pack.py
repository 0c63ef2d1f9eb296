"""`Pack`: stores data files as byte planes under zstd, where a link is slower than the cores.

The packed form of ``KEY`` is the object ``KEY.zp``. Readers look for it only when there is no
``KEY``, so that plain roots pay nothing and packed ones need not be announced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ckptd.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckptd.store.base import (
    MAX_KEY_BYTES,
    Names,
    ObjectInfo,
    OpenFile,
    Store,
    Writer,
    check_key,
    is_segment,
)
from ckptd.store.buffers import as_bytes_view
from ckptd.store.pack_container import bound
from ckptd.store.pack_reader import PackReader
from ckptd.store.pack_writer import PackWriter
from ckptd.store.spec import PackSpec
from ckptd.store.wrap import Wrapper
from ckptd.types import ByteRange

__all__ = ["PACKED", "Pack"]

PACKED = ".zp"
"""What the name of a packed object has at its end, after the logical name."""
_MOST_THREADS = 8
_LEVELS = range(1, 23)


class Pack(Wrapper):
    """Packs what `writer` writes under names that end in ``spec.suffix``, and reads both forms.

    Names, sizes and ranges are logical everywhere. `put` stores plain objects, and a plain object
    hides a packed one. A store that packs promises no local files, and what is packed has no
    `local_path`. That another process replaced a packed object that was read here is noticed by
    its digests.
    """

    spec: PackSpec

    def __init__(self, inner: Store, spec: PackSpec | None = None) -> None:
        super().__init__(inner, spec or PackSpec())
        level = self.spec.level
        if level is not None and (isinstance(level, bool) or level not in _LEVELS):
            raise UsageError(
                "not a level of zstd", kind="bad-option", wanted="1 to 22, or None", found=level
            )
        if level is not None:
            self.capabilities = replace(self.capabilities, local_files=False)
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._reader = PackReader(inner, self._executor)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "ckptd-pack")
            return self._pool

    # -- names -----------------------------------------------------------------------------------

    def _packed(self, key: str) -> str | None:
        """Return the name of the packed form of `key`; None where it has none."""
        name = check_key(key) + PACKED
        if not key.endswith(self.spec.suffix) or len(name) > MAX_KEY_BYTES:
            return None
        return name if is_segment(name.rpartition("/")[2]) else None

    def _logical(self, name: str) -> str | None:
        """Return the key whose packed form `name` is; None where it is none."""
        key = name.removesuffix(PACKED)
        packed = key != name and key.endswith(self.spec.suffix) and is_segment(key.split("/")[-1])
        return key if packed else None

    def _check_free(self, key: str) -> None:
        if self._logical(check_key(key)) is not None:
            raise UsageError(
                "this name is for packed objects",
                kind="bad-key",
                where=key,
                wanted=f"a name that does not end in {self.spec.suffix}{PACKED}",
            )

    # -- reading ---------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        name = self._packed(key)
        if name is None:
            return self.inner.get(key, byte_range)
        if self._reader.knows(name):
            try:
                return self._reader.get(name, byte_range)
            except NotFoundError:
                self._reader.forget(name)
        try:
            return self.inner.get(key, byte_range)
        except NotFoundError as error:
            try:
                return self._reader.get(name, byte_range)
            except NotFoundError:
                raise error from None

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; of a packed object the frames that it touches are read."""
        name = self._packed(key)
        if name is None:
            return self.inner.read_into(key, offset, buffer)
        view = as_bytes_view(buffer)
        if self._reader.knows(name):
            try:
                return self._reader.read(name, offset, view)
            except NotFoundError:
                self._reader.forget(name)
        try:
            self.inner.read_into(key, offset, buffer)
        except NotFoundError as error:
            try:
                self._reader.read(name, offset, view)
            except NotFoundError:
                raise error from None

    def stat(self, key: str) -> ObjectInfo:
        """Return logical size and time of one object."""
        name = self._packed(key)
        try:
            return self.inner.stat(key)
        except NotFoundError as error:
            if name is None:
                raise
            try:
                table = self._reader.table(name, self.inner.stat(name))
            except NotFoundError:
                raise error from None
            return ObjectInfo(key, table.size, table.modified)

    def exists(self, key: str) -> bool:
        """Tell whether the object exists in either form."""
        name = self._packed(key)
        return self.inner.exists(key) or (name is not None and self.inner.exists(name))

    def local_path(self, key: str) -> Path | None:
        """Return the file behind `key`; None where it is packed, or where this store packs."""
        path, name = self.inner.local_path(key), self._packed(key)
        if not self.capabilities.local_files:
            return None
        if path is None or name is None or path.exists() or not self.inner.exists(name):
            return path
        return None

    def open_file(self, key: str) -> OpenFile | None:
        """Return the object as a descriptor; None where it is packed, or where this store packs."""
        name = self._packed(key)
        if not self.capabilities.local_files:
            return None
        try:
            return self.inner.open_file(key)
        except NotFoundError:
            if name is not None and self.inner.exists(name):
                return None
            raise

    # -- listing ---------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, in key order, with logical names and sizes.

        The size of a packed object that is not whole, a leftover, is that of its bytes.
        """
        plain: dict[str, ObjectInfo] = {}
        packed: dict[str, ObjectInfo] = {}
        for info in self.inner.list(prefix):
            key = self._logical(info.key)
            if key is None:
                plain[info.key] = info
            else:
                packed[key] = info
        hidden = plain.keys() & packed.keys()
        found = {**plain, **self._sized({k: i for k, i in packed.items() if k not in hidden})}
        yield from (found[key] for key in sorted(found))

    def _sized(self, packed: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
        if not packed:
            return {}
        # Threads of its own: those that pack must not wait for a store.
        threads = min(len(packed), self.inner.capabilities.parallel)
        with ThreadPoolExecutor(threads, "ckptd-pack-list") as pool:
            sizes = pool.map(self._size, packed.values())
            return {
                key: ObjectInfo(key, size, info.modified)
                for (key, info), size in zip(packed.items(), sizes, strict=True)
                if size is not None
            }

    def _size(self, info: ObjectInfo) -> int | None:
        try:
            return self._reader.table(info.key, info).size
        except NotFoundError:
            return None  # deleted since the listing
        except CorruptError:
            return info.size

    def children(self, prefix: str = "") -> Names:
        """Return logical names directly below `prefix`, sorted; folders end in "/"."""
        return sorted({self._logical(n) or n for n in self.inner.children(prefix)})

    # -- writing ---------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole, plain."""
        self._check_free(key)
        name = self._packed(key)
        if name is not None:
            self._reader.forget(name)
            if create_only and self.inner.exists(name):
                raise ConflictError(
                    "the object exists already", kind="exists", where=f"{self.url}/{key}"
                )
        self.inner.put(key, data, create_only=create_only)

    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object, packed where the spec has a level."""
        self._check_free(key)
        name = self._packed(key)
        if name is not None:
            self._reader.forget(name)
        if name is None or self.spec.level is None:
            return self.inner.writer(key, size)
        try:
            pool = self._executor()
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=key) from None
        return PackWriter(
            key,
            size,
            self.inner.writer(name, bound(max(0, size))),
            level=self.spec.level,
            pool=pool,
            threads=self._threads,
            committed=lambda: self._replaced(key, name),
        )

    def _replaced(self, key: str, name: str) -> None:
        """Let the packed object that now stands take the place of what was there."""
        self._reader.forget(name)
        self.inner.delete([key])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects in whichever form they are."""
        names = [*keys]
        packed = {name for key in names if (name := self._packed(key)) is not None}
        for name in packed:
            self._reader.forget(name)
        if self.inner.capabilities.consistent_list:
            packed = self._present(packed)
        self.inner.delete([*names, *sorted(packed)])

    def _present(self, names: set[str]) -> set[str]:
        """Return those of `names` that exist: one listing a folder, not a request a name."""
        folders = {name[: name.rfind("/") + 1] for name in names}
        return names & {f + child for f in folders for child in self.inner.children(f)}

    def close(self) -> None:
        """End the threads, and close the inner store. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = True
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.inner.close()
