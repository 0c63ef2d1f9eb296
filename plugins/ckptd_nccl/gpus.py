"""Health of NVIDIA's devices, by NVML: a source of signs for the watch (``ckptd.health``).

It needs the package ``nvidia-ml-py``, which is imported when the watch asks, and a driver; without
either there are no signs. It reads and sets nothing. Not run on a device: names and results of NVML
are those of ``nvidia-ml-py`` 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ckptd.monitor import Sign, VerdictKind

__all__ = ["gpus"]

_ANY = (
    VerdictKind.CRASH,
    VerdictKind.HANG,
    VerdictKind.COMM_HANG,
    VerdictKind.SLOW_RANK,
    VerdictKind.CORRUPTION,
)
_LINK = (VerdictKind.COMM_HANG, VerdictKind.SLOW_LINK, VerdictKind.SLOW_RANK, VerdictKind.CRASH)
_SLOW = (VerdictKind.SLOW_RANK,)
_PROGRAM_XIDS = frozenset({13, 31, 43, 45})
"""Errors of the program that runs on the device, most of all; not of the device."""
_SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80
"""Clocks are lowered by the hardware, for heat, or by its power brake."""
_MOST_EVENTS = 64
_FEW_ERRORS = 10


def gpus() -> Callable[[], Iterator[Sign]] | None:
    """Return what looks at all devices of this machine; None without the library or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        looked = _Gpus(pynvml)
    except pynvml.NVMLError:
        return None
    return looked.look


class _Gpus:
    """The devices, and what they counted at the last look."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._devices = [
            nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())
        ]
        self._before: dict[tuple[int, str, int], int] = {}
        self._events = None
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for device in self._devices:
                with suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(
                        device, nvml.nvmlEventTypeXidCriticalError, self._events
                    )

    def look(self) -> Iterator[Sign]:
        """Yield the signs of this moment."""
        yield from self._xids()
        for number, device in enumerate(self._devices):
            try:
                yield from self._one(number, device)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    yield Sign(
                        what="gpu lost", text=f"GPU {number} is lost", kinds=_ANY, weight=0.8
                    )

    def _xids(self) -> Iterator[Sign]:
        nvml = self._nvml
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait(self._events, 0)
            except nvml.NVMLError:  # none is left
                return
            xid, place = int(event.eventData), _place(event.device)
            where = next((n for n, d in enumerate(self._devices) if _place(d) == place), "?")
            mine = xid in _PROGRAM_XIDS
            yield Sign(
                what="program's xid" if mine else f"xid {xid}",
                text=f"Xid {xid} of GPU {where}",
                kinds=(VerdictKind.CRASH, VerdictKind.HANG) if mine else _ANY,
                weight=0.2 if mine else 0.6,
            )

    def _one(self, number: int, device: Any) -> Iterator[Sign]:
        nvml = self._nvml
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ecc = self._rose(number, "ecc", 0, nvml.nvmlDeviceGetTotalEccErrors, device, kind, since)
        rows = self._read(nvml.nvmlDeviceGetRemappedRows, device) or (0, 0, 0, 0)
        if ecc or any(rows[2:]):
            words = f"{ecc} new uncorrectable errors" if ecc else "a row waits to be remapped"
            words = "a row could not be remapped" if rows[3] else words
            yield Sign(what="ecc", text=f"GPU {number}: {words}", kinds=_ANY, weight=0.6)
        reasons = self._read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0
        if reasons & _SLOWDOWNS:
            text = f"GPU {number}: clocks are lowered for heat or power (reasons {reasons:#x})"
            yield Sign(what="slowed down", text=text, kinds=_SLOW, weight=0.5)
        yield from self._nvlinks(number, device)

    def _nvlinks(self, number: int, device: Any) -> Iterator[Sign]:
        nvml = self._nvml
        kinds = (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            up = self._read(nvml.nvmlDeviceGetNvLinkState, device, link)
            if up is None:  # the GPU has no more links
                return
            was = self._before.get((number, "up", link), 0)
            self._before[number, "up", link] = max(up, was)
            errors = sum(
                self._rose(
                    number, f"{k}", link, nvml.nvmlDeviceGetNvLinkErrorCounter, device, link, k
                )
                for k in kinds
            )
            if up < was:
                text = f"NVLink {link} of GPU {number} is down"
                yield Sign(what="nvlink down", text=text, kinds=_LINK, weight=0.6)
            elif errors > _FEW_ERRORS:
                text = f"NVLink {link} of GPU {number} counts {errors} more replays and recoveries"
                yield Sign(what="nvlink errors", text=text, kinds=_LINK, weight=0.3)

    def _rose(self, number: int, what: str, link: int, read: Any, *of: Any) -> int:
        """Return by how much a counter rose since the last look; 0 at the first one."""
        now = self._read(read, *of)
        if now is None:
            return 0
        was = self._before.get((number, what, link), now)
        self._before[number, what, link] = now
        return max(int(now) - int(was), 0)

    def _read(self, read: Any, *of: Any) -> Any:
        """Return what NVML says; None where the device has no such thing. A lost device raises."""
        try:
            return read(*of)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None


def _place(handle: Any) -> int | None:
    """Return what a handle points to: two handles of one device are two pointers."""
    return ctypes.cast(handle, ctypes.c_void_p).value
