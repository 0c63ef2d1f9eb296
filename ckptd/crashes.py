"""Crash traces: stacks of all threads on stderr at SIGSEGV, SIGBUS, SIGABRT and their like."""

from __future__ import annotations

import faulthandler

__all__ = ["report_crashes"]

_STDERR = 2


def report_crashes() -> None:
    """Have a crash (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) leave all threads' stacks on stderr.

    That is the log of a process that has one. Where it is arranged already nothing changes.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR, all_threads=True)
