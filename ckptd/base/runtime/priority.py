"""Priority (nice) of threads that work in the background."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

LATER = 5
"""A quarter of a processor is left to such work where an ordinary thread wants all of it."""
LAST = 10
"""A tenth."""


def step_back(by: int) -> None:
    """Give other threads precedence over this one, for good: an ordinary user cannot take it back.

    Where a system has no priority of a thread, nothing changes.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # it is gone lower already
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)
