"""Page-locked slots: whoever lets go last unlocks them. No device is needed."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptd.base.torch.device import kind_of
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.torch.ondevice import DeviceCopies, DeviceSnapshot, Pins
from tests.processes import PATIENCE_S

NBYTES = 1 << 20
CUDA = kind_of("cuda")


class Driver:
    """Does what the CUDA runtime does with locked ranges, and knows of no device."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if any(a < address + nbytes and address < a + n for a, n in self.locked.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address), "unlocked after its memory went"
        return 0 if self.locked.pop(address, None) else 713


def is_mapped(address: int) -> bool:
    rows = Path("/proc/self/maps").read_text().splitlines()
    ranges = ([int(end, 16) for end in row.split()[0].split("-")] for row in rows)
    return any(start <= address < end for start, end in ranges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return driver


def address_of(slot: Slot) -> int:
    return np.frombuffer(slot.data, dtype=np.uint8).ctypes.data


def test_a_closed_slot_is_unlocked(driver: Driver) -> None:
    pins, slot = Pins(), Slot(0, NBYTES)
    assert pins.lock(slot, CUDA)
    assert pins.lock(slot, CUDA)
    assert list(driver.locked.values()) == [NBYTES]
    pins.use(slot, 1)
    pins.use(slot, -1)
    slot.close()
    assert not driver.locked
    assert pins.locked == 0


def test_a_slot_that_is_closed_while_it_is_copied_to_is_unlocked_by_the_last(
    driver: Driver,
) -> None:
    """Each recovery within a process left a locked range without memory behind it, for ever."""
    pins = Pins()
    for _ in range(4):
        slot = Slot(0, NBYTES)
        assert pins.lock(slot, CUDA), "an old range lies where this one is"
        address = address_of(slot)
        pins.use(slot, 1)
        pins.use(slot, 1)
        slot.close()
        assert address in driver.locked, "a device may still write there"
        assert is_mapped(address), "other memory may come to lie there"
        pins.use(slot, -1)
        assert address in driver.locked
        pins.use(slot, -1)
        assert not driver.locked
        del slot
        gc.collect()
        assert not is_mapped(address), "the memory itself is kept"
    assert pins.locked == 0


def test_a_slot_that_is_closed_while_it_is_locked_is_unlocked_behind_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locking takes seconds, and a recovery within the process closes slots without waiting."""
    begun, closed = threading.Event(), threading.Event()
    plain = driver.cudaHostRegister

    def slow(address: int, nbytes: int, flags: int) -> int:
        begun.set()
        assert closed.wait(PATIENCE_S)
        assert is_mapped(address), "what is being locked went"
        return plain(address, nbytes, flags)

    monkeypatch.setattr(driver, "cudaHostRegister", slow)
    copies, slot = DeviceCopies(), Slot(0, NBYTES)
    copies.lock_later(slot, [torch.device("cuda", 0)])
    assert begun.wait(PATIENCE_S)
    address = address_of(slot)
    assert not copies.pins.is_locked(slot, CUDA)
    copies.close()
    slot.close()
    closed.set()
    copies._locker.shutdown(wait=True)
    assert not driver.locked
    assert copies.pins.locked == 0
    del slot
    gc.collect()
    assert not is_mapped(address), "the memory itself is kept"
    assert not caplog.messages


def test_a_slot_that_is_closed_before_it_is_locked_is_not(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    pins, slot = Pins(), Slot(0, NBYTES)
    assert not pins.is_locked(slot, CUDA)
    slot.close()
    assert not pins.lock(slot, CUDA)
    assert not driver.locked
    assert not caplog.messages


def test_the_gate_orders_while_the_copying_ends() -> None:
    """`optimizer.step()` raised "dictionary changed size during iteration"."""
    snapshot = DeviceSnapshot.__new__(DeviceSnapshot)
    ordered: list[int] = []

    class Lane:
        def __init__(self, number: int) -> None:
            self.number = number

        def order(self) -> None:
            ordered.append(self.number)
            snapshot._lanes.clear()  # as the other thread does in `release`

    snapshot._lanes = {torch.device("cuda", n): Lane(n) for n in range(2)}  # type: ignore[misc]
    snapshot.order()
    assert ordered == [0, 1]


def test_what_keeps_a_slot_from_being_locked_is_logged(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that locks has nobody to raise it to."""

    def lost(device: torch.device) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "set_device", lost)
    copies, slot = DeviceCopies(), Slot(0, NBYTES)
    copies.lock_later(slot, [torch.device("cuda", 0)])
    copies._locker.submit(int).result(PATIENCE_S)
    copies.close()
    slot.close()
    assert not driver.locked
    (message,) = caplog.messages
    assert "the device is lost" in message
