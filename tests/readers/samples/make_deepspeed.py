"""Make what DeepSpeed saves of experts and of pipelines; `expected.npz` has the ranks' parameters.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 make_deepspeed.py FOLDER moe-1-bf16 pipe-0-fp32 ...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
EXPERTS, EP = 4, 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8))
        self.up = nn.Linear(6, 8)
        self.moe = MoE(8, expert, num_experts=EXPERTS, ep_size=EP, k=1, min_capacity=0)
        self.down = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = self.up(x)
        return self.down(x + self.moe(x)[0])


def pipeline() -> Any:
    layers = [
        TiedLayerSpec("emb", nn.Linear, 6, 6, bias=False),
        LayerSpec(nn.Linear, 6, 8),
        nn.ReLU(),
        LayerSpec(nn.Linear, 8, 6),
        TiedLayerSpec("emb", nn.Linear, 6, 6, bias=False),
        LayerSpec(nn.Linear, 6, 5),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")


def make(folder: Path, kind: str, stage: int, dtype: str) -> None:
    torch.manual_seed(0)
    net = pipeline() if kind == "pipe" else Experts()
    groups: Any = [{"params": list(net.parameters()), "name": "all"}]
    if kind != "pipe":
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "use_data_before_expert_parallelism": kind == "moeshared",
    }
    opt = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    rank, real = dist.get_rank(), torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.manual_seed(10 + rank)
    for _ in range(2):
        if kind == "pipe":
            engine.train_batch(iter([(torch.randn(2, 6).to(real), torch.randn(2, 5).to(real))] * 2))
        else:
            engine.backward(engine(torch.randn(8, 3, 6).to(real)).float().pow(2).mean())
            engine.step()
    out = folder / f"{kind}{stage}-{dtype}"
    engine.save_checkpoint(str(out), tag="global_step2")
    mine = {}
    for name, value in net.named_parameters():
        mine_of = rank // EP if kind == "moeshared" else rank % EP
        shift = mine_of * (EXPERTS // EP)
        whole = re.sub(r"(?<=deepspeed_experts\.)\d+", lambda m, s=shift: str(int(m[0]) + s), name)
        mine[whole] = value.detach().float().numpy()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if rank == 0:
        np.savez_compressed(out / "expected.npz", **{n: v for one in every for n, v in one.items()})
        for path in out.glob("zero_to_*.py"):
            path.unlink()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for argument in sys.argv[2:]:
        which, number, real_type = argument.split("-")
        make(Path(sys.argv[1]), which, int(number), real_type)
    dist.destroy_process_group()
