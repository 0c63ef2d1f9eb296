"""Page-locked memory for copies from CUDA devices: slots of the arena, and buffers in their place.

A copy into memory that is not page-locked holds up the thread that asks for it. Slots are locked
where they lie, so that bytes reach them without a copy in between.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import ClassVar

import numpy as np
import torch

from ckptd.engine.arena import Slot

__all__ = ["Pins"]

_log = logging.getLogger("ckptd")
PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, not only for the current one."""


class _Pin:
    """One locked slot; unlocks it when the slot is closed and nothing is copied to it any more."""

    _left: ClassVar[set[_Pin]] = set()
    """Slots that were closed while a device still copied to them."""

    def __init__(self, slot: Slot, address: int) -> None:
        self.nbytes = slot.nbytes
        self._address = address
        self._slot = weakref.ref(slot)
        self._users = 0
        self._mapped: object = None
        self._lock = threading.Lock()

    def use(self, more: int) -> None:
        """Count who copies; the last one unlocks a slot that was closed meanwhile."""
        with self._lock:
            self._users += more
            if not self._users and self in self._left:
                self._left.discard(self)
                self._unlock()
                self._mapped = None

    def release(self) -> None:
        """Unlock the slot, which is about to be closed, as soon as nothing is copied to it."""
        with self._lock:
            if not self._users:
                self._unlock()
                return
            # To unlock it now would wait for a device that hangs. What is locked stays mapped:
            # other memory at its address would be taken for it, and could not be locked itself.
            slot = self._slot()
            self._mapped = None if slot is None else np.frombuffer(slot.data, dtype=np.uint8)
            self._left.add(self)

    def _unlock(self) -> None:
        status = int(torch.cuda.cudart().cudaHostUnregister(self._address))
        self.nbytes = 0
        if status:
            _clear_error()
            _log.warning("CUDA did not unlock a slot: error %d", status)


class Pins:
    """Locks slots, once each.

    Parameters
    ----------
    budget
        Bytes that may be locked at a time; None is three quarters of the machine's memory.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._known: weakref.WeakKeyDictionary[Slot, _Pin | None] = weakref.WeakKeyDictionary()

    @property
    def locked(self) -> int:
        """Bytes that are locked now."""
        return sum(p.nbytes for p in self._known.values() if p is not None)

    def lock(self, slot: Slot) -> bool:
        """Lock a slot unless it is already; False where that cannot be had, which is logged."""
        if slot not in self._known:
            pin = self._known[slot] = self._register(slot)
            if pin is not None:
                slot.before_close = pin.release
        return self._known[slot] is not None

    def use(self, slot: Slot, more: int) -> None:
        """Count who copies to a locked slot: `more` is 1 or -1."""
        pin = self._known.get(slot)
        if pin is not None:
            pin.use(more)

    def _register(self, slot: Slot) -> _Pin | None:
        if not slot.nbytes:
            return None
        if self._budget is None:
            self._budget = 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        if self.locked + slot.nbytes > self._budget:
            why = f"more than {self._budget / 1e9:.1f} GB would be locked"
        else:
            address = np.frombuffer(slot.data, dtype=np.uint8).ctypes.data
            cudart = torch.cuda.cudart()
            status = int(cudart.cudaHostRegister(address, slot.nbytes, PORTABLE))
            if not status:
                return _Pin(slot, address)
            _clear_error()
            why = f"CUDA error {status}"
        _log.warning(
            "%.2f GB for snapshots cannot be page-locked (%s): copies go through a small buffer, "
            "and optimizers' steps wait for them",
            slot.nbytes / 1e9,
            why,
        )
        return None


def _clear_error() -> None:
    """Take back what a refused call leaves behind: torch would blame the next kernel for it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        _log.debug("taken back after a refused call: %s", error)
