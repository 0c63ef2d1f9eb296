"""Checkpoints of any format as named tensors and objects; names for plugins; no torch.

The names below are what plugins use, to read a checkpoint and to add a format. They are imported
on first use: a program that imports a module here pays for that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.base.runtime.pool import batches
    from ckptd.checkpoint.load.source import CheckpointReader
    from ckptd.readers.base import Foreign, ForeignPiece, FormatReader, Listing

__all__ = ["CheckpointReader", "Foreign", "ForeignPiece", "FormatReader", "Listing", "batches"]


_HOMES = dict.fromkeys(__all__, "ckptd.readers.base") | {
    "CheckpointReader": "ckptd.checkpoint.load.source",
    "batches": "ckptd.base.runtime.pool",
}

__getattr__ = front(__name__, _HOMES)
