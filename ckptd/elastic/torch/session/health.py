"""Health check of devices between generations: a kernel on each, caches emptied.

In it: words of the fault; which devices are looked at.

An error of a device may be sticky: every later call of the process fails with it, and only another
process is rid of it. A process that went on would be found out in the next generation, which would
end for it.
"""

from __future__ import annotations

import gc
import threading
import time

import torch

from ckptd.base.torch.device import DeviceKind, accelerator

FAILS = "the device fails"
"""With this begins what `fault_of_devices` says of one that raises; another is only late."""


def fault_of_devices(until: float) -> str:
    """Run a kernel on each device that this process uses, behind all that is queued there.

    Parameters
    ----------
    until
        When to give up, by ``time.monotonic``.

    Returns
    -------
    str
        What is wrong; empty if nothing is, or no device is in use.
    """
    kind = accelerator()
    if kind is None or not kind.is_in_use:
        return ""
    current = kind.current_device()  # of the program's thread: another one begins on the first
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(_look(kind, current)), name="ckptd-health", daemon=True
    )
    began = time.monotonic()
    thread.start()
    thread.join(max(0.0, until - began))
    if not found:
        return f"the device has not finished what is queued after {time.monotonic() - began:.1f} s"
    return found[0]


def _look(kind: DeviceKind, current: torch.device) -> str:
    try:
        for device in _used(kind, current):
            try:
                _run_kernel(kind, device)
            except torch.OutOfMemoryError:
                # The generation that is left fills the device, in cycles that wait to be collected.
                gc.collect()
                empty_caches()
                _run_kernel(kind, device)
    except Exception as error:  # noqa: BLE001 - else this thread would end without a word
        return f"{FAILS}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _run_kernel(kind: DeviceKind, device: torch.device) -> None:
    with kind.on(device):
        value = torch.ones(1, device=device) + 1
        synchronize = getattr(kind.module, "synchronize", None)
        if synchronize is not None:  # of all streams, where there are any
            synchronize()
        if (found := value.item()) != 2:
            raise RuntimeError(f"{device} computes 1 + 1 = {found}")


def _used(kind: DeviceKind, current: torch.device) -> list[torch.device]:
    """Return the devices on which this process holds memory; the current one where there is none.

    On another one a look would make a context, which holds memory of others until the process ends.
    """
    reserved = getattr(kind.module, "memory_reserved", None)
    count = getattr(kind.module, "device_count", None)
    if reserved is None or count is None:
        return [current]
    every = (torch.device(kind.type, index) for index in range(int(count())))
    return [device for device in every if reserved(device)] or [current]


def empty_caches() -> None:
    """Give back the memory of devices that this process does not use but keeps."""
    kind = accelerator()
    if kind is not None and kind.is_in_use:
        empty = getattr(kind.module, "empty_cache", None)
        if empty is not None:
            empty()
