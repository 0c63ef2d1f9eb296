"""Verbs that watch a job.

The names below are what plugins use of them, imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.monitor.cli.watch_parts import DaemonSupervisor

__all__ = ["DaemonSupervisor"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ckptd.monitor.cli.watch_parts"), name)
