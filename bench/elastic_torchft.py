"""The training script of the benches of restarts with torchft: a replica group of one rank a node.

A replica that comes back takes its state of 100 MiB from another one; those that are left go on.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from elastic_worker import STATE, STEP_S, STEPS, born, spoil, tell


def main() -> None:
    node = os.environ["BENCH_NODE"]
    tell("born", at=born(), rank=int(node), world=0, node=node)
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    state = torch.zeros(STATE // 4)

    def load(given: dict[str, Any]) -> None:
        state.copy_(given["state"])

    limit = timedelta(seconds=float(os.environ.get("BENCH_TIMEOUT_S", "10")))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"state": state},
        min_replica_size=1,
        timeout=limit,
        replica_id=f"node{node}-",
    )
    while manager.current_step() < STEPS:
        manager.start_quorum()
        time.sleep(STEP_S)
        spoil(int(node))
        gradient = torch.ones(1 << 16)
        manager.allreduce(gradient).wait()
        if not manager.should_commit():
            continue
        state[: 1 << 16].add_(gradient)
        tell(
            "step",
            step=manager.current_step(),
            rank=int(node),
            world=manager.num_participants(),
            node=node,
            generation=manager._quorum_id,
        )


if __name__ == "__main__":
    main()
