"""What a training loop imports: torch lives here and nowhere below."""

from __future__ import annotations

from ckptd.engine.auto import Auto
from ckptd.engine.handle import SaveHandle
from ckptd.engine.policy import Every, Keep
from ckptd.train.batches import Batches
from ckptd.train.checkpointer import Checkpointer
from ckptd.train.loader import LoadReport
from ckptd.train.perrank import PerRank
from ckptd.train.rng import Rng

__all__ = [
    "Auto",
    "Batches",
    "Checkpointer",
    "Every",
    "Keep",
    "LoadReport",
    "PerRank",
    "Rng",
    "SaveHandle",
]
