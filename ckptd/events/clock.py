"""The clock of events: CLOCK_MONOTONIC, mapped to wall time once a process."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["clock_id", "now_ns", "pair"]


def _take_pair() -> tuple[int, int]:
    """Read both clocks at one moment, as nearly as three tries can."""
    tries = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall, (before + after) // 2))
    _, wall, monotonic = min(tries)
    return wall, monotonic


_PAIR = _take_pair()
_OFFSET = _PAIR[0] - _PAIR[1]


def pair() -> tuple[int, int]:
    """Return what both clocks said when this process began: (wall, monotonic), nanoseconds."""
    return _PAIR


def now_ns() -> int:
    """Return nanoseconds since 1970; never steps back, whatever is done to the wall clock."""
    return time.monotonic_ns() + _OFFSET


def clock_id() -> str:
    """Name the monotonic clock: processes with one name read the very same clock.

    Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
    return f"{boot} {namespace}"
