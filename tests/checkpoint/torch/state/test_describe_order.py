"""Parts that lie in another order than the coordinates of a mesh are refused, not put elsewhere.

torch cuts by places in process groups, which are sorted by rank, or as ``shard_order`` says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptd
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("writing_thread")]
WHOLE = torch.arange(16.0).reshape(8, 2)
REFUSED = "the parts of this tensor do not lie in the order of its mesh"


def fsdp(mesh: DeviceMesh) -> torch.Tensor:
    """Return a parameter that FSDP2 has cut over a mesh."""
    layer = torch.nn.Linear(2, 8, bias=False)
    layer.weight.data.copy_(WHOLE)
    fully_shard(layer, mesh=mesh)
    found: torch.Tensor = layer.state_dict()["weight"]
    return found


def from_right_to_left() -> torch.Tensor:
    """Return a tensor that the last axis of the mesh has cut first."""
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        return distribute_tensor(WHOLE, DeviceMesh("cpu", [3, 1, 2, 0]), [Shard(0)])
    mesh = init_device_mesh("cpu", (2, 2))
    form = spec.TensorMeta(WHOLE.shape, WHOLE.stride(), WHOLE.dtype)
    order = (spec.ShardOrderEntry(0, (1, 0)),)
    first, last = mesh.get_coordinate() or (0, 0)
    part = WHOLE.chunk(4)[last * 2 + first].clone()
    return DTensor(  # type: ignore[call-arg]
        part, spec.DTensorSpec(mesh, (Shard(0),) * 2, form, shard_order=order), requires_grad=False
    )


def outcome(root: str, value: torch.Tensor) -> str:
    """Save and load into whole tensors; say what came of it."""
    whole = torch.zeros(8, 2)
    try:
        with ckptd.Checkpointer(root) as ck:
            ck.save(1, {"w": value}).durable()
        with ckptd.Checkpointer(root) as ck:
            ck.load({"w": whole})
    except ckptd.CkptdError as error:
        return error.message
    return "right" if torch.equal(whole, WHOLE) else "wrong"


def orders(root: str) -> dict[str, str]:
    turned, square = DeviceMesh("cpu", [3, 1, 2, 0]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    values = {
        "turned": distribute_tensor(WHOLE, turned, [Shard(0)]),
        "turned-fsdp": fsdp(turned),
        "turned-replicas": distribute_tensor(WHOLE, turned, [Replicate()]),
        "right-to-left": from_right_to_left(),
        "transposed": distribute_tensor(WHOLE, square, [Shard(0), Shard(1)]),
        "ascending": fsdp(DeviceMesh("cpu", [0, 1, 2, 3])),
    }
    return {name: outcome(f"{root}/{name}", value) for name, value in values.items()}


def test_parts_in_another_order_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(4, orders, str(tmp_path), deadline_s=PATIENCE_S):
        assert found == {
            "turned": REFUSED,
            "turned-fsdp": REFUSED,
            "turned-replicas": "right",
            "right-to-left": REFUSED,
            "transposed": "right",
            "ascending": "right",
        }
