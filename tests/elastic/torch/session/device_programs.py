"""Programs of sessions on simulated devices: ``python -m tests.simdevice`` runs them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

import ckptd
from ckptd.elastic import World, session
from tests.simdevice import installed

NAME = "onstream"
_SLOW_S = 0.6
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .* /memfd:")


class StreamGroup(dist.ProcessGroup):
    """Its collectives are kernels that do not end until they are aborted, as with a lost peer.

    Attributes
    ----------
    slow
        Whether the kernel that stands behind them takes longer than a rank waits for its copies.
    """

    slow = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._running: list[Callable[[], None]] = []

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Any:
        self._running.append(installed().hold())
        if self.slow:
            self._running.append(Timer(_SLOW_S, installed().hold()).start)
        for tensor in tensors:
            tensor.fill_(float("nan"))  # what a kernel leaves that was told to quit
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def abort(self) -> None:
        while self._running:
            self._running.pop()()
        torch.cuda.synchronize()  # waits for the kernels of other groups as well

    def shutdown(self) -> None:
        torch.cuda.synchronize()


def _join() -> None:
    def make(store: object, rank: int, size: int, timeout: timedelta) -> StreamGroup:
        return StreamGroup(rank, size)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, devices=["cuda"])
    dist.init_process_group(NAME)


def saves(world: World, folder: Path) -> None:
    """Load, save, and begin a save behind collectives that never end; the values must not count."""
    _join()
    other = dist.new_group([0])
    state = {f"w{i}": torch.zeros(1 << 20, device="cuda") for i in range(4)}
    tiers = (ckptd.Memory(every=1, agent_ttl_s=5.0),)
    root = str(folder / "ckpts")
    with ckptd.Checkpointer(
        root,
        every=1000,
        tiers=tiers,
        storage=ckptd.Storage(dedup=False),
        copy=ckptd.CopyOptions(lazy="all"),
    ) as checkpointer:
        installed().waits.clear()  # the simulator keeps them for tests
        begun = _held()
        step = checkpointer.load(state) if checkpointer.latest() is not None else 0
        found = {float(value) for tensor in state.values() for value in (tensor[0], tensor[-1])}
        for tensor in state.values():
            tensor.fill_(step + 1.0)
        checkpointer.save(step + 1, state).durable(60.0, tier="memory")
        if (folder / "end").exists():
            return
        StreamGroup.slow = step % 3 == 1
        for group in (None, other):
            gradient = torch.ones(1, device="cuda")
            dist.all_reduce(gradient, group=group)
        for tensor in state.values():
            tensor += gradient
        checkpointer.save(step + 2, state)
        row = {"step": step, "values": sorted(found), **begun, "locked_now": _locked()}
        with (folder / f"{os.environ['CKPTD_NODE']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        torch.cuda.synchronize()


def _held() -> dict[str, Any]:
    """Return what this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = [_MAPPED.match(line) for line in Path("/proc/self/maps").read_text().splitlines()]
    sim = installed()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "anonymous": int(status["RssAnon"].split()[0]) << 10,
        "arenas": sum(int(m[2], 16) - int(m[1], 16) for m in mapped if m),
        "locked": _locked(),
        "device": sum(sim.allocated),
        "problems": sim.problems,
    }


def _locked() -> list[int]:
    return sorted(installed().page_locked.values())


def fails(world: World, folder: Path) -> None:
    """Step and save; in its first process the device of rank 1 has a sticky error in step 3."""
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    state = {"w": torch.zeros(100, device="cuda")}
    tiers = (ckptd.Memory(every=1, agent_ttl_s=5.0),)
    root = str(folder / "ckpts")
    with ckptd.Checkpointer(root, every=1000, tiers=tiers) as checkpointer:
        step = checkpointer.load(state) if checkpointer.latest() is not None else 0
        while step < 5:
            step += 1
            state["w"] += 1.0
            if world.rank == 1 and step == 3 and world.generation == 1:
                installed().fail(0)
            total = state["w"][0].cpu()
            dist.all_reduce(total)
            print(f"rank {world.rank} {world.generation} {os.getpid()} step {step}", flush=True)
            checkpointer.save(step, state).durable(60.0, tier="memory")
    assert total == 10.0
    dist.destroy_process_group()


def sick(world: World, folder: Path) -> None:
    """Step and save; the first device of node a fails in step 3, and each process from then on."""
    node, place = os.environ["CKPTD_NODE"], int(os.environ["LOCAL_RANK"])
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[place]
    broken = (node, device) == ("a", "0")
    if broken and (folder / "broken").exists():
        installed().fail(0)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    state = {"w": torch.zeros(100, device="cuda")}
    with ckptd.Checkpointer(str(folder / "ckpts"), every=1) as checkpointer:
        step = checkpointer.load(state) if checkpointer.latest() is not None else 0
        while step < 6:
            step += 1
            state["w"] += 1.0
            if broken and step == 3:
                (folder / "broken").touch()
                installed().fail(0)
            total = state["w"][0].cpu()
            dist.all_reduce(total)
            print(f"of {world.world_size}: {node} device {device} step {step}", flush=True)
            checkpointer.save(step, state).durable(60.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    session(globals()[sys.argv[1]], Path(sys.argv[2]))
