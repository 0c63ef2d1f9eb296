"""Real ranks with real DTensors hold what the geometry says they hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptd.base.grids.block import Region
from ckptd.base.grids.sharding import Placement, local_regions, local_shape, nested
from ckptd.testing.ranks import run_ranks
from tests.base.grids import brute
from tests.base.grids.test_sharding import to_torch

# Minutes only where many others use the machine; seconds otherwise.
pytestmark = [pytest.mark.dist]

MESHES = ((6,), (2, 3), (3, 2), (6, 1), (2, 1, 3), (1, 3, 2))
SHAPES = ((7,), (6, 4), (5, 9), (13, 1, 3), (2, 0), (1,), (12, 5))
CUTS: tuple[Placement, ...] = (
    "replicate",
    ("shard", 0),
    ("shard", 1),
    ("strided", 0, 2),
    ("strided", 0, 3),
)


def held(regions: list[Region], shape: tuple[int, ...]) -> dict[int, int]:
    """Place in the local tensor -> row-major number of the element in the global one."""
    out = {}
    for r in regions:
        for place, c in brute.region_places(r.box.offset, r.box.shape, r.start, r.strides).items():
            number = 0
            for index, n in zip(c, shape, strict=True):
                number = number * n + index
            assert place not in out
            out[place] = number
    return out


def _compare_all(each: int) -> int:
    """On one rank: every mesh, shape and combination of placements; return how many.

    Of combinations for three mesh axes one in `each`; in one in three, any two axes have any two
    cuts.
    """
    compared = 0
    for mesh_shape in MESHES:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in SHAPES:
            full = torch.arange(torch.Size(shape).numel()).view(shape)
            axes = len(mesh_shape)
            combined = itertools.product(CUTS, repeat=axes)
            for placements in itertools.islice(combined, 0, None, each if axes == 3 else 1):
                if any(p != "replicate" and p[1] >= len(shape) for p in placements):
                    continue
                tensor = distribute_tensor(
                    full, mesh, [to_torch(p) for p in placements], src_data_rank=None
                )
                _compare(tensor, shape, mesh_shape, placements)
                compared += 1
    return compared


def _compare(
    tensor: DTensor,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> None:
    at = tensor.device_mesh.get_coordinate()
    assert at is not None
    local = tensor.to_local()
    case = (shape, mesh_shape, placements)
    assert local_shape(*case, at) == tuple(local.shape), (case, at)
    wanted = dict(enumerate(local.reshape(-1).tolist()))
    assert held(local_regions(*case, at), shape) == wanted, (case, at)


@pytest.mark.parametrize(
    ("each", "least"), [(3, 800), pytest.param(1, 2000, marks=pytest.mark.long)]
)
def test_distributed_tensors_on_six_ranks(each: int, least: int) -> None:
    counts = run_ranks(6, _compare_all, each, deadline_s=240)
    assert counts == [counts[0]] * 6
    assert counts[0] > least


def _fsdp_over_tensor_parallel(rows: int) -> tuple[bool, bool]:
    """Shard a parameter as a model does: tensor parallelism first, then FSDP2 over it.

    Return whether the nested, and whether the strided reading fits what this rank holds.
    """
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Linear(3, rows, bias=False)
    full = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    weight = distribute_tensor(full, mesh["tp"], [to_torch(("shard", 0))], src_data_rank=None)
    module.weight = torch.nn.Parameter(weight)
    fully_shard(module, mesh=mesh["dp"])
    sharded = module.weight
    assert isinstance(sharded, DTensor)
    strided: tuple[Placement, ...] = (("strided", 0, 2), ("shard", 0))
    assert sharded.placements == tuple(to_torch(p) for p in strided)
    assert _at(sharded.device_mesh) == _at(mesh)
    order = nested((3, 2), strided)
    assert order is not None
    local = dict(enumerate(sharded.to_local().reshape(-1).int().tolist()))
    fits = [
        held(local_regions((rows, 3), (3, 2), p, _at(mesh)), (rows, 3)) == local
        for p in (order, strided)
    ]
    return fits[0], fits[1]


def _at(mesh: DeviceMesh) -> tuple[int, ...]:
    at = mesh.get_coordinate()
    assert at is not None
    return tuple(at)


def _all_fsdp() -> list[tuple[bool, bool]]:
    return [_fsdp_over_tensor_parallel(rows) for rows in (12, 7, 5, 13, 1, 6)]


def test_fsdp2_over_tensor_parallelism_is_the_nested_reading() -> None:
    """Also where it comes out uneven, and torch's own placements describe it wrongly."""
    by_rank = run_ranks(6, _all_fsdp, deadline_s=240)
    for i in range(6):
        assert all(ranks[i][0] for ranks in by_rank)
    assert all(ranks[0][1] for ranks in by_rank)  # 12 rows: even, both readings fit
    assert not all(ranks[1][1] for ranks in by_rank)  # 7 rows: the strided one does not
