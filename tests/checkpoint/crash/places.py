"""Where a campaign takes place: a store that can be put back to a template, and seen naked."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptd.store import StoreSpec
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore
from ckptd.store.s3 import S3Store

__all__ = ["LocalPlace", "MemoryPlace", "Place", "S3Place"]


class Place(ABC):
    """One root, and how it is put back to where each case begins.

    Attributes
    ----------
    store
        The root, without faults.
    large
        Whether states must be large enough for a multipart upload.
    """

    store: Store
    large = False

    @property
    def spec(self) -> StoreSpec:
        """What another process opens."""
        return self.store.describe()

    @abstractmethod
    def freeze(self) -> None:
        """Take what is there now as the template."""

    @abstractmethod
    def reset(self) -> None:
        """Bring the template back."""

    def seen(self) -> Store:
        """Return what is there now, to look at and not to change."""
        return self.store

    @abstractmethod
    def raw(self) -> Iterable[str]:
        """Return every name that is there, legal or not."""

    def close(self) -> None:
        """Remove everything."""
        self.store.close()


class LocalPlace(Place):
    """A folder below `parent`."""

    def __init__(self, parent: Path) -> None:
        self.root = parent / "root"
        self._template = parent / "template"
        self.store = StoreSpec(str(self.root)).open()

    def freeze(self) -> None:
        """See `Place`."""
        shutil.copytree(self.root, self._template)

    def reset(self) -> None:
        """See `Place`."""
        self.store.close()
        shutil.rmtree(self.root)
        shutil.copytree(self._template, self.root)
        self.store = StoreSpec(str(self.root)).open()

    def raw(self) -> Iterable[str]:
        """Empty folders count: they must not stay either."""
        for folder, folders, names in os.walk(self.root):
            here = os.path.relpath(folder, self.root)
            yield from (os.path.normpath(os.path.join(here, n)) for n in names)
            if not folders and not names:
                yield here + "/"


class MemoryPlace(Place):
    """A space in this process."""

    def __init__(self, name: str) -> None:
        self.store = MemoryStore(name)
        self._template: dict[str, bytes] = {}

    def freeze(self) -> None:
        """See `Place`."""
        self._template = {o.key: self.store.get(o.key) for o in self.store.list()}

    def reset(self) -> None:
        """See `Place`."""
        self.store.delete([o.key for o in self.store.list()])
        for key, data in self._template.items():
            self.store.put(key, data)

    def raw(self) -> Iterable[str]:
        """See `Place`."""
        return [o.key for o in self.store.list()]


class S3Place(MemoryPlace):
    """A prefix of a bucket."""

    large = True

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.store = StoreSpec(url, options | {"part_bytes": 5 << 20}).open()
        self._template = {}

    def reset(self) -> None:
        """See `Place`."""
        self.store.sweep(older_than_s=-60.0)
        self.store.delete([o.key for o in self.store.list()])
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item: self.store.put(*item), self._template.items()))

    def seen(self) -> Store:
        """Get every object once: a request takes longer than all that is then looked at."""
        copy = MemoryStore(f"seen {self.store.url}")
        copy.delete([o.key for o in copy.list()])
        keys = [o.key for o in self.store.list()]
        with ThreadPoolExecutor(8) as pool:
            for key, data in zip(keys, pool.map(self.store.get, keys), strict=True):
                copy.put(key, data)
        return copy

    def raw(self) -> Iterable[str]:
        """Unfinished uploads count."""
        assert isinstance(self.store, S3Store)
        yield from (o.key for o in self.store.list())
        yield from (f"upload of {u['Key']}" for u in self.store._uploads(""))

    def close(self) -> None:
        """See `Place`."""
        self.store.sweep(older_than_s=-60.0)
        self.store.delete([o.key for o in self.store.list()])
        self.store.close()
