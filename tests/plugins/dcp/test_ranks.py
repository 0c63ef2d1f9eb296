"""`dcp.save` on four ranks, `dcp.load` on three of them: boxes cut another way."""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptd
from ckptd.testing.ranks import rank_outcomes
from ckptd_dcp import CkptdReader, CkptdWriter
from tests.cli.running import Cli

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("writing_thread")]

WHOLE = {
    "uneven": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3),
    "two": torch.arange(5 * 6, dtype=torch.bfloat16).reshape(5, 6),
    "few": torch.arange(2, dtype=torch.int64),
    "copied": torch.arange(9, dtype=torch.float64),
}


def cut(ranks: int) -> dict[str, Any]:
    """Return the tensors, cut in ways that depend on the number of ranks."""
    line = DeviceMesh("cpu", list(range(ranks)))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]]) if ranks == 4 else line
    two = [Shard(0), Shard(1)] if ranks == 4 else [Shard(1)]
    some = [Replicate(), Shard(0)] if ranks == 4 else [Shard(0)]
    if dist.get_rank() >= ranks:
        return {}
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


def trained(mesh: DeviceMesh) -> dict[str, Any]:
    """Return a model and its optimizer under FSDP2, over tensor parallelism on a square."""
    torch.manual_seed(1)
    model = Net()
    if mesh.ndim == 2:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def whole(state: Any) -> Any:
    """Return a nested state with all tensors whole."""
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    return state.full_tensor().clone() if isinstance(state, DTensor) else state


def same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            same(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def save_on_four(root: str) -> Any:
    state = cut(4) | {"step": 1, "note": {"rank": "any"}}
    dcp.save(state, storage_writer=CkptdWriter(root, 1))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = trained(square)
    for step in (2, 3):
        future: Any = dcp.async_save(
            made, storage_writer=CkptdWriter(root), checkpoint_id=str(step)
        )
        future.result()
    # The same from the checkpointer, whose files are cut as it likes.
    with ckptd.Checkpointer(root + "-own") as ck:
        ck.save(1, cut(4))
    return brought_back(made, root + "-torch")


def load_on_three(root: str, wanted: Any) -> None:
    group = dist.new_group([0, 1, 2])
    line = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
    pieces = cut(3)
    if dist.get_rank() == 3:
        return
    for url, step in ((root, 1), (root + "-own", None)):
        for tensor in pieces.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        state = pieces | ({"step": 0, "note": {"rank": ""}} if step else {})
        dcp.load(state, storage_reader=CkptdReader(url, step), process_group=group)
        said = {"step": 1, "note": {"rank": "any"}} if step else {}
        same(whole(state), WHOLE | said)
    made = trained(line)
    for tensor in [*made["model"].values(), *moments(made)]:
        tensor.zero_()
    dcp.load(made, storage_reader=CkptdReader(root), process_group=group)
    same(whole(made), wanted)
    # And on from there, by the ranks that are left.
    dcp.save(made, storage_writer=CkptdWriter(root, 4), process_group=group)


def brought_back(state: Any, folder: str) -> Any:
    """Return what torch's own load brings back of its own save, whole.

    `full_tensor` of PyTorch 2.9 mixes up the rows of a dimension that tensor parallelism and
    FSDP2 cut unevenly together.
    """
    dcp.save(state, checkpoint_id=folder)
    back = blank(state)
    dcp.load(back, checkpoint_id=folder, no_dist=True)
    return back


def blank(state: Any) -> Any:
    """Return a nested state whose tensors are whole and say nothing."""
    if isinstance(state, dict):
        return {k: blank(v) for k, v in state.items()}
    return torch.zeros(state.shape, dtype=state.dtype) if isinstance(state, torch.Tensor) else state


def moments(state: Any) -> list[torch.Tensor]:
    return [t for values in state["optim"]["state"].values() for t in values.values()]


def die(root: str) -> None:
    """A rank dies between its share and the commit of all."""
    writer = CkptdWriter(root, 5)
    if dist.get_rank() == 1:
        write = writer.write_data

        def write_and_die(*given: Any) -> Any:
            write(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(writer, "write_data", write_and_die)  # noqa: B010 - a method of this object
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)


def live(root: str) -> None:
    wanted = save_on_four(root)
    load_on_three(root, wanted)
    dist.barrier()
    (Path(root).parent / f"loaded{dist.get_rank()}").touch()
    die(root)


def test_four_ranks_save_and_three_load(tmp_path: Path, cli: Cli) -> None:
    root = str(tmp_path / "root")
    outcomes = rank_outcomes(4, live, root, deadline_s=200.0)
    loaded = [(tmp_path / f"loaded{rank}").exists() for rank in range(4)]
    assert all(loaded), [outcome.trace or outcome.log for outcome in outcomes]
    assert not any(outcome.returned for outcome in outcomes)
    assert outcomes[1].exit_code == -signal.SIGKILL
    listed = cli.json("ls", root)
    assert sorted(c["step"] for c in listed["checkpoints"]) == [1, 2, 3, 4]
    assert [c["world_size"] for c in listed["checkpoints"] if c["step"] == 4] == [3]
    cli.json("verify", root, "--all")
