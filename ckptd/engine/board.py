"""A board: the small key-value service through which the ranks of one job agree.

Ranks never use collectives for checkpoints: a collective from a background thread deadlocks with
the job's own, and one dead rank hangs it without a word. A board has plain keys, and every wait
has a deadline. `ckptd.train` implements it over the job store; one process needs `LocalBoard`.
"""

from __future__ import annotations

import threading
from typing import Protocol

from ckptd.errors import DeadlineError

__all__ = ["Board", "LocalBoard"]


class Board(Protocol):
    """Keys are unique to their use: they carry generation, step, attempt and a counter.

    Implementations are thread-safe. Values are small (below 8 MB).
    """

    rank: int
    world: int

    def set(self, key: str, value: bytes) -> None:
        """Publish `value`."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key; `DeadlineError` (kind ``board``) names it when it does not come."""

    def peek(self, key: str) -> bytes | None:
        """Return the value if it is there already, without waiting."""

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; return its value. `peek` does not show it."""

    def count(self, key: str) -> int:
        """Return the value of a counter."""

    def delete(self, key: str) -> None:
        """Forget a key; no error when it is gone."""


class LocalBoard:
    """A board for threads of one process; with ``world=1`` it is the board of a job of one rank."""

    def __init__(self, rank: int = 0, world: int = 1, peers: LocalBoard | None = None) -> None:
        self.rank = rank
        self.world = world
        self._values: dict[str, bytes] = peers._values if peers else {}
        self._counts: dict[str, int] = peers._counts if peers else {}
        self._changed: threading.Condition = peers._changed if peers else threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Board`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Board`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise DeadlineError(
                    "nobody published a value in time",
                    kind="board",
                    where=key,
                    wanted=f"within {timeout_s:.0f} s",
                )
            return self._values[key]

    def peek(self, key: str) -> bytes | None:
        """See `Board`."""
        with self._changed:
            return self._values.get(key)

    def add(self, key: str, amount: int = 1) -> int:
        """See `Board`."""
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]

    def count(self, key: str) -> int:
        """See `Board`."""
        with self._changed:
            return self._counts.get(key, 0)

    def delete(self, key: str) -> None:
        """See `Board`."""
        with self._changed:
            self._values.pop(key, None)
            self._counts.pop(key, None)
