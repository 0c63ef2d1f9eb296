"""Buffers that are each rank's own: the lowest rank's are saved, whole, and nothing is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.errors import SaveError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist]
WIDTH = 8


class Counting(nn.Module):
    """Has a buffer that is no norm layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean(0)
        return x


def make(counting: bool = True) -> nn.Module:
    torch.manual_seed(1)
    parts = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*parts, *([Counting()] if counting else []))


def train(model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(5, WIDTH, generator=draw)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def everybodys(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def in_ddp(root: str) -> None:
    model = DistributedDataParallel(make())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    train(model, optim, 0, 3)
    means = everybodys(model.module[1].running_mean)
    assert not torch.equal(means[0], means[1]), "nothing is tested"
    with ckptd.Checkpointer(root) as ck:
        ck.save(3, state).durable(PATIENCE_S)
        wanted = train(model, optim, 3, 6)
        other = DistributedDataParallel(make())
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.data.random_(5)
        again = torch.optim.SGD(other.parameters(), lr=0.1)
        ck.load({"model": other, "optim": again})
        assert torch.equal(other.module[1].running_mean, means[0])
        assert train(other, again, 3, 6) == wanted


def test_what_ddp_broadcasts_is_rank_zeros_and_training_goes_on_exactly(tmp_path: Path) -> None:
    run_ranks(2, in_ddp, str(tmp_path / "root"))


def bare(root: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptd").addHandler(handler)
    model = make(counting=False)
    wrapped = DistributedDataParallel(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optim": optim}
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2):
            train(wrapped, optim, step, step + 1)
            ck.save(step, state).durable(PATIENCE_S)
        stats = model[1].state_dict()
        wanted = {n: everybodys(stats[n])[0] for n in ("running_mean", "running_var")}
        for buffer in model.buffers():
            buffer.zero_()
        ck.load(state)
        for name, value in wanted.items():
            assert torch.equal(model[1].state_dict()[name], value), name
    return [t for t in told if "statistics" in t]


def test_statistics_of_a_bare_module_are_the_lowest_ranks_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, bare, str(tmp_path / "root"))
    assert len(first) == 1
    assert not second
    assert "1.running_mean" in first[0]


def buffers_of_ones_own(root: str) -> str:
    model = make()
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, 1)
    with ckptd.Checkpointer(root) as ck, pytest.raises(SaveError) as caught:
        ck.save(1, {"model": model}).durable(PATIENCE_S)
    return f"{caught.value.kind} {caught.value.where}"


def test_a_buffer_that_nobody_broadcasts_is_still_compared(tmp_path: Path) -> None:
    for told in run_ranks(2, buffers_of_ones_own, str(tmp_path / "root")):
        assert told.startswith("replicas-differ")
        assert "3.seen" in told


def not_broadcast(root: str) -> str:
    model = DistributedDataParallel(make(), broadcast_buffers=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, 1)
    with ckptd.Checkpointer(root) as ck, pytest.raises(SaveError) as caught:
        ck.save(1, {"model": model}).durable(PATIENCE_S)
    return f"{caught.value.kind} {caught.value.where}"


def test_ddp_that_broadcasts_nothing_excuses_nothing(tmp_path: Path) -> None:
    for told in run_ranks(2, not_broadcast, str(tmp_path / "root")):
        assert told.startswith("replicas-differ")
        assert "3.seen" in told
        assert "running" not in told
