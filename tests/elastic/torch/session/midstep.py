"""A program whose ranks stop where a test says so, to be killed there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.elastic import (
    ElasticSampler,
    KeptGradients,
    Schedule,
    World,
    keyed_rng,
    scale_gradients,
    session,
)

SCHEDULE = Schedule(size=101, microbatch=2, microbatches=12, seed=5)
STEPS = 9
POINTS = (
    "load",
    "resume",
    "begin",
    "backward",
    "added",
    "all_to_all_single",
    "all_gather_into_tensor",
    "reduced",
    "step",
    "stepped",
    "advanced",
    "saved",
)
"""Where a rank may be lost; before a call of that name, after what is named by a participle."""


class Stops:
    """Where this rank stops in this generation: at a point, from the so-manieth step of it on."""

    def __init__(self, world: World, folder: Path) -> None:
        name = os.environ.get("CKPTD_NODE", "alone")
        plan: dict[str, list[Any]] = {}
        if (folder / "plan").exists():
            plan = json.loads((folder / "plan").read_text())
        self._step, self._point, self._nth = plan.get(name, (0, "", 0))
        self._reached = folder / f"reached-{world.generation}-{name}"
        self.steps = 0

    def at(self, point: str) -> None:
        if point != self._point or self.steps < self._step:
            return
        if self._nth:
            self._nth -= 1
            return
        self._reached.touch()
        time.sleep(3600)

    def within(self, point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stops(*args: Any, **kwargs: Any) -> Any:
            self.at(point)
            return call(*args, **kwargs)

        return stops


def train(world: World, folder: Path, kept: KeptGradients) -> str:
    stops = Stops(world, folder)
    node = os.environ.get("CKPTD_NODE", "alone")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    data = torch.randn(SCHEDULE.size, 5, generator=torch.Generator().manual_seed(1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: stops.at("stepped"))
    sampler = ElasticSampler(SCHEDULE)
    state = {"model": model, "optim": optimizer, "data": sampler}
    tiers = (ckptd.Memory(every=1, agent_ttl_s=5.0), ckptd.Peer(every=1, agent_ttl_s=5.0))
    root = str(folder / "ckpts")
    calls = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}
    with (
        (folder / f"{node}.jsonl").open("a") as rows,
        ckptd.Checkpointer(root, every=1000, tiers=tiers) as checkpointer,
    ):

        def note(**row: Any) -> None:
            rows.write(json.dumps({**row, "generation": world.generation}) + "\n")
            rows.flush()

        stops.at("load")
        loaded = checkpointer.load(state) if checkpointer.latest() is not None else 0
        stops.at("resume")
        canonical: Any = kept.resume(model, sampler)
        note(loaded=loaded, found=kept.found, rank=world.rank)
        batches = iter(sampler)
        while sampler.step < STEPS:
            stops.at("begin")
            for index in sampler.indices:
                ids = next(batches)
                with ddp.no_sync(), keyed_rng(7, sampler.step, index):
                    loss = ddp(data[ids]).square().sum()
                    stops.at("backward")
                    loss.backward()
                time.sleep(float(os.environ.get("PAUSE_S", "0")))
                extra = index in canonical._extra
                canonical.add(index, len(ids), loss)
                note(added=index, step=sampler.step + 1, extra=extra)
                stops.at("added")
            try:
                for name, call in calls.items():
                    setattr(dist, name, stops.within(name, call))
                samples, loss_sum = canonical.reduce()
            finally:
                for name, call in calls.items():
                    setattr(dist, name, call)
            stops.at("reduced")
            scale_gradients(model.parameters(), int(samples), averaged=False)
            stops.at("step")
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            stops.at("advanced")
            checkpointer.save(sampler.step, state)
            note(done=sampler.step, samples=samples, loss=loss_sum, parameters=digest(model))
            stops.at("saved")
            stops.steps += 1
    del ddp  # before its group: see docs/guide/in-process.md
    dist.destroy_process_group()
    return digest(model)


def digest(model: torch.nn.Module) -> str:
    """Return what tells two sets of parameters apart."""
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def random_plan(names: list[str], chance: random.Random) -> dict[str, tuple[int, str, int]]:
    """Return where one of these nodes, or two, are to stop."""
    two = len(names) > 3 and chance.random() < 0.3
    plan = {}
    for name in chance.sample(names, 2 if two else 1):
        point = chance.choice(POINTS)
        once = point in ("load", "resume")
        plan[name] = (
            (0, point, 0) if once else (chance.choice((0, 0, 1)), point, chance.choice((0, 0, 1)))
        )
    return plan


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(session(train, Path(sys.argv[1]), KeptGradients()) or "")
    sys.stdout.flush()
