"""Devices that do not exist, so that code for streams runs, and is tried, on any machine.

The guide is `docs/guide/simulated-device.md`.
"""

from __future__ import annotations

from tests.simdevice.loading import install, installed, lacking
from tests.simdevice.processes import run, run_simulated_ranks, simulated_play
from tests.simdevice.simulator import SCHEDULES, DeviceWait, Simulator

__all__ = [
    "SCHEDULES",
    "DeviceWait",
    "Simulator",
    "install",
    "installed",
    "lacking",
    "run",
    "run_simulated_ranks",
    "simulated_play",
]
