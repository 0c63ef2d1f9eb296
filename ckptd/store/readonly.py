"""Views of stores that are only read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from ckptd.errors import UsageError
from ckptd.store.base import Store, Writer, check_key

__all__ = ["ReadOnlyStore"]


class ReadOnlyStore(Store):
    """Refuses whatever would change something: `UsageError`, kind ``read-only``."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Refuse."""
        self._refuse(check_key(key))

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
        raise UsageError("this view of a store is only read", kind="read-only", where=where)
