"""Make what torch_checkpointing saves: a file of each item of each rank.

torchrun --nproc-per-node 2 make_checkpointing.py FOLDER

Without the metadata for other cuts, whose collectives want CUDA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    saved = {"model": weights, "optimizer": states, "step": 7, "loader": {"at": dist.get_rank()}}
    manager = config.build()
    manager.save(str(folder), saved)
    manager.close()
    named = {f"model.{n}": t for n, t in weights.items()}
    named |= {
        f"optimizer.state.{n}.{key}": t for n, s in states["state"].items() for key, t in s.items()
    }
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named.items()}
    if dist.get_rank() == 0:
        np.savez(folder / "expected.npz", **{n: t.detach().numpy() for n, t in whole.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
