"""Which slot of the arena the next save gets, and which must stay as they are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckptd.engine.arena import MOST_SLOTS, Slot, slots_for
from ckptd.engine.memory import available_bytes
from ckptd.errors import CkptdError, SaveError

__all__ = ["KEEPING", "Slots"]

KEEPING = ("memory", "peer")
"""Near tiers whose newest complete snapshot lies, wholly or in part, in slots of the trainers."""

_log = logging.getLogger("ckptd")


class Slots:
    """The arena of one rank, as the trainer sees it. Thread-safe.

    A slot is *taken* by a save until nobody reads it any more and what became of the snapshot is
    known; it is *kept* while it holds the newest complete snapshot of a near tier: that one is not
    overwritten by a half-made one, as long as there is memory for another slot.

    Parameters
    ----------
    wanted
        How many; None leaves it to the memory there is.
    announce
        Tells the writing process of a new slot.
    withdraw
        Called before the memory of a slot goes.
    """

    def __init__(
        self,
        wanted: int | None,
        announce: Callable[[Slot], None],
        withdraw: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self._wanted = wanted
        self._announce = announce
        self._withdraw = withdraw
        self._free = threading.Condition()
        self._arena: dict[int, Slot] = {}
        self._taken: dict[int, int] = {}
        self._kept: dict[str, int] = {}
        self._most = 1
        self._sacrificed: set[str] = set()
        self._dead: CkptdError | None = None

    @property
    def taken(self) -> dict[int, int]:
        """The job that each slot is taken by."""
        with self._free:
            return dict(self._taken)

    @property
    def kept(self) -> dict[str, int]:
        """The job whose snapshot is the newest complete one of each near tier that keeps one."""
        with self._free:
            return {tier: self._arena[number].sealed for tier, number in self._kept.items()}

    @property
    def full(self) -> bool:
        """Whether a save that began now would wait for a slot."""
        with self._free:
            return self._is_full()

    def acquire(self, nbytes: int, timeout_s: float) -> Slot:
        """Wait until a slot is free and return it, at least `nbytes` large.

        Raises
        ------
        SaveError
            kind ``draining``: earlier saves did not leave a slot within `timeout_s`; kind
            ``no-memory``.
        CkptdError
            What `fail` was given.
        """
        with self._free:
            free = self._free.wait_for(lambda: not self._is_full() or self._dead, timeout_s)
            if self._dead is not None:
                raise self._dead
            if not free:
                raise SaveError(
                    "earlier saves still occupy the arena",
                    kind="draining",
                    wanted=f"a free slot within {timeout_s:.0f} s",
                    found=f"{len(self._taken)} saves under way",
                    hint="save less often, or give the store more bandwidth",
                )
            number = self._choose(nbytes)
            slot = self._arena.get(number)
            if slot is not None and slot.nbytes >= nbytes:
                return slot
            try:
                return self._make(number, nbytes)
            except SaveError:
                if not self._taken or slot is not None:
                    raise
            _log.info("no memory for another slot: saves wait for the %d that there are", number)
            self._most = self._wanted = len(self._arena)
        return self.acquire(nbytes, timeout_s)

    def _is_full(self) -> bool:
        # Where every slot is kept and no save is under way, one must be given up.
        grown = bool(self._arena) and len(self._arena) >= self._most
        return bool(self._taken) and grown and not self._idle()

    def _idle(self) -> list[Slot]:
        held = {*self._taken, *self._kept.values()}
        return [s for s in self._arena.values() if s.number not in held]

    def _choose(self, nbytes: int) -> int:
        """Return the number of the slot for the next save: an idle one, else a new one."""
        if idle := self._idle():
            return max(idle, key=lambda s: s.nbytes).number
        if len(self._arena) < self._most or not self._kept or self._may_grow(nbytes):
            # Never one that is taken: numbers have gaps where a larger slot could not be had.
            return next(n for n in range(MOST_SLOTS + 1) if n not in self._arena)
        tier = next(t for t in KEEPING if t in self._kept)
        if tier not in self._sacrificed:
            self._sacrificed.add(tier)
            _log.warning(
                "no memory for a slot beside the newest snapshot: while one is copied and written "
                "the %s tier has none whole",
                tier,
            )
        return self._kept[tier]

    def _may_grow(self, nbytes: int) -> bool:
        """Tell whether there is memory for one more: near tiers may each keep another snapshot."""
        needed = 1 + len({*self._kept.values()})
        if self._wanted is not None or len(self._arena) >= min(needed, MOST_SLOTS):
            return False
        return nbytes <= available_bytes() // 4

    def _make(self, number: int, nbytes: int) -> Slot:
        old = self._arena.pop(number, None)
        if old is not None:  # first, so that both need not fit
            self._withdraw(old)
            old.close()
        slot = self._arena[number] = Slot(number, nbytes)
        self._most = slots_for(nbytes, self._wanted, available_bytes() + nbytes)
        self._announce(slot)
        return slot

    def take(self, slot: Slot, job: int) -> None:
        """Give a slot to a job: what lay in it is gone."""
        with self._free:
            self._kept = {t: n for t, n in self._kept.items() if n != slot.number}
            self._taken[slot.number] = job

    def keep(self, tier: str, job: int) -> None:
        """Say that a job's snapshot is the newest complete one of a near tier."""
        with self._free:
            number = next((n for n, j in self._taken.items() if j == job), None)
            if tier in KEEPING and number is not None:
                self._kept[tier] = number
                self._free.notify_all()

    def release(self, job: int) -> None:
        """Say that a job needs its slot no more."""
        with self._free:
            self._taken = {n: j for n, j in self._taken.items() if j != job}
            self._free.notify_all()

    def fail(self, error: CkptdError) -> None:
        """Let every `acquire` from now on raise `error`."""
        with self._free:
            self._dead = self._dead or error
            self._free.notify_all()

    def close(self) -> None:
        """Let go of all memory of this process. Idempotent."""
        with self._free:
            for slot in self._arena.values():
                slot.close()
            self._arena.clear()
