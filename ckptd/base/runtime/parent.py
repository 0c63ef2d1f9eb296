"""The process that started this one, and what is to end with it."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # loaded before any fork


def ends_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    if _prctl is not None:  # Linux
        _prctl(_PR_SET_PDEATHSIG, number)
