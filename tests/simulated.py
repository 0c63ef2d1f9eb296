"""Tests on simulated devices: skipped, and said so, where none can be made."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import pytest

from tests.simdevice import Simulator, installed, lacking

__all__ = ["ON_SIMULATED_DEVICES", "failing"]

_why = lacking()
ON_SIMULATED_DEVICES = [
    pytest.mark.skipif(_why is not None, reason=f"NO SIMULATED DEVICE: {_why}"),
    # One worker starts the process that has everything imported, and forks one for each test.
    pytest.mark.xdist_group("simdevice"),
]
"""Marks for modules whose tests call `tests.simdevice.run`."""


def failing(
    programs: Mapping[str, Callable[[Simulator], object]], schedule: str = "eager"
) -> dict[str, str]:
    """Call each program in a test of its own of this process's devices; return traces of failures.

    A fork costs more than most programs.
    """
    failed = {}
    for name, program in programs.items():
        with installed().test(schedule) as simulator:
            try:
                program(simulator)
                assert not simulator.problems, simulator.problems
            except BaseException:  # noqa: BLE001 - all that fail are named, by pytest as well
                failed[name] = traceback.format_exc()
    return failed
