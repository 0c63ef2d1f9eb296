"""Verbs that watch a job; the names that plugins use of them.

The names below are what plugins use of them, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.monitor.cli.watch_parts import DaemonSupervisor
    from ckptd.monitor.daemon.client import connect

__all__ = ["DaemonSupervisor", "connect"]

_HOMES = {"DaemonSupervisor": "cli.watch_parts", "connect": "daemon.client"}

__getattr__ = front(__name__, {name: f"ckptd.monitor.{home}" for name, home in _HOMES.items()})
