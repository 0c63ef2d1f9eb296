"""The first NaN that a rank gives to others is found, and what is so on purpose is not told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptd.monitor
from ckptd.monitor.ring import RingReader
from ckptd.monitor.samples import SampleReader, samples_path
from ckptd.monitor.torch.recorder.finite import sums
from ckptd.testing.ranks import run_ranks
from tests.monitor.torch.recorder.jobs import attach
from tests.monitor.torch.recorder.test_recorder import use

AT, RANK, STEPS = 5, 2, 9
Found = list[tuple[int, int, str]]


def spoiled(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[1] = float("inf")
    return gradient


def train(scaled: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        # The mean of nothing, on purpose, in each step.
        empty = torch.tensor([float("nan") if dist.get_rank() == 1 else 1.0, 0.0])
        dist.all_reduce(empty)
        optimizer.zero_grad()
        here = step == AT and dist.get_rank() == RANK
        handle = model[1].bias.register_hook(spoiled) if here else None
        scaler.scale(ddp(torch.randn(4, 8)).square().mean()).backward()
        if handle is not None:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()


def job(folder: str, source: str, scaled: bool) -> Found:
    """Train; return step, call and parameter of each sample of this rank."""
    os.environ["CKPTD_FINITE"] = "1"
    recorder = attach(folder, source)
    train(scaled)
    path = samples_path(recorder.ring.path)
    assert recorder.on
    if not path.exists():
        return []
    with RingReader(recorder.ring.path) as ring:
        texts = ring.texts()
    with SampleReader(path) as reader:
        return [
            (int(row["step"]), int(row["value"]) >> 32, texts[int(row["value"]) & 0xFFFFFFFF])
            for row in reader.new()
        ]


@pytest.mark.dist
@pytest.mark.parametrize("source", ["python", "native"])
def test_the_first_is_found_with_its_step_and_parameter(source: str, tmp_path: Path) -> None:
    told = run_ranks(4, job, str(tmp_path), use(source), False)
    assert [len(rows) for rows in told] == [1, 1, 1, 1]
    steps = [rows[0][0] for rows in told]
    assert steps == [AT + (rank != RANK) for rank in range(4)]
    assert told[RANK][0][2] == "1.bias"
    assert all(rows[0][1] > told[RANK][0][1] for rank, rows in enumerate(told) if rank != RANK)


@pytest.mark.dist
def test_steps_that_a_scaler_leaves_out_are_not_told(tmp_path: Path) -> None:
    assert run_ranks(4, job, str(tmp_path), "python", True) == [[], [], [], []]


def unasked(folder: str) -> bool:
    recorder: Any = ckptd.monitor.attach(folder)
    train(False)
    return samples_path(recorder.ring.path).exists()


@pytest.mark.dist
def test_nothing_is_looked_at_unasked(tmp_path: Path) -> None:
    assert run_ranks(4, unasked, str(tmp_path)) == [False] * 4


def test_only_reductions_that_spread_it_are_looked_at() -> None:
    for name in ("all_reduce", "all_reduce avg", "reduce_scatter_single", "reduce"):
        assert sums(name)
    for name in ("all_reduce max", "all_gather", "broadcast", "p2p", "all_reduce bor"):
        assert not sums(name)
