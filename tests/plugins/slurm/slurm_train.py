"""A plain training script, of which nothing knows of restarts but its checkpointer."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptd

folder, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
poison = folder / "poison"
if rank == 1 and poison.exists():  # a generation that commits nothing
    poison.rename(folder / "poisoned")
    (folder / "poisoned").write_text(str(time.time()))
    os._exit(3)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
counter = {"step": 0}
state = {"model": model, "optim": optimizer, "counter": counter}
tiers = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
with ckptd.Checkpointer(
    str(folder / "ckpts"), every=int(os.environ.get("EVERY", "10")), tiers=tiers
) as checkpointer:
    if checkpointer.latest() is not None:
        checkpointer.load(state)
    while counter["step"] < steps:
        loss = model(torch.ones(4, 8) * counter["step"] / steps).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        counter["step"] += 1
        checkpointer.save(counter["step"], state)
        line = {
            "at": time.time(),
            "step": counter["step"],
            "rank": rank,
            "world": world,
            "node": os.environ.get("CKPTD_NODE"),
            "generation": int(os.environ.get("CKPTD_GENERATION", "0")),
            "pid": os.getpid(),
            "batch": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }
        with open(folder / f"steps-{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(pause_s)
dist.destroy_process_group()
