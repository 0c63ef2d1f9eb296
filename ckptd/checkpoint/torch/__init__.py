"""The API of training loops; names on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.checkpoint.torch.checkpointer import Checkpointer
    from ckptd.checkpoint.torch.loader import LoadReport
    from ckptd.checkpoint.torch.replicas import sample_digest

__all__ = ["Checkpointer", "LoadReport", "sample_digest"]

_HOMES = {"Checkpointer": "checkpointer", "LoadReport": "loader", "sample_digest": "replicas"}

__getattr__ = front(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
