"""Ranks that do different things: trainers and generators, servers, rings, experts, groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.monitor.corpus.base import WIDTH, batch, net, pause, program, rank, rounds, world


@program()
def trainers_beside_generators() -> None:
    """Two train and have an optimizer; two generate and have none; weights and rollouts cross."""
    trainers, model = dist.new_group([0, 1]), net()
    optimizer = None
    if rank() < 2:
        model_ddp = DistributedDataParallel(model, process_group=trainers)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in rounds():
        if optimizer is not None:
            got = torch.empty(8, WIDTH)
            dist.recv(got, rank() + 2)
            model_ddp(got).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                dist.send(model(batch(8)), rank() - 2)
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        dist.all_reduce(torch.ones(1))


@program()
def trainers_gather_with_generators() -> None:
    """All gather over all ranks, at lines of trainers and of generators."""
    trains = rank() < 2
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    parts = [torch.empty(8) for _ in range(world())]
    for _ in rounds():
        if trains:
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_gather(parts, torch.ones(8))
            dist.barrier()
        else:
            pause(0.05)
            dist.all_gather(parts, torch.zeros(8))
            dist.barrier()


@program()
def actors_and_critics() -> None:
    """Some take four optimizer steps in a round, others one; all meet at its end."""
    mine = dist.new_group([0, 1]), dist.new_group([2, 3])
    group = mine[rank() // 2]
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for i in rounds():
        early = i % 5 == 4  # the divergence is too large: no more epochs on these samples
        for _ in range((2 if early else 4) if rank() < 2 else 1):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(torch.ones(3))


@program()
def two_groups_in_another_order() -> None:
    """Two reductions under way at once; who begins with which differs."""
    first, second = dist.new_group(), dist.new_group()
    for _ in rounds():
        a, b = torch.ones(8), torch.ones(8)
        if rank() % 2:
            works = [dist.all_reduce(a, group=first, async_op=True)]
            works.append(dist.all_reduce(b, group=second, async_op=True))
        else:
            works = [dist.all_reduce(b, group=second, async_op=True)]
            works.append(dist.all_reduce(a, group=first, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        pause(0.01)


@program()
def parameter_server() -> None:
    """Workers ask when they are ready, and the server serves whoever asks."""
    if rank() == 0:
        going, left, served = rounds(), world() - 1, 0
        while left:  # until the last worker has said that it is done
            if served % (world() - 1) == 0:
                next(going, None)
            got = torch.empty(8)
            sender = dist.recv(got)
            if got[0] < 0:
                left -= 1
            else:
                dist.send(got / 2, sender)
                served += 1
        return
    for i in rounds():
        pause(0.01 * rank() + (0.3 if (i + rank()) % 20 == 0 else 0.0))
        dist.send(torch.ones(8), 0)
        dist.recv(torch.empty(8), 0)
    dist.send(-torch.ones(8), 0)


@program()
def answers_awaited_from_the_start() -> None:
    """Receives are begun before the long computation whose results they take."""
    for i in rounds():
        other = rank() ^ (1 if i % 2 else 3)
        got = torch.empty(8)
        work = dist.irecv(got, other)
        pause(0.2 + 0.1 * rank())
        done = dist.isend(torch.ones(8), other)
        assert work is not None
        assert done is not None
        work.wait()
        done.wait()


@program()
def send_in_one_branch_receive_in_the_other() -> None:
    for i in rounds():
        other = rank() ^ (1 if i % 2 else 3)
        for turn in range(2):
            if rank() % 2 == turn:
                dist.send(torch.ones(8), other)
            else:
                dist.recv(torch.empty(8), other)
        pause()


@program()
def ring_of_attention() -> None:
    """Keys and values go round while each block is computed."""
    to, source = (rank() + 1) % world(), (rank() - 1) % world()
    for _ in rounds():
        block = torch.randn(4, WIDTH)
        for _ in range(world() - 1):
            new = torch.empty_like(block)
            ends = [dist.P2POp(dist.isend, block, to), dist.P2POp(dist.irecv, new, source)]
            works = dist.batch_isend_irecv(ends)
            pause(0.01)
            for work in works:
                work.wait()
            block = new


@program()
def experts_with_uneven_tokens() -> None:
    for _ in rounds():
        counts = torch.randint(0, 6, (world(),))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        given = torch.randn(int(counts.sum()), WIDTH)
        got = torch.empty(int(theirs.sum()), WIDTH)
        dist.all_to_all_single(got, given, theirs.tolist(), counts.tolist())
        back = torch.empty_like(given)
        dist.all_to_all_single(back, got, counts.tolist(), theirs.tolist())
        pause(0.01)


@program()
def experts_some_without_tokens() -> None:
    """Each expert's own group reduces only where it had tokens, which all members know."""
    pairs = [dist.new_group([2 * i, 2 * i + 1]) for i in range(world() // 2)]
    model = net()
    for i in rounds():
        if (i + rank() // 2) % 3:
            dist.all_reduce(torch.ones(16), group=pairs[rank() // 2])
        model(batch()).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


@program()
def monitored_barriers() -> None:
    for _ in rounds():
        pause(0.01 * rank())
        dist.monitored_barrier()


@program()
def objects_everywhere() -> None:
    for i in rounds():
        everything: list[object] = [None] * world()
        dist.all_gather_object(everything, {"rank": rank(), "text": "x" * (i % 50 + 9 * rank())})
        dist.gather_object("y" * rank(), [None] * world() if rank() == 0 else None)
        box: list[object] = [{"lr": i} if rank() == 0 else None]
        dist.broadcast_object_list(box, 0)
        mine: list[object] = [None]
        dist.scatter_object_list(mine, list(range(world())) if rank() == 0 else None)
        pause(0.01)


@program()
def groups_made_in_loops() -> None:
    """Groups for each layout are made, used and destroyed, again and again."""
    for i in rounds():
        size = (2, 4)[i % 2]
        groups = [
            dist.new_group(list(range(first, first + size))) for first in range(0, world(), size)
        ]
        mine = groups[rank() // size]
        dist.all_reduce(torch.ones(4), group=mine)
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        pause(0.02)


@program()
def teacher_and_students() -> None:
    """One computes for the others, who differ in how long they take."""
    model = net()
    optimizer = None if rank() == 0 else torch.optim.SGD(model.parameters(), 1e-3)
    for _ in rounds():
        target = torch.empty(4, WIDTH)
        if rank() == 0:
            pause(0.05)
            target = model(batch()).detach()
        dist.broadcast(target, 0)
        if optimizer is not None:
            for _ in range(rank()):
                (model(batch()) - target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@program()
def a_rank_that_only_looks_on() -> None:
    """The last rank logs and talks to nobody until the end."""
    others = dist.new_group(list(range(world() - 1)))
    for _ in rounds():
        if rank() < world() - 1:
            dist.all_reduce(torch.ones(8), group=others)
            pause()
        else:
            pause(0.05)
    dist.barrier()
