"""The training script of ``bench/midstep.py``: a rank of it stops in the middle of a step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.elastic import ElasticSampler, KeptGradients, Schedule, World, scale_gradients, session

SCHEDULE = Schedule(size=1009, microbatch=2, microbatches=24, seed=5)
MICRO_S = 0.1
STEP, STEPS = 3, 4
"""Which step loses a rank, and how many there are."""


def train(world: World, folder: Path, kept: KeptGradients) -> None:
    """Train in one generation; the third rank stops where ``STOP`` says."""
    keeps = os.environ["KEEPS"] == "1"
    stop = int(os.environ["STOP"]) if world.generation == 1 and world.rank == 2 else None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ElasticSampler(SCHEDULE)
    state = {"model": model, "optim": optimizer, "data": sampler}
    tiers = (ckptd.Memory(every=1, agent_ttl_s=5.0), ckptd.Peer(every=1, agent_ttl_s=5.0))
    root = str(folder / "ckpts")
    with (
        (folder / f"{os.environ['CKPTD_NODE']}.jsonl").open("a") as file,
        ckptd.Checkpointer(root, every=1000, tiers=tiers) as checkpointer,
    ):

        def note(**row: float) -> None:
            file.write(json.dumps({**row, "at": time.monotonic()}) + "\n")
            file.flush()

        if checkpointer.latest() is not None:
            checkpointer.load(state)
        canonical = (kept if keeps else KeptGradients()).resume(model, sampler)
        note(began=world.generation)
        batches = iter(sampler)
        while sampler.step < STEPS:
            for number, index in enumerate(sampler.indices):
                if number == stop and sampler.step + 1 == STEP:
                    (folder / "reached").touch()
                    time.sleep(3600)
                with ddp.no_sync():
                    loss = ddp(torch.ones(len(next(batches)), 64)).square().sum()
                    loss.backward()
                time.sleep(MICRO_S)
                canonical.add(index, SCHEDULE.microbatch)
                note(added=index)
            (samples,) = canonical.reduce()
            scale_gradients(model.parameters(), int(samples), averaged=False)
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            note(done=sampler.step)
            checkpointer.save(sampler.step, state)
    del ddp  # before its group: see docs/guide/in-process.md
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    session(train, Path(sys.argv[1]), KeptGradients())
