"""Loading what this process has saved: from its own memory, as long as that is what was written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptd
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

LARGE = 1 << 21


def fill(state: dict[str, Any], value: float) -> None:
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(value)


def plain() -> dict[str, Any]:
    return {
        "large": torch.zeros(LARGE),
        "small": torch.zeros(3),
        "strided": torch.zeros(40, 30).t(),
        "own": ckptd.PerRank([1, 2]),
    }


def is_filled(state: dict[str, Any], value: float) -> bool:
    tensors = [x for x in state.values() if isinstance(x, torch.Tensor)]
    return all(bool((x == value).all()) for x in tensors)


def sources(ck: ckptd.Checkpointer) -> dict[str, int]:
    assert ck.last_load is not None
    return dict(ck.last_load.sources)


def test_the_newest_step_comes_from_memory_and_an_older_one_from_the_root(tmp_path: Path) -> None:
    state = plain()
    nbytes = sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor))
    with ckptd.Checkpointer(str(tmp_path / "root"), copy=ckptd.CopyOptions(slots=1)) as ck:
        for step in (1, 2):
            fill(state, step)
            ck.save(step, state).durable(PATIENCE_S)
        for step, tier in ((2, "memory"), (1, "local"), (2, "local")):
            fill(state, -1)
            state["own"].value = None
            assert ck.load(state, step) == step
            assert is_filled(state, step)
            assert state["own"].value == [1, 2]
            assert sources(ck).get(tier, 0) >= nbytes, sources(ck)
            if step == 1:  # goes back, so that step 2 is another run's from now on
                fill(state, 2)
                ck.save(2, state).durable(PATIENCE_S)
                with torch.no_grad():
                    state["large"].add_(1)
                ck.save(3, state).durable(PATIENCE_S)


def test_what_is_in_memory_and_not_what_was_written_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = plain()
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        fill(state, 1)
        ck.save(1, state).durable(PATIENCE_S)
        client = ck._client
        assert client is not None
        (job,) = client._jobs.values()
        job.slot.data[LARGE] ^= 1
        fill(state, -1)
        with caplog.at_level(logging.WARNING, "ckptd"):
            assert ck.load(state) == 1
        assert "not reading from this process's memory" in caplog.text
        assert is_filled(state, 1)
        assert "memory" not in sources(ck)


def test_chunks_that_were_left_out_are_read(tmp_path: Path) -> None:
    """The file is shorter than the snapshot then, and nothing lies where it does there."""
    state = plain()
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        fill(state, 1)
        ck.save(1, state).durable(PATIENCE_S)
        state["small"].fill_(2)
        ck.save(2, state).durable(PATIENCE_S)
        fill(state, -1)
        assert ck.load(state) == 2
    assert bool((state["small"] == 2).all())
    assert bool((state["large"] == 1).all())


def test_only_some_and_renamed(tmp_path: Path) -> None:
    state = {"a": torch.full((LARGE,), 1.0), "b": torch.full((5,), 2.0)}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state).durable(PATIENCE_S)
        other = {"c": torch.zeros(5), "a": torch.zeros(LARGE)}
        ck.load(other, only="c", rename={"c": "b"})
        assert bool((other["c"] == 2).all())
        assert bool((other["a"] == 0).all())


def on_two_ranks(root: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    state = {
        "sharded": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole.clone() + 1, mesh, [Replicate()]),
        "same": whole.clone() + 2,
        "own": ckptd.PerRank(dist.get_rank()),
    }
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable(PATIENCE_S)
        for name in ("sharded", "replicated"):
            state[name].to_local().zero_()
        state["same"].zero_()
        state["own"].value = -1
        ck.load(state)
        found = sources(ck)
    assert torch.equal(state["sharded"].full_tensor(), whole)
    assert torch.equal(state["replicated"].full_tensor(), whole + 1)
    assert torch.equal(state["same"], whole + 2)
    assert state["own"].value == dist.get_rank()
    return found.get("memory", 0), found.get("local", 0)


def test_each_rank_takes_its_own_file_from_memory_and_reads_those_of_others(tmp_path: Path) -> None:
    for memory, local in run_ranks(2, on_two_ranks, str(tmp_path / "root"), deadline_s=120.0):
        assert memory >= 2 << 20
        assert local > 0
