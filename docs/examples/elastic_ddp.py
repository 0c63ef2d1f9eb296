"""DistributedDataParallel that goes on when ranks come or go.

    ckptd run --nnodes 2:4 --nproc-per-node 1 docs/examples/elastic_ddp.py RUN-FOLDER

on each node; see ``docs/guide/in-process.md``. Parameters are bitwise the same whatever the number
of ranks was meanwhile.
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
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.elastic import (
    CanonicalGradients,
    ElasticSampler,
    Schedule,
    World,
    global_tokens,
    scale_gradients,
    session,
)

STEPS = int(os.environ.get("STEPS", "200"))
WIDTH = int(os.environ.get("WIDTH", "64"))
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
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ElasticSampler(SCHEDULE)
    state = {"model": model, "optim": optimizer, "data": sampler}
    tiers = (ckptd.Memory(every=1), ckptd.Peer(every=1))
    with ckptd.Checkpointer(str(folder / "ckpts"), every=50, tiers=tiers) as checkpointer:
        if checkpointer.latest() is not None:
            checkpointer.load(state)
        canonical = CanonicalGradients(model.parameters(), microbatches=SCHEDULE.microbatches)
        batches = iter(sampler)
        while sampler.step < STEPS:
            begun = time.monotonic()
            samples = 0
            for index in sampler.indices:
                ids = next(batches)
                with ddp.no_sync():
                    ddp(DATA[ids]).square().sum().backward()
                samples += len(ids)
                canonical.add(index)
            canonical.reduce()
            scale_gradients(model.parameters(), global_tokens(samples), averaged=False)
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0:
                note(folder, world, sampler, digest(model))
            sampler.advance()
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - begun)))
            checkpointer.save(sampler.step, state)
    dist.destroy_process_group()
    return digest(model)


def digest(model: torch.nn.Module) -> str:
    """Return what tells two sets of parameters apart."""
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def note(folder: Path, world: World, sampler: ElasticSampler, parameters: str) -> None:
    """Add a line about the step that was just done."""
    ids = SCHEDULE.samples(sampler.consumed, SCHEDULE.batch).tolist()
    row = {
        "step": sampler.step + 1,
        "generation": world.generation,
        "ranks": world.world_size,
        "parameters": parameters,
        "ids": ids,
        "at": time.monotonic(),
    }
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    last = session(train, Path(sys.argv[1]))
    sys.stdout.write(f"{last}\n")
