"""Small programs of real ranks, run watched and unwatched by test_recorder.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ckptd.monitor
from ckptd.monitor.job import CallFlag, RankView
from ckptd.monitor.ring import RingReader
from ckptd.monitor.torch.recorder.recorder import Recorder
from tests.processes import until

Job = Callable[[], list[torch.Tensor]]


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def _train(model: torch.nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Return losses and parameters after some steps on data of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]


def ddp() -> list[torch.Tensor]:
    return _train(DistributedDataParallel(_model()))


def fsdp() -> list[torch.Tensor]:
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return _train(fully_shard(model, mesh=mesh))


def tensor_parallel() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(1)
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    whole = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    gathered = whole.redistribute(mesh, [Replicate()]).to_local()
    return [loss.detach(), gathered, *(p.grad.to_local() for p in model.parameters())]  # type: ignore[union-attr]


def p2p() -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    got = [torch.zeros(3) for _ in range(3)]
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), right),
        dist.P2POp(dist.irecv, got[0], left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for i in (1, 2):
        if rank == 0:
            dist.send(torch.full((3,), float(i)), 1)
        elif rank == 1:
            dist.recv(got[i], 0)
    return got


def objects() -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {"rank": rank, "pad": "x" * 10 * rank})
    box = ["from 0" if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(world)) if rank == 0 else None, src=0)
    assert [x["rank"] for x in everybody] == list(range(world))
    return [torch.tensor([len(e["pad"]) for e in everybody]), torch.tensor(mine)]


def several_groups() -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group([0, 1]), dist.new_group(list(range(world)))]
    tensor = torch.full((5,), rank + 1.0)
    works = []
    if rank < 2:
        works.append(dist.all_reduce(tensor, group=halves[0], async_op=True))
        works[0].wait()
    dist.broadcast(tensor, 1, group=halves[1])
    dist.reduce(tensor, 0, op=dist.ReduceOp.MAX)
    parts = [torch.zeros(5) for _ in range(world)]
    dist.all_gather(parts, tensor)
    dist.gather(tensor, parts if rank == 0 else None, dst=0)
    sized = torch.zeros(rank + 1 + 2 * (world - 1))
    source = torch.arange(float((rank + 1) + 2 * (world - 1)))
    split = [2] * world
    split[rank] = rank + 1
    dist.all_to_all_single(sized, source, split, split)
    dist.barrier()
    return [tensor, *parts, sized]


def functional_calls() -> list[torch.Tensor]:
    group = dist.group.WORLD
    tensor = torch.arange(4.0) + dist.get_rank()
    out = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor.repeat(dist.get_world_size()), "sum", 0, group),
    ]
    return [functional.wait_tensor(t) for t in out]


def compiled() -> list[torch.Tensor]:
    @torch.compile(backend="aot_eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    with torch.no_grad():
        return [double(torch.arange(4.0) + dist.get_rank()) for _ in range(2)]


def threads() -> list[torch.Tensor]:
    """Two threads with a group each."""
    world = list(range(dist.get_world_size()))
    groups = [dist.new_group(world), dist.new_group(world)]
    out = [torch.zeros(2), torch.zeros(2)]

    def work(i: int) -> None:
        for k in range(50):
            tensor = torch.full((2,), float(k))
            dist.all_reduce(tensor, group=groups[i])
            out[i] += tensor

    both = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return out


def errors() -> list[torch.Tensor]:
    """What the program does wrong is told in the same words."""
    told = []
    for wrong in (
        lambda: dist.broadcast(torch.zeros(2), 99),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex128), op=dist.ReduceOp.MAX),
        lambda: dist.group.WORLD._allgather_base(torch.zeros(3), torch.zeros(2)),  # type: ignore[union-attr]
        lambda: dist.all_gather([torch.zeros(1)], torch.zeros(2)),
    ):
        try:
            wrong()
        except Exception as error:  # noqa: BLE001 - whichever it is, it is compared
            told.append(f"{type(error).__name__} {str(error).splitlines()[0]}")
        else:
            told.append("none")
    return [torch.frombuffer(bytearray("\n".join(told).encode()), dtype=torch.uint8)]


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        ddp,
        fsdp,
        tensor_parallel,
        p2p,
        objects,
        several_groups,
        functional_calls,
        compiled,
        threads,
        errors,
    )
}

Told = tuple[list[bytes], list[bytes], RankView, dict[int, str]]


def attach(folder: str, source: str, **more: Any) -> Recorder:
    """Attach a recorder that hears of calls by way of `source`."""
    os.environ["CKPTD_RECORDER"] = source
    recorder = ckptd.monitor.attach(folder, **more)
    assert recorder.source == source
    return recorder


def run(names: list[str], folder: str, source: str) -> dict[str, Told]:
    """Run jobs unwatched and watched; return what each computed, and what the ring says."""
    out = {}
    for name in names:
        plain = [t.numpy().tobytes() for t in JOBS[name]()]
        recorder = attach(folder, source)
        assert recorder.on
        watched = [t.numpy().tobytes() for t in JOBS[name]()]
        assert recorder.on
        dist.barrier()
        with RingReader(recorder.ring.path) as reader:
            # The end of a call is heard of by another thread, maybe after the caller's wait.
            until(lambda reader=reader: _at_rest(reader.view()))
            out[name] = (plain, watched, reader.view(), reader.texts())
        ckptd.monitor.detach()
        recorder.ring.path.unlink()
    return out


def _at_rest(view: RankView) -> bool:
    counts = view.groups
    return view.pending_seq == 0 and bool((counts["entered"] == counts["completed"]).all())


def told(view: RankView, texts: dict[int, str]) -> list[str]:
    """Return one line a call: operation, members of the group, number, bytes, flags."""
    lines = []
    for row in view.calls:
        members = ",".join(map(str, view.members.get(int(row["group"]), ())))
        flags = CallFlag(int(row["flags"]))
        lines.append(
            f"{texts[int(row['op'])]} [{members}] {row['seq']} {row['bytes']} {row['root']}"
            f"{' async' if CallFlag.ASYNC in flags else ''}"
            f"{' variable' if CallFlag.VARIABLE in flags else ''}"
            f"{' failed' if CallFlag.FAILED in flags else ''}"
        )
    return lines
