"""Memory for other nodes' snapshots: segments that are filled again and again, within a budget."""

from __future__ import annotations

import threading

from ckptd.engine.arena import Slot
from ckptd.errors import SaveError, StoreError

__all__ = ["Segments"]

_SPARE = 2
"""Kept for the next guests: filling fresh pages takes ten times as long."""


class Segments:
    """Segments given out and spare ones. Thread-safe.

    Attributes
    ----------
    budget
        Bytes that all of them may have together; None is as much as there is memory.
    """

    def __init__(self) -> None:
        self.budget: int | None = None
        self._lock = threading.Lock()
        self._spare: list[Slot] = []
        self._given = 0

    def take(self, size: int) -> Slot:
        """Return a segment of at least `size` bytes.

        Raises
        ------
        StoreError
            kind ``no-space``: there is no memory for it, or it is beyond the budget.
        """
        with self._lock:
            fitting = [s for s in self._spare if s.nbytes >= size]
            if fitting:
                best = min(fitting, key=lambda s: s.nbytes)
                self._spare.remove(best)
                self._given += best.nbytes
                return best
            self._close_spare()  # too small for what comes now
            if self.budget is not None and self._given + size > self.budget:
                found = f"{self._given / 1e9:.2f} of {self.budget / 1e9:.2f} GB in use"
                raise _no_space(f"{size / 1e9:.2f} GB", found)
            self._given += size
        segment = None
        try:
            segment = Slot(0, size)
            segment.allocate()  # it is filled from a connection, where it lies
            return segment
        except SaveError as error:
            if segment is not None:
                segment.close()
            with self._lock:
                self._given -= size
            raise _no_space(error.wanted, error.found) from error

    def give_back(self, segment: Slot, *, again: bool = True) -> None:
        """Take a segment back; one that somebody may still read is not filled `again`."""
        with self._lock:
            self._given -= segment.nbytes
            if again and len(self._spare) < _SPARE:
                self._spare.append(segment)
                return
        segment.close()

    def close(self) -> None:
        """Let go of the spare ones. Idempotent."""
        with self._lock:
            self._close_spare()

    def _close_spare(self) -> None:
        for segment in self._spare:
            segment.close()
        self._spare.clear()


def _no_space(wanted: str | None, found: str | None) -> StoreError:
    return StoreError(
        "no memory for another node's snapshot",
        kind="no-space",
        wanted=wanted,
        found=found,
        hint="leave more memory on the nodes, give Peer() a larger budget_bytes, or leave it out",
    )
