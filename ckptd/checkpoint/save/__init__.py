"""Writing a checkpoint: slots, the writing process, tiers, the commit. No torch.

Plugins save with the names below. Each is imported on first use, so that an import of one module
here costs that module only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.checkpoint.save.boxes import BoxRoot, BoxSave, BoxTensor

__all__ = ["BoxRoot", "BoxSave", "BoxTensor"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ckptd.checkpoint.save.boxes"), name)
