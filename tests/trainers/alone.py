"""A trainer that takes the variables of a launcher for a world of several."""

from __future__ import annotations

import os

import torch.distributed as dist

__all__ = ["alone"]


def alone() -> None:
    """Leave the process group, and forget it."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
