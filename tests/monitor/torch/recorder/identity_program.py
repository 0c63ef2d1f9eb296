"""A small training program; test_recorder_identity.py runs it watched and unwatched.

    identity_program.py PROGRAM FOLDER

Each rank leaves a file in the folder, named by its rank: a hash of what it has computed. With
``WATCHED`` in the environment it attaches a recorder, by hand.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ckptd.monitor

STEPS = 5
WIDTH = 16

# What one step computes, from its number.
Step = Callable[[int], torch.Tensor]
Program = tuple[torch.nn.Module, Step]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return y


def batch(step: int, part: int) -> torch.Tensor:
    """Return the samples of a step for one part of the data-parallel ranks."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(model: torch.nn.Module, forward: Callable[[int], torch.Tensor]) -> Program:
    """Train by the loss that `forward` returns."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(number)
        if loss.requires_grad:  # a pipeline goes back by itself
            loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def ddp() -> Program:
    model = DistributedDataParallel(torch.nn.Sequential(Block(), Block()))
    return trained(model, lambda n: model(batch(n, dist.get_rank())).square().mean())


def fsdp_tp() -> Program:
    """Each block over both ranks of a pair, and the parts over the pairs."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    part = mesh["dp"].get_local_rank()
    return trained(model, lambda n: model(batch(n, part)).square().mean())


def pipeline_fsdp() -> Program:
    """Two stages; the parameters of each over the ranks that have it."""
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    stage, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = torch.nn.Sequential(Block(), Block())[stage]
    fully_shard(model, mesh=mesh["dp"])
    schedule = Schedule1F1B(
        PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        n_microbatches=4,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )

    def forward(number: int) -> torch.Tensor:
        samples = batch(number, part)
        if stage == 0:
            schedule.step(samples)
            return torch.zeros(())
        losses: list[torch.Tensor] = []
        schedule.step(target=samples.flip(0), losses=losses)
        return torch.stack(losses).detach()

    return trained(model, forward)


def compiled() -> Program:
    """Functional collectives within what PyTorch compiles, forwards and backwards."""
    model = torch.nn.Sequential(Block(), Block())
    group = dist.group.WORLD
    assert group is not None

    @torch.compile(backend=os.environ.get("BACKEND", "aot_eager"), fullgraph=True)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(model(x).detach(), "sum", group)
        z = functional.all_gather_tensor(y * 2, 0, group)
        loss: torch.Tensor = (model(x) * (y + z[: len(y)])).square().mean()
        return loss

    return trained(model, lambda n: loss_of(batch(n, dist.get_rank())))


PROGRAMS: dict[str, Callable[[], Program]] = {
    p.__name__: p for p in (ddp, fsdp_tp, pipeline_fsdp, compiled)
}


def main(name: str, folder: str) -> None:
    # Before those that wait for this process give up: a hang shows where.
    faulthandler.dump_traceback_later(450.0 if "RANK" in os.environ else 240.0, exit=True)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if "WATCHED" in os.environ:
        assert ckptd.monitor.attach().source == os.environ["CKPTD_RECORDER"]
    torch.manual_seed(1)
    model, step = PROGRAMS[name]()
    seen = hashlib.sha256()
    for number in range(STEPS):
        ckptd.monitor.step(number)
        seen.update(step(number).numpy().tobytes())
    with ckptd.monitor.phase("eval"):
        for parameter in model.parameters():
            seen.update(local(parameter.detach()).numpy().tobytes())
        dist.barrier()
    Path(folder, str(dist.get_rank())).write_text(seen.hexdigest())
    ckptd.monitor.detach()
    # Before its group: a reducer that is the last to hold one of gloo waits for threads with the
    # GIL, which they may want, and the process hangs.
    del model, step
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
