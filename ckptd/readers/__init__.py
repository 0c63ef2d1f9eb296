"""Checkpoints of any format as named tensors and objects. No torch.

The names below are what plugins use, to read a checkpoint and to add a format. They are imported
on first use: a program that imports a module here pays for that one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.base.runtime.pool import batches
    from ckptd.checkpoint.load.source import CheckpointReader
    from ckptd.readers.base import Foreign, ForeignPiece, FormatReader, Listing

__all__ = ["CheckpointReader", "Foreign", "ForeignPiece", "FormatReader", "Listing", "batches"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {
        "CheckpointReader": "ckptd.checkpoint.load.source",
        "batches": "ckptd.base.runtime.pool",
    }
    return getattr(importlib.import_module(homes.get(name, "ckptd.readers.base")), name)
