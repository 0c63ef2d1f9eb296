"""Models that are spread over ranks by PyTorch's own means, and their checkpoints."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.monitor.corpus.base import WIDTH, batch, net, pause, program, rank, rounds, world


def _sharded(mesh: DeviceMesh | None = None) -> nn.Module:
    model = net()
    mesh = mesh or init_device_mesh("cpu", (world(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in rounds():
        model(batch()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program()
def fsdp2() -> None:
    _train(_sharded())


@program()
def hsdp() -> None:
    _train(_sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


@program()
def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _train(model)


@program()
def fsdp_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(fully_shard(model, mesh=mesh["dp"]).parameters(), 1e-3)
    for _ in rounds():
        torch.manual_seed(rank() // 2)
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def zero_optimizer() -> None:
    model = DistributedDataParallel(net())
    # Its module compiles by torch.jit, of which torch itself warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for i in rounds():
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 20 == 19:
            optimizer.consolidate_state_dict(to=0)


@program()
def sharded_tensors_by_hand() -> None:
    mesh = init_device_mesh("cpu", (world(),))
    table = distribute_tensor(torch.randn(64, WIDTH), mesh, [Shard(0)])
    for _ in rounds():
        table.sum().full_tensor()
        table.redistribute(placements=[Shard(1)])
        pause(0.01)


@program()
def checkpoints_by_dcp() -> None:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    box: list[object] = [tempfile.mkdtemp(prefix="ckptd-corpus-") if rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    folder = Path(str(box[0]))
    for i in rounds():
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 20 == 9:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=folder / "step")
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "step")
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


@program()
def checkpoints_in_a_thread() -> None:
    """Rank 0 writes in a thread while all train on; at the end of it they meet."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    thread: threading.Thread | None = None
    for i in rounds():
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 20 == 9:
            if thread is not None:
                thread.join()
            dist.barrier()
            if rank() == 0:
                thread = threading.Thread(target=pause, args=(1.0,))
                thread.start()


@program()
def averaged_now_and_then() -> None:
    """Local steps, and parameters averaged every fourth of them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for i in rounds():
        for _ in range(1 + rank() % 2):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if i % 4 == 3:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= world()


@program()
def hierarchical_reduction() -> None:
    """Within a pair, across pairs, and back, with groups for each."""
    pairs = [dist.new_group([2 * i, 2 * i + 1]) for i in range(world() // 2)]
    across = [dist.new_group(list(range(i, world(), 2))) for i in range(2)]
    pair, other = pairs[rank() // 2], across[rank() % 2]
    for _ in rounds():
        grad = torch.randn(64)
        part = torch.empty(32)
        dist.reduce_scatter(part, list(grad.chunk(2)), group=pair)
        dist.all_reduce(part, group=other)
        dist.all_gather(list(torch.empty(64).chunk(2)), part, group=pair)
        pause(0.01)
