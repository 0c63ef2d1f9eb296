"""A training script as the benches of restarts have it: plain torch, nothing of ckptd.

Its state is 100 MiB in memory-backed files, written by rank 0 every tenth step; a step takes 0.1 s
and ends with an all-reduce. All that happens goes into one file of events, a line each, with the
machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(os.environ["BENCH_FOLDER"])
STEPS = int(os.environ.get("BENCH_STEPS", "100000"))
STEP_S = float(os.environ.get("BENCH_STEP_S", "0.1"))
STATE = int(os.environ.get("BENCH_STATE", str(100 << 20)))
EVERY = 10


def tell(what: str, **more: object) -> None:
    """Append a line, in one write."""
    row = {"t": time.monotonic(), "pid": os.getpid(), "what": what, **more}
    fd = os.open(HERE / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, json.dumps(row).encode() + b"\n")
    finally:
        os.close(fd)


def born() -> float:
    """Return when this process was made, on the monotonic clock."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def spoil(rank: int) -> None:
    """Take more memory than rank 1 may have, if the mark is there; its successors do not."""
    mark = HERE / "hungry"
    if rank == 1 and mark.exists():
        mark.unlink()
        bytearray(1 << 30)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ.get("CKPTD_GENERATION", "0"))
    node = os.environ.get("BENCH_NODE", "")
    me = {"rank": rank, "world": world, "node": node, "generation": generation}
    tell("born", at=born(), **me)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tell("imported", **me)
    timeout = timedelta(seconds=float(os.environ.get("BENCH_TIMEOUT_S", "1800")))
    dist.init_process_group("gloo", timeout=timeout)
    tell("initialised", **me)
    beat = heartbeat()
    step, state = load(torch)
    tell("loaded", step=step, **me)
    update = updater(torch, state)
    while step < STEPS:
        slow = (HERE / f"slow-{node}").exists()
        time.sleep(STEP_S * (4 if slow else 1))
        # Once, and not by the processes that come after.
        if rank == 1 and (HERE / "mismatch").exists():
            (HERE / "mismatch").unlink()
            dist.broadcast(torch.ones(1 << 12), 1)
        spoil(rank)
        beat()
        gradient = torch.ones(1 << 16)
        dist.all_reduce(gradient)
        update(gradient / world)
        step += 1
        tell("step", step=step, **me)
        if step % EVERY == 0:
            if rank == 0:
                save(step, state)
            dist.barrier()
    dist.destroy_process_group()


def heartbeat() -> Callable[[], None]:
    """Return what tells the launcher of NVRx that this rank gets on; nothing under another one."""
    if "BENCH_NVRX" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def updater(torch: Any, state: Any) -> Callable[[Any], None]:
    """Return what changes the state by a gradient: an optimizer's step where steps are watched.

    Nowhere else: the first one imports torch's compiler, and a restart would wait for it.
    """
    part = state[: 1 << 16]
    if "BENCH_OPTIMIZER" not in os.environ:
        return part.add_
    weight = torch.nn.Parameter(part)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def update(gradient: Any) -> None:
        weight.grad = -gradient
        optimizer.step()

    return update


def load(torch: Any) -> tuple[int, Any]:
    """Return step and state, from the last file, else step 0 and zeros."""
    found = sorted(HERE.glob("state-*[0-9]"))
    if not found:
        return 0, torch.zeros(STATE // 4)
    state = torch.empty(STATE // 4)
    with found[-1].open("rb") as file:
        file.readinto(state.numpy())
    return int(found[-1].name.split("-")[1]), state


def save(step: int, state: Any) -> None:
    """Write the state, and name it when it is whole."""
    draft = HERE / "draft"
    with draft.open("wb") as file:
        file.write(state.numpy())
    old = sorted(HERE.glob("state-*[0-9]"))
    draft.rename(HERE / f"state-{step:08d}")
    for path in old[:-1]:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
