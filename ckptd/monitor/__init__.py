"""Communicator health: what each rank shows, and what is wrong with whom.

What is public here belongs to a training program: it needs torch, and is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.train.recorder.recorder import attach, detach, phase, step
    from ckptd.train.recorder.replicas import check_replicas, watch_gradients

__all__ = ["attach", "check_replicas", "detach", "phase", "step", "watch_gradients"]

_MODULES = dict.fromkeys(("attach", "detach", "phase", "step"), "recorder") | dict.fromkeys(
    ("check_replicas", "watch_gradients"), "replicas"
)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"ckptd.train.recorder.{_MODULES[name]}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value
