"""FSDP2 that goes on when ranks come or go: each generation shards anew, evenly or not.

    ckptd run --nnodes 2:4 --nproc-per-node 1 docs/examples/elastic_fsdp2.py RUN-FOLDER

on each node; see ``docs/guide/in-process.md``.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptd
from ckptd.elastic import ElasticSampler, Schedule, World, global_tokens, scale_gradients, session

STEPS = int(os.environ.get("STEPS", "200"))
WIDTH = int(os.environ.get("WIDTH", "62"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
DATA = torch.randn(257, 16, generator=torch.Generator().manual_seed(1))
SCHEDULE = Schedule(size=len(DATA), microbatch=2, microbatches=12, seed=5)


def train(world: World, folder: Path) -> str:
    """Train in one generation; returns a digest of the parameters after the last step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    mesh = world.mesh()["dp"]
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ElasticSampler(SCHEDULE)
    state = {"model": model, "optim": optimizer, "data": sampler}
    tiers = (ckptd.Memory(every=1), ckptd.Peer(every=1))
    with ckptd.Checkpointer(str(folder / "ckpts"), every=50, tiers=tiers) as checkpointer:
        if (step := checkpointer.latest()) is not None:
            checkpointer.load(state)
            parameters = digest(model)
            if world.rank == 0:
                note(folder, world, {"loaded": step, "parameters": parameters})
        batches = iter(sampler)
        while sampler.step < STEPS:
            begun = time.monotonic()
            samples = 0
            # Ranks differ by a micro-batch at most: all make as many calls, some with nothing.
            calls = -(-SCHEDULE.microbatches // world.world_size)
            for number in range(calls):
                ids = next(batches) if number < len(sampler.indices) else []
                sharded.set_requires_gradient_sync(number + 1 == calls)
                model(DATA[ids]).square().sum().backward()
                samples += len(ids)
            scale_gradients(model.parameters(), global_tokens(samples), averaged=True)
            optimizer.step()
            optimizer.zero_grad()
            parameters = digest(model)
            ids = SCHEDULE.samples(sampler.consumed, SCHEDULE.batch).tolist()
            sampler.advance()
            if world.rank == 0:
                row = {"step": sampler.step, "parameters": parameters, "ids": ids}
                note(folder, world, row)
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - begun)))
            checkpointer.save(sampler.step, state)
    last = digest(model)
    dist.destroy_process_group()
    return last


def digest(model: torch.nn.Module) -> str:
    """Return what tells two sets of whole parameters apart; every rank calls it."""
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p.full_tensor().detach().numpy().tobytes() for p in sharded]
    return hashlib.sha256(b"".join(whole)).hexdigest()


def note(folder: Path, world: World, row: dict[str, object]) -> None:
    """Add a line about a step."""
    row |= {"generation": world.generation, "ranks": world.world_size, "at": time.monotonic()}
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    last = session(train, Path(sys.argv[1]))
    sys.stdout.write(f"{last}\n")
