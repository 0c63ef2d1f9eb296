"""Verbs that watch a job.

The names below are what plugins use of them, imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.monitor.cli.watch_parts import DaemonSupervisor
    from ckptd.monitor.daemon.client import connect

__all__ = ["DaemonSupervisor", "connect"]

_HOMES = {"DaemonSupervisor": "cli.watch_parts", "connect": "daemon.client"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ckptd.monitor.{_HOMES[name]}"), name)
