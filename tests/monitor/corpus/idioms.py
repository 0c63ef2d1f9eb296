"""Idioms: who goes first, who evaluates, who saves, how they stop."""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.monitor.corpus.base import batch, net, pause, program, rank, rounds, world


class Trained:
    """A model under DDP and its optimizer."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def step(self, x: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch() if x is None else x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@program()
def bare_loop() -> None:
    x = torch.ones(1000)
    for _ in rounds():
        dist.all_reduce(x)
        x /= world()
        pause()


@contextmanager
def _main_process_first() -> Iterator[None]:
    """Rank 0 comes out of its block before the others come into theirs."""
    if rank() != 0:
        dist.barrier()
    yield
    if rank() == 0:
        dist.barrier()


@program()
def main_process_first() -> None:
    trained = Trained()
    for i in rounds():
        if i % 10 == 0:
            with _main_process_first():
                pause(2.0 if rank() == 0 else 0.05)
        trained.step()


@contextmanager
def _zero_first() -> Iterator[None]:
    if rank() not in (-1, 0):
        dist.barrier()
    yield
    if rank() == 0:
        dist.barrier()


@program()
def zero_first_twice_nested() -> None:
    """As data sets for training and validation are read, one after the other, with a loop after."""
    for i in rounds():
        with _zero_first():
            pause(0.5 if rank() == 0 else 0.01)
        with _zero_first():
            pause(0.3 if rank() == 0 else 0.01)
        if i % 2:
            dist.all_reduce(torch.ones(4))


@program()
def each_in_its_turn() -> None:
    """Ranks do something one after the other, each between barriers at lines of its own turn."""
    for _ in rounds():
        for turn in range(world()):
            if turn == rank():
                pause(0.05)
                dist.barrier()
            else:
                dist.barrier()


@program()
def rank_0_evaluates() -> None:
    trained = Trained()
    for i in rounds():
        trained.step()
        if i % 50 == 20:
            if rank() == 0:
                end = time.monotonic() + 6
                while time.monotonic() < end:
                    trained.model.module(batch(64))
            dist.barrier()


@program()
def rank_0_saves() -> None:
    trained = Trained()
    folder = Path(tempfile.mkdtemp(prefix="ckptd-corpus-"))
    for i in rounds():
        trained.step()
        if i % 40 == 10:
            if rank() == 0:
                torch.save([torch.randn(1 << 20) for _ in range(16)], folder / "state.pt")
                os.unlink(folder / "state.pt")
            dist.barrier()
    folder.rmdir()


@program()
def everybody_evaluates() -> None:
    trained = Trained()
    for i in rounds():
        trained.step()
        if i % 30 == 29:
            total = torch.zeros(2)
            for _ in range(5 + rank()):
                total += torch.tensor([float(trained.model.module(batch()).sum()), 1.0])
            dist.all_reduce(total)


@program()
def early_stop_by_broadcast() -> None:
    trained = Trained()
    for _ in rounds():
        loss = trained.step()
        flag = torch.tensor([0])
        if rank() == 0:
            flag[0] = int(bool(loss < 0))
        dist.broadcast(flag, 0)
        if flag.item():
            break


@program()
def accumulation_without_sync() -> None:
    trained = Trained()
    for _ in rounds():
        with trained.model.no_sync():
            for _ in range(3):
                trained.model(batch()).square().mean().backward()
        trained.step()


@program()
def uneven_inputs_joined() -> None:
    """Who has fewer batches shadows the calls of the others."""
    from torch.distributed.algorithms.join import Join

    trained = Trained()
    for _ in rounds():
        with Join([trained.model]):
            for _ in range(3 + 2 * rank()):
                trained.step()


@program()
def gan_with_two_optimizers() -> None:
    maker, judge = DistributedDataParallel(net(1)), DistributedDataParallel(net(2))
    first = torch.optim.Adam(judge.parameters(), 1e-3)
    second = torch.optim.Adam(maker.parameters(), 1e-3)
    for i in rounds():
        judge(maker(batch()).detach()).mean().backward()
        first.step()
        first.zero_grad()
        if i % 3 == 0:
            judge(maker(batch())).square().mean().backward()
            second.step()
            second.zero_grad()
            first.zero_grad()


@program()
def dataloader_stalls() -> None:
    class Slow(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 97 == 13:
                time.sleep(1.5)
            return batch(1)[0]

    trained = Trained()
    data = iter(DataLoader(Slow(), batch_size=4, num_workers=1))
    for _ in rounds():
        trained.step(next(data))


@program()
def first_step_compiles() -> None:
    torch._dynamo.config.cache_size_limit = 64
    plain = net()
    model = DistributedDataParallel(plain)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(plain.parameters(), 1e-3)
    for i in rounds():
        compiled(batch(4 + i % 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pause(0.01)


@program()
def garbage_and_logs() -> None:
    """Each rank writes a log, at times of its own, and collects its garbage."""
    import gc

    trained = Trained()
    log = io.StringIO()
    for i in rounds():
        loss = trained.step()
        if (i + 7 * rank()) % 25 == 0:
            gc.collect()
            log.write(f"{i} {float(loss)}\n")
            pause(0.3)


@program()
def calls_in_a_second_thread() -> None:
    """Figures are gathered beside training, in a group of their own."""
    trained, beside = Trained(), dist.new_group()
    ended = threading.Event()

    def gather() -> None:
        while True:
            flag = torch.tensor([float(ended.is_set())])
            dist.all_reduce(flag, group=beside)
            if flag[0] == world():
                return
            time.sleep(0.05)

    thread = threading.Thread(target=gather)
    thread.start()
    for _ in rounds():
        trained.step()
    ended.set()
    thread.join()


@program()
def loss_to_rank_0() -> None:
    trained = Trained()
    for i in rounds():
        loss = trained.step()
        dist.reduce(loss, 0)
        if i % 10 == 0:
            parts = [torch.empty(()) for _ in range(world())] if rank() == 0 else None
            dist.gather(loss, parts, dst=0)
            given = [torch.ones(3) for _ in range(world())] if rank() == 0 else None
            dist.scatter(torch.empty(3), given, src=0)


@program()
def one_has_no_work_left() -> None:
    """The last rank is done with its shard early, and waits at the end of each epoch."""
    for _ in rounds():
        for _ in range(2 if rank() == world() - 1 else 12):
            pause(0.02)
        dist.barrier()


@program()
def group_made_anew() -> None:
    """The job's own group is destroyed and joined again, as after an error that was caught."""
    for i in rounds():
        if i % 30 == 29:
            store = dist.distributed_c10d._get_default_store()
            me, size = rank(), world()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(str(i), store), rank=me, world_size=size
            )
        dist.all_reduce(torch.ones(4))
        pause()
