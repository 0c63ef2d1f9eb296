"""The pattern of torchtitan's loop: meta device, FSDP2, recomputation, a stateful loader.

Not torchtitan itself. Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

import ckptd  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

STEPS, ACCUMULATION = 12, 2
Pair = tuple[torch.Tensor, torch.Tensor]


class Texts(IterableDataset[torch.Tensor]):
    """Packs a stream of documents into sequences, for ever, and tells where it is."""

    def __init__(self, rank: int, world: int) -> None:
        self.tokens = torch.randint(33, (1000,)).tolist()[rank::world]
        self.at = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            size = 5 + self.at % 7
            self.buffer += [self.tokens[(self.at + i) % len(self.tokens)] for i in range(size)]
            self.at += size
            while len(self.buffer) >= 13:
                sequence, self.buffer = self.buffer[:13], self.buffer[13:]
                yield torch.tensor(sequence)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])


class Loader(DataLoader[torch.Tensor]):
    """A loader whose position is its data set's."""

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]


def main(root: str, report: Report) -> None:
    torch.manual_seed(7)
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = Loader(Texts(rank, world), batch_size=3)
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = GPT(layers=3)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model.blocks[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
    train_state = {"ntokens_seen": 0}
    batches = ckptd.Batches(loader)  # ckptd
    state = {"model": model, "optim": optimizer, "sched": warm, "train_state": train_state}  # ckptd
    state |= {"data": batches, "rng": ckptd.Rng()}  # ckptd
    ck = ckptd.Checkpointer(root, every=3)  # ckptd
    step = ck.load(state) if ck.latest() is not None else 0  # ckptd
    report.started(step)

    def batch_generator(source: Any) -> Iterator[Pair]:
        for x in source:
            train_state["ntokens_seen"] += x.numel() * world
            yield x[:, :-1], x[:, 1:]

    data_iterator = batch_generator(batches)  # ckptd
    while step < STEPS:
        step += 1
        optimizer.zero_grad()
        losses = []
        for micro_step in range(ACCUMULATION):
            model.set_requires_gradient_sync(micro_step == ACCUMULATION - 1)
            _, loss = model(*next(data_iterator))
            (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        warm.step()
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        if not math.isfinite(float(norm)):
            raise ValueError(norm)
        ck.save(step, state)  # ckptd
        report.step(step, total, ck)
        report.line(f"tokens{step}", str(train_state["ntokens_seen"]))
    ck.close()  # ckptd
    report.ended(model.parameters())
