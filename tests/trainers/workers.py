"""Accumulation, scheduler, scaler, averaged weights, and a loader whose workers augment.

With torchdata's ``StatefulDataLoader`` augmentation is drawn from generators named by epoch and
sample, with torch's own loader from the streams of its workers. Lines that end in ``# ckptd`` are
those that ckptd took.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import ckptd  # ckptd
from ckptd.elastic import keyed_generator  # ckptd
from tests.trainers.report import Report

STEPS, ACCUMULATION = 14, 2
Sample = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[Sample]):
    """Pictures with noise that is new in each epoch."""

    def __init__(self, *, keyed: bool) -> None:
        self.x = torch.randn(54, 6, 6)
        self.y = torch.randint(5, (54,))
        self.keyed = keyed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:  # ckptd
        self.epoch = epoch  # ckptd

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Sample:
        stream = keyed_generator(1, self.epoch, i) if self.keyed else None  # ckptd
        picture = self.x[i].flip(-1) if torch.rand((), generator=stream) < 0.5 else self.x[i]
        return picture + 0.1 * torch.randn(6, 6, generator=stream), self.y[i]


def main(root: str, report: Report, *, stateful: bool = False) -> None:
    torch.manual_seed(3)
    data = Images(keyed=stateful)
    kind: Any = DataLoader
    if stateful:
        from torchdata import stateful_dataloader

        kind = stateful_dataloader.StatefulDataLoader
    how = {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "fork"}
    loader = kind(data, batch_size=4, shuffle=True, **how)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), nn.Dropout(0.3))
    model.append(nn.Linear(32, 5))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    batches = ckptd.Batches(loader)  # ckptd
    state = {"model": model, "ema": ema, "optim": optimizer}  # ckptd
    state |= {"sched": scheduler, "scaler": scaler}  # ckptd
    state |= {"data": batches, "rng": ckptd.Rng()}  # ckptd
    ck = ckptd.Checkpointer(root, every=4)  # ckptd
    start = ck.load(state) if ck.latest() is not None else 0  # ckptd
    report.started(start)
    for step in range(start + 1, STEPS + 1):
        for _ in range(ACCUMULATION):
            x, y = next(batches)  # ckptd
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss / ACCUMULATION).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        ema.update_parameters(model)
        ck.save(step, state)  # ckptd
        report.step(step, loss, ck)
        report.line(f"scale{step}", scaler.get_scale().hex())
    ck.close()  # ckptd
    report.ended(model.parameters(), ema.parameters())
