"""`dcp.save` on four ranks, `dcp.load` on three: boxes cut another way, in one world each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptd
from ckptd.testing.ranks import rank_outcomes, run_ranks
from ckptd_dcp import CkptdReader, CkptdWriter
from tests.cli.running import Cli

pytestmark = pytest.mark.dist

WHOLE = {
    "uneven": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3),
    "two": torch.arange(5 * 6, dtype=torch.bfloat16).reshape(5, 6),
    "few": torch.arange(2, dtype=torch.int64),
    "copied": torch.arange(9, dtype=torch.float64),
}


def cut(world: int) -> dict[str, Any]:
    """Return the tensors, cut in ways that depend on the number of ranks."""
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2)) if world == 4 else line
    two = [Shard(0), Shard(1)] if world == 4 else [Shard(1)]
    some = [Replicate(), Shard(0)] if world == 4 else [Shard(0)]
    return {
        "uneven": distribute_tensor(WHOLE["uneven"], line, [Shard(0)]),
        "two": distribute_tensor(WHOLE["two"], square, two),
        "few": distribute_tensor(WHOLE["few"], square, some),
        "copied": WHOLE["copied"].clone(),
    }


class Net(nn.Module):
    """Two layers, whose sizes nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def net(tensor_parallel: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under FSDP2, over tensor parallelism where that is asked for."""
    torch.manual_seed(1)
    model = Net()
    world = dist.get_world_size()
    if tensor_parallel > 1:
        shape = (world // tensor_parallel, tensor_parallel)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def nets_state(tensor_parallel: int) -> dict[str, Any]:
    model, optimizer = net(tensor_parallel)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def whole(state: Any) -> Any:
    """Return a nested state with all tensors whole."""
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    return state.full_tensor().clone() if isinstance(state, DTensor) else state


def saves(root: str) -> Any:
    state = cut(4) | {"step": 1, "note": {"rank": "any"}}
    dcp.save(state, storage_writer=CkptdWriter(root, 1))
    trained = nets_state(2)
    for step in (2, 3):
        future: Any = dcp.async_save(
            trained, storage_writer=CkptdWriter(root), checkpoint_id=str(step)
        )
        future.result()
    # The same from the checkpointer, whose files are cut as it likes.
    with ckptd.Checkpointer(root + "-own") as ck:
        ck.save(1, cut(4))
    return whole(trained)


def loads(root: str) -> Any:
    for url, step in ((root, 1), (root + "-own", None)):
        state = cut(3)
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        state |= {"step": 0, "note": {"rank": ""}} if step else {}
        dcp.load(state, storage_reader=CkptdReader(url, step))
        found = whole(state)
        for name, tensor in WHOLE.items():
            assert torch.equal(found[name], tensor), name
        if step:
            assert found["step"] == 1
            assert found["note"] == {"rank": "any"}
    trained = nets_state(1)
    for moments in trained["optim"]["state"].values():
        for tensor in moments.values():
            tensor.zero_()
    dcp.load(trained, storage_reader=CkptdReader(root))
    found = whole(trained)
    # And on from there, by the ranks that are left.
    dcp.save(trained, storage_writer=CkptdWriter(root, 4))
    return found


def same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            same(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def dies(root: str) -> None:
    """The last rank dies between its share and the commit of all."""
    writer = CkptdWriter(root, 5)
    if dist.get_rank() == 1:
        write = writer.write_data

        def write_and_die(*given: Any) -> Any:
            write(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(writer, "write_data", write_and_die)  # noqa: B010 - a method of this object
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)


def test_four_ranks_save_and_three_load(tmp_path: Path, cli: Cli) -> None:
    root = str(tmp_path / "root")
    wanted = run_ranks(4, saves, root, deadline_s=100.0)
    found = run_ranks(3, loads, root, deadline_s=100.0)
    same(wanted[0], found[0])
    same(wanted[0], found[2])
    outcomes = rank_outcomes(2, dies, root, deadline_s=100.0)
    assert not any(outcome.returned for outcome in outcomes)
    listed = cli.json("ls", root)
    assert sorted(c["step"] for c in listed["checkpoints"]) == [1, 2, 3, 4]
    assert [c["world_size"] for c in listed["checkpoints"] if c["step"] == 4] == [3]
    cli.json("verify", root, "--all")
