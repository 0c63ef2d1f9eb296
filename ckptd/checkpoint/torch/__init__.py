"""The API of training loops. Torch is imported here and nowhere below; names on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.checkpoint.torch.checkpointer import Checkpointer
    from ckptd.checkpoint.torch.loader import LoadReport
    from ckptd.checkpoint.torch.replicas import sample_digest

__all__ = ["Checkpointer", "LoadReport", "sample_digest"]

_HOMES = {"Checkpointer": "checkpointer", "LoadReport": "loader", "sample_digest": "replicas"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
