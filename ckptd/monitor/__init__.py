"""Communicator health: what each rank shows, and what is wrong with whom.

`attach`, `detach`, `step` and `phase` belong to a training program: they need torch, and are
imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.train.recorder import attach, detach, phase, step

__all__ = ["attach", "detach", "phase", "step"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module("ckptd.train.recorder"), name)
    globals()[name] = value
    return value
