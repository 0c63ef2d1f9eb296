"""A small network under every parallelism that torch brings, for rank tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH = 18
VOCABULARY = 31


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Sizes divide by nothing in particular; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and its optimizer, laid out as `kind` says."""
    torch.manual_seed(seed)
    model = Net()
    world = dist.get_world_size()
    shard = None
    if kind in ("fsdp+tp", "tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        shard = mesh["dp"] if kind == "fsdp+tp" else None
    elif kind == "hsdp":
        shard = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
    elif kind == "unnamed":
        shard = init_device_mesh("cpu", (world,))
    elif kind == "fsdp":
        shard = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    elif kind != "replicated":
        raise ValueError(kind)
    if shard is not None:
        for block in model.blocks:
            fully_shard(block, mesh=shard)
        fully_shard(model, mesh=shard)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optim: torch.optim.Optimizer, count: int = 1) -> None:
    """Train on the same batch on every rank, so that replicas stay replicas."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
        model(ids).float().square().mean().backward()
        optim.step()
        optim.zero_grad()


def whole(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every parameter and moment in full."""
    out: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        out[name] = _full(parameter)
        for key, value in optim.state[parameter].items():
            out[f"{name}/{key}"] = _full(value)
    return out


def _full(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.detach().clone()
