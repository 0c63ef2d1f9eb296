"""Samples that a training loop takes: the ranks agree, and the one that does not is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptd.monitor
from ckptd.errors import UsageError
from ckptd.monitor.rules.corruption import replica_differences
from ckptd.monitor.samples import SampleKind, SampleReader, samples_path
from ckptd.testing.ranks import run_ranks

Rows = np.ndarray[Any, Any]


def rows_of(recorder: Any) -> Rows:
    with SampleReader(samples_path(recorder.ring.path)) as reader:
        return reader.new()


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
    )


def trained(watched: bool, broken_at: int = -1) -> tuple[list[bytes], DistributedDataParallel]:
    """Train some steps; rank 2 computes something wrong after step `broken_at`."""
    ddp = DistributedDataParallel(model())
    if watched:
        ckptd.monitor.watch_gradients(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(6):
        if watched:
            ckptd.monitor.step(step)
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == broken_at and dist.get_rank() == 2:
            with torch.no_grad():
                ddp.module[0].weight[0, 0] += 1e-6
        if watched:
            ckptd.monitor.check_replicas(ddp.module[0], every=2)
    return [p.detach().numpy().tobytes() for p in ddp.parameters()], ddp


def job(folder: str) -> tuple[bool, Rows, list[float], Rows]:
    plain, _ = trained(False)
    recorder = ckptd.monitor.attach(folder)
    watched, _ = trained(True)
    good = rows_of(recorder)
    norms = good[good["what"] == SampleKind.NORM]["value"].tobytes()
    trained(True, broken_at=3)
    both = rows_of(recorder)
    bad = both[len(good) :]
    assert recorder.on
    return plain == watched, good, np.frombuffer(norms, "<f8").tolist(), bad


def table(results: list[Any], which: int, step: int) -> tuple[list[int], list[int]]:
    sets, sums = [], []
    for result in results:
        rows = result[which]
        [row] = rows[(rows["what"] == SampleKind.SUM) & (rows["step"] == step)]
        sets.append(int(row["set"]))
        sums.append(int(row["value"]))
    return sets, sums


@pytest.mark.dist
def test_replicas_agree_and_the_odd_one_is_named(tmp_path: Path) -> None:
    results = run_ranks(3, job, str(tmp_path))
    for same, good, norms, _ in results:
        assert same
        assert len(good) == 3 + 6
        assert set(good["members"]) == {3}
        assert all(math.isfinite(x) and x > 0 for x in norms)
    assert len({tuple(norms) for _, _, norms, _ in results}) == 3
    for step in (0, 2, 4):
        sets, sums = table(results, 1, step)
        assert len(set(sums)) == 1
    assert len({table(results, 1, step)[1][0] for step in (0, 2, 4)}) == 3
    sets, sums = table(results, 3, 4)
    [verdict] = replica_differences(sets, [0, 1, 2], sums, 4)
    assert [s.name for s in verdict.suspects] == ["2"]


def meshed(folder: str) -> tuple[list[int], list[int]]:
    recorder = ckptd.monitor.attach(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    tensors = {
        "hsdp": distribute_tensor(torch.randn(8, 4), mesh, [Replicate(), Shard(0)]),
        "tp": distribute_tensor(torch.randn(8, 4), mesh, [Shard(0), Replicate()]),
        "sharded": distribute_tensor(torch.randn(8, 4), mesh, [Shard(0), Shard(1)]),
    }
    ckptd.monitor.check_replicas(tensors, every=1)
    rows = rows_of(recorder)
    dist.barrier()
    return rows["set"].tolist(), rows["value"].tolist()


@pytest.mark.dist
def test_shards_are_compared_among_those_that_hold_them(tmp_path: Path) -> None:
    results = run_ranks(4, meshed, str(tmp_path))
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, (sets, sums) in enumerate(results):
        assert len(sets) == 2
        for name, value in zip(sets, sums, strict=True):
            found.setdefault(name, []).append((rank, value))
    assert sorted([r for r, _ in v] for v in found.values()) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert all(len({value for _, value in v}) == 1 for v in found.values())


def parts(folder: str) -> list[int]:
    """Change one byte in a far part; return the checks that see it."""
    recorder = ckptd.monitor.attach(folder)
    dist.new_group([0])
    seen = []
    tensor = torch.zeros(4 << 20, dtype=torch.uint8)
    other = tensor.clone()
    other[3 << 20] = 1
    from ckptd.monitor.rules.corruption import checksum
    from ckptd.monitor.torch.recorder.replicas import _bytes, _part

    for turn in range(8):
        sums = [
            checksum((n, _bytes(t, at)) for n, _, at in _part({"t": t}, turn, 1 << 20))
            for t in (tensor, other)
        ]
        if sums[0] != sums[1]:
            seen.append(turn)
    ckptd.monitor.check_replicas({"t": tensor}, every=1)
    assert not samples_path(recorder.ring.path).exists() or not len(rows_of(recorder))
    return seen


@pytest.mark.dist
def test_each_check_looks_at_another_part(tmp_path: Path) -> None:
    assert run_ranks(1, parts, str(tmp_path)) == [[3, 7]]


def test_without_a_recorder_nothing_is_done() -> None:
    ckptd.monitor.check_replicas({"t": torch.zeros(3)}, every=1)
    with pytest.raises(UsageError):
        ckptd.monitor.check_replicas({}, every=0)
