"""A trainer of accelerate: everything prepared, gradients accumulated, a loader shared out.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import accelerate
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptd  # ckptd
from ckptd_accelerate import state_of  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

STEPS = 12


def main(root: str, report: Report) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.utils.set_seed(5)
    tokens = torch.randint(33, (72, 13))
    loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    data = ckptd.Batches(loader)  # ckptd
    state = state_of(accelerator, data=data)  # ckptd
    ck = ckptd.Checkpointer(root, every=3)  # ckptd
    start = step = ck.load(state) if ck.latest() is not None else 0  # ckptd
    report.started(start)
    while step < STEPS:
        for (x,) in data:  # ckptd
            with accelerator.accumulate(model):
                _, loss = model(x[:, :-1], x[:, 1:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            ck.save(step, state)  # ckptd
            report.step(step, loss, ck)
            if step == STEPS:
                break
    ck.close()  # ckptd
    report.ended(model.parameters())
