"""A pipeline whose stages and replicas change when ranks come or go.

    ckptd run --nnodes 2:4 --nproc-per-node 1 --shapes 2,1,1:2,2,1 elastic_pipeline.py RUN-FOLDER

on each node; see ``docs/guide/in-process.md``. The layers are dealt out over ``world.shape.pp``
stages, and each of ``world.shape.dp`` replicas of the pipeline takes its share of micro-batches.
Tensors have the names of their layers in the whole model, so that any stage loads what any other
has saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.data.schedule import share
from ckptd.elastic import ElasticSampler, Schedule, World, session

STEPS = int(os.environ.get("STEPS", "200"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
LAYERS, WIDTH = 6, 24
DATA = torch.randn(257, WIDTH, generator=torch.Generator().manual_seed(1))
SCHEDULE = Schedule(size=len(DATA), microbatch=2, microbatches=12, seed=5)


class Stage(torch.nn.Module):
    """The layers of one stage, by their numbers in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next stage gets."""
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def train(world: World, folder: Path) -> dict[str, str]:
    """Train in one generation; returns digests of this stage after the last step."""
    dist.init_process_group("gloo")
    mesh = world.mesh()
    replicas = mesh.get_group("dp")
    before, after = world.rank - world.shape.dp, world.rank + world.shape.dp
    stage = Stage(share(LAYERS, world.shape.pp, world.place.pp))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    sampler = ElasticSampler(SCHEDULE, rank=world.place.dp, world=world.shape.dp)
    state = {"model": stage, "optim": optimizer, "data": sampler}
    tiers = (ckptd.Memory(every=1), ckptd.Peer(every=1))
    with ckptd.Checkpointer(str(folder / "ckpts"), every=50, tiers=tiers) as checkpointer:
        if (step := checkpointer.latest()) is not None:
            checkpointer.load(state)
            note(folder, world, stage, {"loaded": step})
        batches = iter(sampler)
        while sampler.step < STEPS:
            begun = time.monotonic()
            for _ in sampler.indices:
                one_microbatch(world, stage, before, after, DATA[next(batches)])
            for gradient in [p.grad for p in stage.parameters() if p.grad is not None]:
                dist.all_reduce(gradient, group=replicas)
                gradient /= SCHEDULE.batch
            optimizer.step()
            optimizer.zero_grad()
            ids = SCHEDULE.samples(sampler.consumed, SCHEDULE.batch).tolist()
            sampler.advance()
            note(folder, world, stage, {"step": sampler.step, "ids": ids})
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - begun)))
            checkpointer.save(sampler.step, state)
    dist.destroy_process_group()
    return digests(stage)


def one_microbatch(
    world: World, stage: Stage, before: int, after: int, samples: torch.Tensor
) -> None:
    """Carry one micro-batch through the pipeline and back."""
    first, last = world.place.pp == 0, world.place.pp == world.shape.pp - 1
    x = samples if first else torch.empty(len(samples), WIDTH)
    if not first:
        dist.recv(x, before)
        x.requires_grad_()
    y = stage(x)
    if last:
        y.square().sum().backward()
    else:
        dist.send(y.detach(), after)
        gradient = torch.empty_like(y)
        dist.recv(gradient, after)
        y.backward(gradient)
    if x.grad is not None:
        dist.send(x.grad, before)


def digests(stage: Stage) -> dict[str, str]:
    """Return what tells two sets of parameters apart, by the layer's number."""
    found = {}
    for number, layer in stage.layers.items():
        raw = b"".join(p.detach().numpy().tobytes() for p in layer.parameters())
        found[number] = hashlib.sha256(raw).hexdigest()
    return found


def note(folder: Path, world: World, stage: Stage, row: dict[str, object]) -> None:
    """Add a line about a step; the first replica speaks for its stage."""
    if world.place.dp != 0:
        return
    row |= {"parameters": digests(stage), "generation": world.generation}
    row |= {"ranks": world.world_size, "stage": world.place.pp, "at": time.monotonic()}
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    last = session(train, Path(sys.argv[1]))
    sys.stdout.write(f"{last}\n")
