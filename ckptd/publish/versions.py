"""`VersionTable`: which version is in which slot, holds of workers and leases, skipped versions.

In it: the reason that is given where a version gets no slot.

A publisher has a few slots on every rank, and one version lies in the same slot on all of them.
Rank 0's server keeps this book. What every rank has sealed is *whole*; a worker holds a whole
version while it pulls it, and a slot with a held version is not filled again. So ranks never keep
different versions, and none of them asks another one what may be overwritten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_LOST = float("-inf")


class SlotChoice(NamedTuple):
    """Where a new version goes.

    Attributes
    ----------
    slot
        Number of the slot; -1: nowhere, the version is skipped.
    fresh
        The memory of the slot is left to a worker that holds it for too long: the slot gets memory
        of its own.
    reason
        Why the version is skipped; empty where it is not.
    """

    slot: int
    fresh: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Entry:
    """A version in a slot; `holds` has the end of the lease by holder."""

    number: int
    step: int
    begun: float
    fresh: bool = False
    whole: bool = False
    holds: dict[object, float] = field(default_factory=dict)


class VersionTable:
    """The slots of a publisher, and the workers that hold versions. Thread-safe.

    Parameters
    ----------
    slots
        How many there are, at least 2.
    lease_s
        For so long a worker may hold a version without getting on, in seconds. Then its slot is
        filled again, in other memory: what the worker reads stays as it is.
    """

    def __init__(
        self, slots: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries: list[_Entry | None] = [None] * slots
        self._left: set[int] = set()
        self.lease_s = lease_s
        self._clock = clock
        self._change = threading.Condition()

    def place(self, number: int, step: int) -> SlotChoice:
        """Return the slot of a version; an earlier one in it is gone, and no worker may take it.

        The newest whole version stays until there is another whole one, so a worker that comes
        late always finds one.
        """
        with self._change:
            choice = self._choose()
            if choice.slot >= 0:
                self._entries[choice.slot] = _Entry(number, step, self._clock(), choice.fresh)
                self._left.discard(choice.slot)
            return choice

    def _choose(self) -> SlotChoice:
        if None in self._entries:
            free = self._entries.index(None)
            return SlotChoice(free, fresh=free in self._left)
        now = self._clock()
        whole = sorted((e.number, slot) for slot, e in self._filled() if e.whole)
        # The newest comes last, and only if another one stays for those that come meanwhile.
        for _, slot in whole if len(whole) > 1 else ():
            entry = self._entries[slot]
            if entry is not None and all(end < now for end in entry.holds.values()):
                return SlotChoice(slot, fresh=bool(entry.holds))
        making = len(self._entries) - len(whole)
        held = sum(any(end >= now for end in e.holds.values()) for _, e in self._filled())
        return SlotChoice(
            -1,
            reason=f"of {len(self._entries)} slots {making} are being filled and {held} are held "
            "by workers; the newest whole version stays where it is",
        )

    def _filled(self) -> Iterator[tuple[int, _Entry]]:
        return ((slot, e) for slot, e in enumerate(self._entries) if e is not None)

    def commit(self, number: int) -> bool:
        """Note that every rank has sealed a version; False: it was dropped before."""
        with self._change:
            found = [e for _, e in self._filled() if e.number == number]
            for entry in found:
                entry.whole = True
            self._change.notify_all()
            return bool(found)

    def drop(self, number: int) -> bool:
        """Note that a version will never be whole: its slot is free; False: that is known."""
        with self._change:
            for slot, entry in list(self._filled()):
                if entry.number == number and not entry.whole:
                    self._entries[slot] = None
                    if entry.fresh:  # a rank that failed may have made no memory of its own yet
                        self._left.add(slot)
                    return True
            return False

    def newer(self, than: int, wait_s: float = 0.0) -> tuple[int, int] | None:
        """Return number and step of the newest whole version above `than`; wait for one so long."""
        with self._change:
            self._change.wait_for(lambda: self._newest()[0] > than, wait_s)
            found = self._newest()
            return found if found[0] > than else None

    def age_s(self, number: int) -> float:
        """Return how long ago a version was begun, in seconds."""
        with self._change:
            begun = [e.begun for _, e in self._filled() if e.number == number]
            return self._clock() - begun[0] if begun else 0.0

    def _newest(self) -> tuple[int, int]:
        return max(((e.number, e.step) for _, e in self._filled() if e.whole), default=(0, -1))

    def hold(self, number: int, holder: object) -> bool:
        """Keep a version where it is for `holder`; False: it is not there any more."""
        with self._change:
            for _, entry in self._filled():
                if entry.whole and entry.number == number:
                    entry.holds[holder] = self._clock() + self.lease_s
                    return True
            return False

    def renew(self, number: int, holder: object) -> bool:
        """Begin the lease of `holder` again; False: the version or the hold is not there any more.

        A lease that has ended is renewed as well while nothing else is in the slot.
        """
        with self._change:
            for _, entry in self._filled():
                if entry.number == number and entry.holds.get(holder, _LOST) > _LOST:
                    entry.holds[holder] = self._clock() + self.lease_s
                    return True
            return False

    def release(self, holder: object) -> None:
        """Release all that `holder` holds: it reads nothing any more."""
        with self._change:
            for _, entry in self._filled():
                entry.holds.pop(holder, None)

    def lose(self, holder: object) -> None:
        """End the leases of a holder whose connection is gone, and that may still read."""
        with self._change:
            for _, entry in self._filled():
                if holder in entry.holds:
                    entry.holds[holder] = _LOST

    @property
    def held(self) -> int:
        """How many holds there are whose lease has not ended."""
        now = self._clock()
        with self._change:
            return sum(end >= now for _, e in self._filled() for end in e.holds.values())
