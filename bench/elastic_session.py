"""The training script of the benches of restarts, as a session: it goes on in the same process.

Its state of 100 MiB is shared out among the ranks and goes to memory, and to a peer's memory, with
each step; the commit of a step is that of these tiers.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_worker import STATE, STEP_S, STEPS, born, spoil, tell
from torch.distributed.tensor import DTensor, Shard

import ckptd
from ckptd.elastic import World, session

_COLUMNS = 1 << 10


def main() -> None:
    torch.set_num_threads(1)
    tell("born", at=born(), rank=0, world=0, node=os.environ["BENCH_NODE"])
    session(train)


def train(world: World) -> None:
    me = {
        "rank": world.rank,
        "world": world.world_size,
        "node": os.environ["BENCH_NODE"],
        "generation": world.generation,
    }
    tell("imported", **me)
    dist.init_process_group("gloo")
    tell("initialised", **me)
    state: dict[str, Any] = {"model": {"weight": _state()}, "step": 0}
    root = Path(os.environ["BENCH_FOLDER"]) / "root"
    tiers: list[ckptd.Memory | ckptd.Peer] = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
    with ckptd.Checkpointer(str(root), every=1000, tiers=tiers) as checkpointer:
        if checkpointer.latest() is not None:
            state["step"] = checkpointer.load(state)
        tell("loaded", step=state["step"], **me)
        while state["step"] < STEPS:
            time.sleep(STEP_S)
            spoil(int(os.environ["BENCH_NODE"]))
            gradient = torch.ones(1 << 16)
            dist.all_reduce(gradient)
            state["model"]["weight"].to_local()[:64] += gradient.view(64, -1)
            state["step"] += 1
            checkpointer.save(state["step"], state)
            tell("step", step=state["step"], **me)
    dist.destroy_process_group()


def _state() -> DTensor:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = STATE // 4 // _COLUMNS
    ranks = dist.get_world_size()
    share = -(-rows // ranks)  # as Shard does it: the last one has what is left
    mine = min(share, rows - dist.get_rank() * share)
    return DTensor.from_local(
        torch.zeros(mine, _COLUMNS),
        mesh,
        [Shard(0)],
        shape=torch.Size((rows, _COLUMNS)),
        stride=(_COLUMNS, 1),
    )


if __name__ == "__main__":
    main()
