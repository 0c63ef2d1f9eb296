"""A small cache of plans that is bounded by what the plans weigh, not by how many there are."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Templates"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Templates(Generic[K, V]):
    """Least recently used values up to a total weight; safe to share between threads.

    A count would not bound memory: one plan may have one block, another sixteen thousand.

    Parameters
    ----------
    limit
        Largest total weight. A value heavier than a quarter of it is not kept at all, so that
        one giant does not push out everything else.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._weight = 0

    def get(self, key: K) -> V | None:
        """Return the value kept for `key`, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, *, weight: int) -> None:
        """Keep `value`, and forget the longest unused ones beyond the limit."""
        if weight > self._limit // 4:
            return
        with self._lock:
            _, old = self._kept.pop(key, (None, 0))
            self._kept[key] = (value, weight)
            self._weight += weight - old
            while self._weight > self._limit:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._weight -= dropped

    @property
    def weight(self) -> int:
        """Weight of everything kept."""
        with self._lock:
            return self._weight

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._weight = 0
