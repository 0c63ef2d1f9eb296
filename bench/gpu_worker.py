"""The training script of the check `session` of `gpu_checks.py`.

Each rank has two groups of NCCL of its own beside the one of gloo that all share: NCCL takes no two
ranks of one device into a group. Simulated, all are of gloo and the state is on the host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_worker import tell

import ckptd
from ckptd.elastic import World, session

SIMULATED = bool(os.environ.get("BENCH_SIMULATED"))
BACKEND, DEVICE = ("gloo", "cpu") if SIMULATED else ("nccl", "cuda")


def host_free_gb() -> float:
    """Return what the host can still give: what a driver has locked is missing there."""
    rows = dict(x.split(":", 1) for x in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024 / 1e9


def train(world: World) -> None:
    me: dict[str, Any] = {
        "rank": world.rank,
        "world": world.world_size,
        "node": os.environ["BENCH_NODE"],
        "generation": world.generation,
    }
    dist.init_process_group("gloo")
    mine = []
    for rank in range(world.world_size):
        made = [dist.new_group([rank], backend=BACKEND) for _ in range(2)]
        if rank == world.rank:
            mine = made
    count = 1 << 12 if SIMULATED else int(float(os.environ["BENCH_GB"]) * 1e9 / 12)
    weight = torch.nn.Parameter(torch.zeros(count, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    position = {"step": 0}
    root = str(Path(os.environ["BENCH_FOLDER"]) / "root")
    state = {"weight": weight, "optim": optimizer, "position": position}
    tiers: list[ckptd.Memory | ckptd.Peer] = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
    with ckptd.Checkpointer(root, every=1000, tiers=tiers) as ck:
        if ck.latest() is not None:
            ck.load(state)
        free = 0.0 if SIMULATED else torch.cuda.mem_get_info()[0] / 1e9
        tell("ready", host_free_gb=host_free_gb(), device_free_gb=free, step=position["step"], **me)
        while True:
            weight.grad = torch.ones_like(weight)
            for group in mine:
                dist.all_reduce(weight.grad, group=group)
            dist.all_reduce(torch.ones(1))
            optimizer.step()
            position["step"] += 1
            ck.save(position["step"], state)
            tell("step", step=position["step"], **me)


if __name__ == "__main__":
    session(train)
