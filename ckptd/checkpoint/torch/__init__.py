"""What a training loop imports: torch lives here and nowhere below."""

from __future__ import annotations

from ckptd.checkpoint.root.auto import Auto
from ckptd.checkpoint.root.policy import Every, Keep
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.checkpoint.torch.checkpointer import Checkpointer
from ckptd.checkpoint.torch.data.batches import Batches
from ckptd.checkpoint.torch.loader import LoadReport
from ckptd.checkpoint.torch.options import CopyOptions, Preemption, Storage
from ckptd.checkpoint.torch.replicas import sample_digest
from ckptd.checkpoint.torch.state.leaves import PerRank
from ckptd.checkpoint.torch.state.rng import Rng

__all__ = [
    "Auto",
    "Batches",
    "Checkpointer",
    "CopyOptions",
    "Every",
    "Keep",
    "LoadReport",
    "PerRank",
    "Preemption",
    "Rng",
    "SaveHandle",
    "Storage",
    "sample_digest",
]
