"""A trainer in the manner of nanoGPT: DDP, batches fetched ahead, evaluation on rank 0 only.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptd  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

MAX_ITERS, EVAL_INTERVAL, ACCUMULATION, BATCH, BLOCK = 14, 2, 2, 4, 12


def main(root: str, report: Report) -> None:
    rank = dist.get_rank()
    master = rank == 0
    torch.manual_seed(1337 + rank)
    tokens = {name: np.random.default_rng(i).integers(0, 33, 4000) for i, name in enumerate("tv")}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = tokens[split]
        ix = torch.randint(len(data) - BLOCK, (BATCH,))
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK]) for i in ix.tolist()])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK]) for i in ix.tolist()])
        return x, y

    raw_model = GPT()
    model = DistributedDataParallel(raw_model)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    progress = {"best_val_loss": 1e9}

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        raw_model.eval()
        for split in "tv":
            out[split] = sum(float(raw_model(*get_batch(split))[1]) for _ in range(3)) / 3
        raw_model.train()
        return out

    def get_lr(it: int) -> float:
        return 3e-4 + 0.5 * (1.0 + math.cos(math.pi * it / MAX_ITERS)) * (3e-3 - 3e-4)

    data = ckptd.Batches(lambda: get_batch("t"), ahead=1)  # ckptd
    first = lambda values: values[0]  # ckptd  # noqa: E731
    own = ckptd.PerRank(progress, on_change="reduce", reduce=first)  # ckptd
    state = {"model": model, "optim": optimizer, "rng": ckptd.Rng()}  # ckptd
    state |= {"data": data, "own": own}  # ckptd
    ck = ckptd.Checkpointer(root, keep=3)  # ckptd
    iter_num = ck.load(state) if ck.latest() is not None else 0  # ckptd
    begin = iter_num
    report.started(iter_num)
    X, Y = next(data)  # ckptd
    while True:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % EVAL_INTERVAL == 0 and iter_num > begin:
            if master:
                losses = estimate_loss()
                progress["best_val_loss"] = min(progress["best_val_loss"], losses["v"])
                report.line(f"val{iter_num}", progress["best_val_loss"].hex())
            ck.save(iter_num, state)  # ckptd
        if iter_num == MAX_ITERS:
            break
        for micro_step in range(ACCUMULATION):
            with model.no_sync() if micro_step < ACCUMULATION - 1 else nullcontext():
                _, loss = model(X, Y)
                X, Y = next(data)  # ckptd
                scaler.scale(loss / ACCUMULATION).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        report.step(iter_num, loss, ck)
    ck.close()  # ckptd
    report.ended(raw_model.parameters())
