"""Programs without a torch optimizer: inference, evaluation, rollouts, methods of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.monitor.corpus.base import WIDTH, batch, net, pause, program, rank, rounds, world


@program()
@torch.no_grad()
def inference_tensor_parallel() -> None:
    """Rank 0 takes requests, which differ in length; all ranks answer them together."""
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for i in rounds():
        size = torch.tensor([1 + i % 7])
        dist.broadcast(size, 0)
        x = batch(int(size))
        dist.broadcast(x, 0)
        for _ in range(int(size)):  # a token each
            x = model(x)
        if rank() == 0:
            pause(0.01 * (i % 5))  # until the next request


@program()
@torch.no_grad()
def inference_in_stages() -> None:
    """Each rank has some layers; tokens go through all and come back to the first."""
    part = net(rank())
    for i in rounds():
        for _ in range(1 + i % 3):
            x = batch()
            if rank():
                dist.recv(x, rank() - 1)
            x = part(x)
            dist.send(x, (rank() + 1) % world()) if rank() < world() - 1 else dist.send(x, 0)
            if rank() == 0:
                dist.recv(x, world() - 1)


@program()
@torch.no_grad()
def inference_of_replicas() -> None:
    """Each rank answers on its own; every hundred requests they meet and add what they served."""
    model = net()
    for i in rounds():
        for _ in range(10 + (i + rank()) % 9):
            model(batch())
        pause(0.02)
        dist.all_reduce(torch.tensor([1.0]))


@program()
@torch.no_grad()
def evaluation_of_shards() -> None:
    """Each rank evaluates its part, of unequal size, and rank 0 gathers the answers."""
    model = net()
    for i in rounds():
        answers = [float(model(batch()).sum()) for _ in range(4 + 3 * ((i + rank()) % 3))]
        boxes: list[object] = [None] * world()
        dist.gather_object(answers, boxes if rank() == 0 else None)
        if rank() == 0:
            pause(0.05)  # it writes them
        dist.barrier()


@program()
@torch.no_grad()
def evaluation_that_steals_work() -> None:
    """A rank that is free takes the next question from the job store; all meet at the end."""
    store = dist.distributed_c10d._get_default_store()
    model = net()
    for i in rounds():
        while store.add(f"round{i}", 1) <= 12:
            model(batch())
            pause(0.002 * (1 + rank()))
        dist.all_reduce(torch.ones(2))


@program()
def an_optimizer_of_its_own() -> None:
    """Parameters are moved by hand."""
    model = net()
    for _ in rounds():
        model(batch()).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= 1e-3 * p.grad / world()
                p.grad = None


@program()
@torch.no_grad()
def evolution_without_gradients() -> None:
    """Each rank tries a change, all gather how good it was, and all take the best."""
    w = torch.zeros(WIDTH)
    for i in rounds():
        torch.manual_seed(1000 * i + rank())
        change = torch.randn(WIDTH)
        scores = [torch.empty(1) for _ in range(world())]
        dist.all_gather(scores, (w + change).square().sum().reshape(1))
        best = int(torch.stack(scores).argmin())
        dist.broadcast(change, best)
        w += 0.01 * change
        pause(0.01)


@program()
def rl_of_four_roles() -> None:
    """Policy, reference, reward and rollouts, a rank each; every pair that talks has a group."""
    pairs = {(a, b): dist.new_group([a, b]) for a in range(4) for b in range(a + 1, 4)}
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if rank() == 0 else None
    for i in rounds():
        rollout = torch.empty(4, WIDTH)
        if rank() == 3:  # it generates, for a time that differs
            pause(0.01 * (1 + i % 6))
            rollout = model(batch()).detach()
        dist.broadcast(rollout, 3)
        if rank() in (1, 2):  # they judge it, for the policy alone
            pause(0.01 * rank())
            dist.broadcast(rollout.sum(1), rank(), group=pairs[0, rank()])
        if optimizer is not None:
            said = [torch.empty(4), torch.empty(4)]
            for judge in (1, 2):
                dist.broadcast(said[judge - 1], judge, group=pairs[0, judge])
            (model(rollout).sum(1) * (said[0] - said[1])).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if i % 2 and rank() in (0, 3):  # new weights for rollouts, now and then
            for p in model.parameters():
                dist.broadcast(p.data, 0, group=pairs[0, 3])


@program()
def rl_trainers_in_pairs() -> None:
    """Two trainers by DDP and two that generate, each pair in a group; all meet twice a round."""
    trains = rank() < 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[0] if trains else groups[1]
    model = net()
    wrapped = DistributedDataParallel(model, process_group=mine) if trains else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if trains else None
    for i in rounds():
        rewards = [torch.empty(4) for _ in range(world())]
        if not trains:
            for _ in range(1 + i % 4):
                with torch.no_grad():
                    model(batch())
                dist.barrier(group=mine)
        dist.all_gather(rewards, torch.ones(4))
        if optimizer is not None:
            for _ in range(2):
                wrapped(batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p in model.parameters():
            dist.broadcast(p.data, 0)
