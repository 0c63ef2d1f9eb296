"""Checkpoints of torch's DCP that ranks write, beside what torch says the tensors are.

Each function trains a small model for some steps, saves it below a folder, and returns the whole
tensors by their names in the checkpoint: on rank 0, or on each rank those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.interop.worlds import quiet

__all__ = ["fsdp1", "fsdp2", "hsdp", "pipeline"]

Tensors = dict[str, torch.Tensor]
WIDTH, WORDS = 10, 31


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 22) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.norm(x + self.scale * self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """An embedding, blocks and a head; a pipeline's stage has some of them."""

    def __init__(self, layers: range = range(3), *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def fsdp2(folder: str, *, flatten: bool, half: bool) -> Tensors:
    """FSDP2 on all ranks, AdamW with two groups; no dimension is a multiple of three."""
    net = _cut(Net(), init_device_mesh("cpu", (dist.get_world_size(),)), half=half)
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return _train_and_save(net, torch.optim.AdamW(groups, lr=1e-2), folder, flatten=flatten)


def hsdp(folder: str) -> Tensors:
    """Two replicas of two shards; SGD with momentum."""
    net = _cut(Net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard")))
    return _train_and_save(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), folder)


def pipeline(folder: str) -> Tensors:
    """Two stages, each of FSDP x TP on 2 x 2 ranks, saved as one checkpoint by their own names."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    net = Net(range(2 * stage, 2 * stage + 2), first=stage == 0, last=stage == 1)
    for layer in net.layers.values():
        parallelize(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    net = _cut(net, mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    # Nobody sends between the stages here: what matters is who holds what.
    shape = (2, 5) if stage == 0 else (2, 5, WIDTH)
    batch = torch.randint(WORDS, shape) if stage == 0 else torch.randn(shape)
    return _train_and_save(net, optimizer, folder, batch=batch)


def fsdp1(folder: str, *, original: bool, hybrid: bool) -> Tensors:
    """FSDP1 with flat parameters, its sharded state; rank 0 adds the full one as a file."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    quiet()
    torch.manual_seed(1)
    strategy, mesh = ShardingStrategy.FULL_SHARD, None
    if hybrid:
        strategy = ShardingStrategy.HYBRID_SHARD
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    net = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    whole = _train_and_save(net, optimizer, folder)
    if dist.get_rank() == 0:
        torch.save(_nested(whole), Path(folder).with_suffix(".pt"))
    dist.barrier()
    return whole


def _cut(net: Net, mesh: Any, *, half: bool = False) -> Any:
    quiet()
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net = net.to(torch.bfloat16) if half else net
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _train_and_save(
    net: Any,
    optimizer: torch.optim.Optimizer,
    folder: str,
    *,
    flatten: bool = False,
    batch: torch.Tensor | None = None,
) -> Tensors:
    for step in range(2):
        torch.manual_seed(100 * dist.get_rank() + step)
        x = torch.randint(WORDS, (2, 5)) if batch is None else batch
        net(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = get_state_dict(net, optimizer, options=options)
    dcp.save({"model": model, "optim": optim, "step": 2}, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    model, optim = get_state_dict(net, optimizer, options=full)
    return dict(_leaves({"model": model, "optim": optim}))


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Any:
    for key, one in value.items():
        if isinstance(one, dict):
            yield from _leaves(one, f"{prefix}{key}.")
        elif torch.is_tensor(one):
            yield f"{prefix}{key}", one.detach().clone()


def _nested(whole: Tensors) -> dict[str, Tensors]:
    return {"model": {k[6:]: v for k, v in whole.items() if k.startswith("model.")}}
