"""What a training loop imports: torch lives here and nowhere below."""

from __future__ import annotations

from ckptd.root.auto import Auto
from ckptd.root.policy import Every, Keep
from ckptd.save.handle import SaveHandle
from ckptd.train.checkpointer import Checkpointer
from ckptd.train.data.batches import Batches
from ckptd.train.hooks import robust
from ckptd.train.loader import LoadReport
from ckptd.train.replicas import sample_digest
from ckptd.train.state.leaves import PerRank
from ckptd.train.state.rng import Rng

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
    "robust",
    "sample_digest",
]
