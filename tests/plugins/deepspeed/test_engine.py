"""docs/examples/deepspeed_engine.py: what the guide gives for DeepSpeed resumes bit for bit."""

from __future__ import annotations

import os
import runpy
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.cli.running import Cli

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[3] / "docs/examples/deepspeed_engine.py"


def train(root: str, folder: str, stage: int, steps: int, kill: bool = False) -> Any:
    """Train to a step and save after every second one; return the step begun with and losses."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 6))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.checkpoint_engine = files = runpy.run_path(str(EXAMPLE))["CkptdEngine"](root)
    begun = 0
    if files.place(folder):
        engine.load_checkpoint(folder)
        begun = engine.global_steps
    losses = []
    for step in range(begun, steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 6, generator=generator)
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 2:
            if kill and step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.save_checkpoint(folder)
    return begun, losses


@pytest.mark.parametrize("stage", [1, 3])
def test_it_goes_on_bit_for_bit(cli: Cli, tmp_path: Path, stage: int) -> None:
    a, b = (str(tmp_path / name) for name in "ab")
    whole = run_ranks(2, train, a, str(tmp_path / "fa"), stage, 6, deadline_s=180.0)
    for ended in rank_outcomes(2, train, b, str(tmp_path / "fb"), stage, 6, True, deadline_s=180.0):
        assert not ended.returned
    # In another folder: all data is in the root.
    second = run_ranks(2, train, b, str(tmp_path / "other"), stage, 6, deadline_s=180.0)
    for (_, losses), (begun, since) in zip(whole, second, strict=True):
        assert begun == 2
        assert since == losses[2:]
    assert all(not p.stat().st_size for p in (tmp_path / "other").rglob("*.pt"))
    assert [c["step"] for c in cli.json("ls", b)["checkpoints"]] == [2, 4, 6]
    assert cli("verify", b).code == 0
