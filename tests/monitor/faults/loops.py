"""What a step trains: a small model in each of the usual ways to spread one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["MODELS", "Training"]

WIDTH = 32


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def _ddp() -> nn.Module:
    return DistributedDataParallel(_net())


def _fsdp() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _tp() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(_net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class _ByHand(nn.Module):
    """Gradients averaged by calls of our own, one a parameter, all under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def average(self) -> None:
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        for work in works:
            if work is not None:
                work.wait()


class _Pipe(nn.Module):
    """Each rank is a stage: takes what the one before sends, hands it on, and back again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5 + dist.get_rank())
        self.stage = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
        self.input = x.requires_grad_()
        self.output = torch.tanh(self.stage(self.input))
        if rank < last:
            dist.send(self.output.detach(), rank + 1)
        return self.output

    def backward(self, loss: Tensor) -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank == last:
            loss.backward()
        else:
            grad = torch.empty_like(self.output)
            dist.recv(grad, rank + 1)
            self.output.backward(grad)
        if rank and self.input.grad is not None:
            dist.send(self.input.grad, rank - 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hand": _ByHand,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "tp": _tp,
    "pipe": _Pipe,
}


class Training:
    """A model and its optimizer."""

    def __init__(self, loop: str) -> None:
        self.model = MODELS[loop]()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        # Ranks of one tensor-parallel group see the same data.
        self._stream = 0 if loop == "tp" else dist.get_rank()

    def step(self, number: int) -> float:
        """Make one step on data that step and rank decide; return the loss of this rank."""
        data = torch.Generator().manual_seed(1000 * number + self._stream)
        self._optimizer.zero_grad()
        loss = self.model(torch.randn(8, WIDTH, generator=data)).square().mean()
        if isinstance(self.model, _Pipe):
            self.model.backward(loss)
        else:
            loss.backward()
        if isinstance(self.model, _ByHand):
            self.model.average()
        self._optimizer.step()
        return float(loss.detach())

    def first(self) -> Tensor:
        """Return the first parameter of this rank, as this rank holds it."""
        parameter = next(self.model.parameters())
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def digest(self) -> str:
        """Return a digest of all parameters of this rank."""
        told = hashlib.sha256()
        for parameter in self.model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            told.update(local.detach().contiguous().numpy().tobytes())
        return told.hexdigest()
