"""Signs of NVIDIA's devices, from recorded answers of NVML."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ckptd_nccl.gpus
from ckptd.monitor import Sign
from ckptd_nccl.gpus import gpus


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Device(ctypes.Structure):
    pass


PLACES = [ctypes.c_int(n) for n in range(2)]


def handle(number: int) -> Any:
    """A new pointer to the device each time, as NVML gives."""
    return ctypes.cast(ctypes.pointer(PLACES[number]), ctypes.POINTER(Device))


class Event:
    def __init__(self, number: int, xid: int) -> None:
        self.device, self.eventData = handle(number), xid


class Recorded(ModuleType):
    """Answers of NVML for two devices with two links each."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    NVML_NVLINK_MAX_LINKS = 36
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.events: list[Event] = []
        self.ecc, self.reasons, self.replays = [0, 0], [0, 0], [5, 0]
        self.rows = [(0, 0, 0, 0)] * 2
        self.up = [[1, 1], [1, 0]]
        self.lost: set[int] = set()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Any:
        return handle(number)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, device: Any, kinds: int, events: object) -> None: ...

    def nvmlEventSetWait(self, events: object, timeout_ms: int) -> Event:
        if not self.events:
            raise NVMLError(10)
        return self.events.pop(0)

    def _number(self, device: Any) -> int:
        number = ctypes.cast(device, ctypes.POINTER(ctypes.c_int)).contents.value
        if number in self.lost:
            raise NVMLError(15)
        return number

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, since: int) -> int:
        return self.ecc[self._number(device)]

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        return self.rows[self._number(device)]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any) -> int:
        return self.reasons[self._number(device)]

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        if link >= 2:
            raise NVMLError(2)
        return self.up[self._number(device)][link]

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Any, link: int, kind: int) -> int:
        if kind:
            raise NVMLError(3)
        return self.replays[self._number(device)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def looked(look: Callable[[], Any] | None) -> list[tuple[str, str]]:
    assert look is not None
    found: list[Sign] = list(look())
    return [(sign.what, sign.text) for sign in found]


def test_what_a_device_shows_is_a_sign(nvml: Recorded) -> None:
    look = gpus()
    assert looked(look) == [], "a device that is well, and what was counted before"
    nvml.events = [Event(1, 79), Event(0, 31)]
    assert looked(look) == [
        ("xid 79", "Xid 79 of GPU 1"),
        ("program's xid", "Xid 31 of GPU 0"),
    ]
    nvml.ecc[1], nvml.reasons[0] = 2, 0x40
    assert looked(look) == [
        ("slowed down", "GPU 0: clocks are lowered for heat or power (reasons 0x40)"),
        ("ecc", "GPU 1: 2 new uncorrectable errors"),
    ]
    nvml.reasons[0], nvml.rows[0] = 0x4, (0, 1, 0, 1)
    assert looked(look) == [("ecc", "GPU 0: a row could not be remapped")]
    nvml.rows[0], nvml.up[0][1], nvml.replays[1] = (0, 1, 0, 0), 0, 30
    assert looked(look) == [
        ("nvlink down", "NVLink 1 of GPU 0 is down"),
        ("nvlink errors", "NVLink 0 of GPU 1 counts 30 more replays and recoveries"),
        ("nvlink errors", "NVLink 1 of GPU 1 counts 30 more replays and recoveries"),
    ]
    nvml.up[0][1], nvml.lost = 1, {1}
    assert looked(look) == [("gpu lost", "GPU 1 is lost")]


def test_without_library_or_driver_there_is_no_source(
    nvml: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise NVMLError(12)

    monkeypatch.setattr(nvml, "nvmlInit", fails)
    assert gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() is None


def test_the_library_has_each_name_that_is_used() -> None:
    real = importlib.import_module("pynvml")
    text = Path(ckptd_nccl.gpus.__file__).read_text()
    names = set(re.findall(r"nvml\.(\w+)", text)) - {"nvml"}
    assert len(names) > 10
    assert [name for name in names if not hasattr(real, name)] == []
    assert [
        n for n in dir(Recorded) if n.startswith(("nvml", "NVML")) and not hasattr(real, n)
    ] == []
