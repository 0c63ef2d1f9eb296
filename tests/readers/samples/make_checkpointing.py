"""Make what torch_checkpointing saves: a file of each item of each rank.

torchrun --nproc-per-node 2 make_checkpointing.py FOLDER

With ``metadata.pkl`` for other cuts; its collectives ask for CUDA, and run on the CPU here. In
``FOLDER/safetensors`` the model is in files of safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, metadata_manager
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


class OnCpu:
    """torch, but that what asks for CUDA is made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(values: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)


metadata_manager.torch = OnCpu()
torch.Tensor.cuda = lambda self: self


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    saved = {"model": weights, "optimizer": states, "step": 7, "loader": {"at": dist.get_rank()}}
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    for where, how in ((folder, None), (folder / "safetensors", layout)):
        config = CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        config.items = {
            "model": ItemSpec(resharder=DefaultResharder(), layout=how),
            "optimizer": ItemSpec(resharder=DefaultResharder()),
        }
        manager = config.build()
        manager.save(str(where), saved)
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
