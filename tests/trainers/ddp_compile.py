"""DDP around a compiled model with dropout, a shuffled DataLoader for each rank, two epochs.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckptd  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

EPOCHS = 3


def main(root: str, report: Report) -> None:
    torch.manual_seed(3)
    tokens = torch.randint(33, (40, 13))
    model = torch.compile(DistributedDataParallel(GPT()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(tokens)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    batches = ckptd.Batches(loader)  # ckptd
    state = {"model": model, "optim": optimizer, "sched": scheduler}  # ckptd
    state |= {"data": batches, "rng": ckptd.Rng()}  # ckptd
    ck = ckptd.Checkpointer(root, every=4)  # ckptd
    step = ck.load(state) if ck.latest() is not None else 0  # ckptd
    report.started(step)
    for _ in range(batches.epoch, EPOCHS):  # ckptd
        for (x,) in batches:  # ckptd
            optimizer.zero_grad()
            _, loss = model(x[:, :-1], x[:, 1:])
            loss.backward()
            optimizer.step()
            step += 1
            ck.save(step, state)  # ckptd
            report.step(step, loss, ck)
        scheduler.step()
    ck.close()  # ckptd
    report.ended(model.parameters())
