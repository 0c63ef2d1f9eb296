"""Checkpoints of any format as named tensors and objects. No torch.

The names below are what plugins use, to read a checkpoint and to add a format. They are imported
on first use: whoever imports a module here pays for that one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.readers.base import Foreign, ForeignPiece, FormatReader, Listing
    from ckptd.readers.reader import CheckpointReader, batches

__all__ = ["CheckpointReader", "Foreign", "ForeignPiece", "FormatReader", "Listing", "batches"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "reader" if name in ("CheckpointReader", "batches") else "base"
    return getattr(importlib.import_module(f"ckptd.readers.{module}"), name)
