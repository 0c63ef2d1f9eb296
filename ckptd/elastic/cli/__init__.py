"""Verbs that run and control a job.

The names below are what plugins use of them, imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.elastic.cli.run import controller_settings, separated, slots_of

__all__ = ["controller_settings", "separated", "slots_of"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ckptd.elastic.cli.run"), name)
