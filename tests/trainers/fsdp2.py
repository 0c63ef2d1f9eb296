"""A trainer in the manner of pytorch/examples' FSDP2: blocks sharded, random tokens.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ckptd  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

STEPS = 12


def main(root: str, report: Report) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(layers=3)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    data = ckptd.Batches(lambda: torch.randint(0, 33, (4, 13)))  # ckptd
    state = {"model": model, "optim": optim, "data": data, "rng": ckptd.Rng()}  # ckptd
    ck = ckptd.Checkpointer(root, every=4)  # ckptd
    start = ck.load(state) if ck.latest() is not None else 0  # ckptd
    report.started(start)
    for step in range(start + 1, STEPS + 1):
        x = next(data)  # ckptd
        _, loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        ck.save(step, state)  # ckptd
        report.step(step, loss, ck)
    ck.close()  # ckptd
    report.ended(model.parameters())
