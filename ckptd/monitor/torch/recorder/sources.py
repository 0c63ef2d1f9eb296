"""`Source`: ways to hear of calls, their order (``CKPTD_RECORDER``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from ckptd.errors import UsageError
from ckptd.monitor.ring import RecorderState, RingWriter
from ckptd.monitor.torch.recorder.finite import FiniteCheck

Broken = Callable[[BaseException], None]
"""Told of a failure of the recorder itself; never raises."""

_NAMES = ("native", "python", "counters")


class Source(Protocol):
    """One way to hear of calls. Only `start` may raise."""

    name: str
    state: RecorderState
    """State of the recorder in the ring while this one is in use."""

    def start(self) -> None:
        """Hook into PyTorch and test that it works here.

        Raises whatever a PyTorch that is too different raises, and then leaves no hook behind.
        """

    def look(self, finite: FiniteCheck) -> None:
        """Give `finite` the inputs of sums from now on, where single calls are seen."""

    def silence(self) -> None:
        """Write nothing any more; hooks may stay, and let everything through. Never waits."""

    def stop(self) -> None:
        """Take all hooks away; harmless again."""

    def beat(self) -> None:
        """Do what is to be done now and then; the pulse calls it ten times a second."""


MakeSource = Callable[[RingWriter, Broken], Source]


def wanted() -> tuple[str, ...]:
    """Return the names of the sources to try, in order, as ``CKPTD_RECORDER`` says.

    ``auto``, or nothing: native where it has been built, else Python, else counters. The name of
    one: that one alone. ``off``: none.

    Raises
    ------
    UsageError
        It says something else.
    """
    said = os.environ.get("CKPTD_RECORDER", "") or "auto"
    if said in _NAMES:
        return (said,)
    if said in ("auto", "off"):
        return _NAMES if said == "auto" else ()
    raise UsageError(
        "unknown recorder",
        where="CKPTD_RECORDER",
        wanted=", ".join(("auto", *_NAMES, "off")),
        found=said,
    )
