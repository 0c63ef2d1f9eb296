"""Programs of the tests of sessions: what ranks do until they are interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.elastic import World, session
from tests.elastic.torch.session import waiting_group
from tests.elastic.torch.session.waiting_group import WaitingGroup

LONG = timedelta(hours=1)


def waits(world: World, folder: Path) -> None:
    """Wait for what never comes, in the way that a file names."""
    name = os.environ["CKPTD_NODE"]
    what = (folder / "what").read_text()
    here = folder / f"{world.generation}-{name}"
    if what == "init" and world.rank == 0:
        here.touch()
        time.sleep(3600)  # and the others wait for this one in init_process_group
    if what == "init":
        here.touch()
    dist.init_process_group("gloo", timeout=LONG)
    group = dist.new_group(timeout=LONG)
    dist.all_reduce(torch.ones(1), group=group)
    here.touch()
    try:
        _wait(what, world, group)
    finally:
        print(f"{name} left {world.generation}", flush=True)


def _wait(what: str, world: World, group: dist.ProcessGroup) -> None:
    if what == "sleep":
        time.sleep(3600)
    elif what == "lock":
        threading.Event().wait()
    elif what == "store":
        dist.distributed_c10d._get_default_store().wait(["never"], LONG)
    elif what == "swallow":
        while world.rank:  # a program that goes on after whatever fails
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.ones(1), group=group)
        time.sleep(3600)
    elif what == "raise":
        raise RuntimeError("because a peer has left")
    elif what == "pending":
        # Each still waits in the background for what the other one will never send.
        dist.broadcast(torch.ones(1), src=1 - world.rank, group=group, async_op=True)
        raise RuntimeError("because a third one has left")
    elif what == "reducer":
        # Of a cycle, as models of trainers are: its reducer, in C++, is the last to hold the group.
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
        ddp.trainer = [ddp]
        _queue_behind_python(ddp, src=1 - world.rank)
    elif world.rank == 0:
        time.sleep(3600)
    elif what == "all_reduce":
        dist.all_reduce(torch.ones(1), group=group)
    elif what == "recv":
        dist.recv(torch.ones(1), 0)


def _queue_behind_python(ddp: DistributedDataParallel, src: int) -> None:
    """Wait in the background for more than gloo has threads for; each runs Python as it ends."""
    for _ in range(10):
        work = dist.broadcast(torch.ones(1), src, group=ddp.process_group, async_op=True)
        work.get_future().add_done_callback(lambda _: time.sleep(0.05))
    raise RuntimeError("because a third one has left")


def fails(world: World, folder: Path) -> None:
    """Fail, in a group."""
    dist.init_process_group("gloo")
    raise RuntimeError("of its own")


def idles(world: World, folder: Path) -> None:
    """Do nothing for long."""
    (folder / f"{world.generation}-{os.environ['CKPTD_NODE']}").touch()
    time.sleep(3600)


def steps(world: World, folder: Path) -> None:
    """Step, without any checkpointer, for ever."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while True:
        weight.grad = torch.ones(1)
        optimizer.step()
        (folder / f"{world.generation}-{os.environ['CKPTD_NODE']}").touch()


def regroups(world: World, folder: Path) -> None:
    """Save one step a generation, and tell what this process holds."""
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    tiers = (ckptd.Memory(every=1, agent_ttl_s=5.0), ckptd.Peer(every=1, agent_ttl_s=5.0))
    root = str(folder / "ckpts")
    # The test ends by killing: agents are not to wait for another life.
    with ckptd.Checkpointer(root, every=1000, tiers=tiers) as checkpointer:
        step = checkpointer.load(state) if checkpointer.latest() is not None else 0
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        with (folder / f"{os.environ['CKPTD_NODE']}.jsonl").open("a") as file:
            file.write(json.dumps(_held()) + "\n")
        checkpointer.save(step + 1, state)
        time.sleep(3600)


def collects(world: World, folder: Path) -> None:
    """Wait, in C, for a device on which collectives of several groups run that never end."""
    waiting_group.register()
    WaitingGroup.hangs = (folder / "hangs").exists()
    dist.init_process_group(waiting_group.NAME)
    for group in (None, dist.new_group(), dist.new_group()):
        dist.all_reduce(torch.ones(1), group=group)
    name = f"{world.generation}-{os.environ['CKPTD_NODE']}"
    Thread(target=_touch_later, args=(folder / name,)).start()
    waiting_group.synchronize()


def _touch_later(path: Path) -> None:
    time.sleep(0.05)  # by then the main thread waits
    path.touch()


def _held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    session(globals()[sys.argv[1]], Path(sys.argv[2]))
