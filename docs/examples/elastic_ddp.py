"""DistributedDataParallel that goes on when ranks come or go.

    ckptd run --nnodes 2:4 --nproc-per-node 1 docs/examples/elastic_ddp.py RUN-FOLDER

on each node; see ``docs/guide/in-process.md``. Parameters are bitwise the same whatever the number
of ranks was meanwhile, and a step that loses a rank computes no micro-batch again that another rank
has computed.
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
    ElasticSampler,
    KeptGradients,
    Schedule,
    World,
    scale_gradients,
    session,
)

STEPS = int(os.environ.get("STEPS", "200"))
WIDTH = int(os.environ.get("WIDTH", "64"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
DATA = torch.randn(257, 16, generator=torch.Generator().manual_seed(1))
SCHEDULE = Schedule(size=len(DATA), microbatch=2, microbatches=12, seed=5)


def train(world: World, folder: Path, kept: KeptGradients) -> str:
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
        canonical = kept.resume(model, sampler)
        batches = iter(sampler)
        while sampler.step < STEPS:
            begun = time.monotonic()
            for index in sampler.indices:
                ids = next(batches)
                with ddp.no_sync():
                    loss = ddp(DATA[ids]).square().sum()
                    loss.backward()
                canonical.add(index, len(ids), loss)
            samples, loss_sum = canonical.reduce()
            scale_gradients(model.parameters(), int(samples), averaged=False)
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0:
                note(folder, world, sampler, digest(model), loss_sum / samples)
            sampler.advance()
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - begun)))
            checkpointer.save(sampler.step, state)
    del ddp  # before its group: see docs/guide/in-process.md
    dist.destroy_process_group()
    return digest(model)


def digest(model: torch.nn.Module) -> str:
    """Return what tells two sets of parameters apart."""
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def note(folder: Path, world: World, sampler: ElasticSampler, parameters: str, loss: float) -> None:
    """Add a line about the step that was just done."""
    ids = SCHEDULE.samples(sampler.consumed, SCHEDULE.batch).tolist()
    row = {
        "step": sampler.step + 1,
        "generation": world.generation,
        "ranks": world.world_size,
        "parameters": parameters,
        "loss": loss,
        "ids": ids,
        "at": time.monotonic(),
    }
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    last = session(train, Path(sys.argv[1]), KeptGradients())
    sys.stdout.write(f"{last}\n")
