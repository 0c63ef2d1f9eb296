"""Placements mean what torch's own placement classes do, element by element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ckptd.base.grids.grid import strides_of
from ckptd.base.grids.plan import plan, prove
from ckptd.base.grids.sharding import (
    Placement,
    ambiguous,
    local_regions,
    local_shape,
    nested,
    owner_array,
    sharded_grid,
)
from tests.base.grids import brute

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


def to_torch(placement: Placement) -> Any:
    if placement == "replicate":
        return Replicate()
    if placement[0] == "shard":
        return Shard(placement[1])
    return _StridedShard(placement[1], split_factor=placement[2])  # type: ignore[misc]


def torch_local(tensor: torch.Tensor, case: Case, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Cut a full tensor as `distribute_tensor` does, with torch's own code."""
    _, mesh_shape, placements = case
    for size, placement, at in zip(mesh_shape, placements, coordinate, strict=True):
        if placement != "replicate":
            parts, _ = to_torch(placement)._split_tensor(tensor, size, with_padding=False)
            tensor = parts[at]
    return tensor


@st.composite
def cases(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Case:
    """A tensor on a 1-d to 3-d mesh; one dimension is favoured, so that cuts pile up."""
    if shape is None:
        shape = draw(
            st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple),
        )
    dims = st.one_of(st.just(0), st.integers(0, len(shape) - 1))
    placement: st.SearchStrategy[Placement] = st.one_of(
        st.just("replicate"),
        dims.map(lambda d: ("shard", d)),
        st.tuples(st.just("strided"), dims, st.integers(1, 5)),
    )
    mesh_shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


def coordinates(case: Case) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in case[1])))


@given(cases())
@example(((10,), (4,), (("shard", 0),)))  # uneven
@example(((5,), (4,), (("shard", 0),)))  # a rank gets nothing
@example(((8, 8), (2, 2), (("strided", 0, 2), ("shard", 0))))  # FSDP2 over tensor parallelism
@example(((7, 3), (3, 2), (("strided", 0, 2), ("shard", 0))))  # the same, uneven
@example(((12, 2), (4,), (("strided", 0, 2),)))  # fused gate and up
@example(((9, 4), (2, 2, 2), (("strided", 0, 4), ("strided", 0, 2), ("shard", 0))))
def test_local_tensors_are_torchs(case: Case) -> None:
    shape, mesh_shape, placements = case
    full = torch.arange(math.prod(shape)).view(shape)
    for at in coordinates(case):
        local = torch_local(full, case, at)
        assert local_shape(*case, at) == tuple(local.shape)
        got = np.full(local.numel(), -1)
        for region in local_regions(*case, at):
            box = region.box
            places = brute.region_places(box.offset, box.shape, region.start, region.strides)
            for place, coordinate in places.items():
                assert got[place] == -1
                got[place] = full[coordinate]
        assert np.array_equal(got, local.reshape(-1).numpy())
        stated, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(at), [to_torch(p) for p in placements]
        )
        assert local_shape(*case, at) == tuple(stated)
        if local.numel():
            assert local_regions(*case, at)[0].box.offset == tuple(offset)


@given(cases(), st.data())
def test_cells_are_the_segments_of_their_holders(case: Case, data: st.DataObject) -> None:
    shape, mesh_shape, placements = case
    grid, holders = sharded_grid(*case)
    assert grid.shape == shape
    ranks = np.array(data.draw(st.permutations(range(math.prod(mesh_shape))))).reshape(mesh_shape)
    replica = [data.draw(st.integers(0, n - 1)) for n in mesh_shape]
    owners = owner_array(*case, ranks, replica)
    assert owners.shape == (grid.ncells,)
    held = {int(ranks[c]): {r.box for r in local_regions(*case, c)} for c in coordinates(case)}
    where = {int(ranks[c]): c for c in coordinates(case)}
    for cell, owner in enumerate(owners.tolist()):
        box = grid.cell_box(cell)
        assert box.numel == 0 or box in held[owner]
        for axis, placement in enumerate(placements):
            if placement == "replicate":
                assert where[owner][axis] == replica[axis]
    cutting = {a for h in holders for a in h.mesh_axes}
    assert cutting == {a for a, p in enumerate(placements) if p != "replicate"}
    if math.prod(shape):
        # Nothing is cut finer than it must be, and every holder's boxes are cells.
        assert {grid.cell_box(i) for i in range(grid.ncells)} == set().union(*held.values())


@given(st.data())
def test_any_layout_loads_into_any_other(data: st.DataObject) -> None:
    """From what owners hold to what each rank of another world wants, over real bytes."""
    source = data.draw(cases())
    target = data.draw(cases(shape=source[0]))
    full = torch.arange(math.prod(source[0])).view(source[0])
    grid = sharded_grid(*source).grid
    pieces = []
    for index in range(grid.npieces):
        box = grid.piece(index).box
        pieces.append(brute.elements(box.offset, box.shape))
    for at in coordinates(target):
        regions = local_regions(*target, at)
        got = brute.execute(plan(grid, regions), pieces)
        local = torch_local(full, target, at).reshape(-1).tolist()
        assert {place: int(full[c]) for place, c in got.items()} == dict(enumerate(local))
        assert prove(grid, regions).elements == len(local)


@given(cases(), st.data())
def test_a_local_tensor_may_have_any_strides(case: Case, data: st.DataObject) -> None:
    at = data.draw(st.sampled_from(coordinates(case)))
    shape = local_shape(*case, at)
    order = data.draw(st.permutations(range(len(shape))))
    dense = strides_of(tuple(shape[d] for d in order))
    strides = tuple(dense[order.index(d)] for d in range(len(shape)))
    got: dict[int, brute.Coordinate] = {}
    for r in local_regions(*case, at, strides):
        got |= brute.region_places(r.box.offset, r.box.shape, r.start, r.strides)
    plain: dict[int, brute.Coordinate] = {}
    for r in local_regions(*case, at):
        plain |= brute.region_places(r.box.offset, r.box.shape, r.start, r.strides)
    rows = strides_of(shape)
    for index in brute.elements((0,) * len(shape), shape):
        here = sum(i * s for i, s in zip(index, strides, strict=True))
        assert got[here] == plain[sum(i * s for i, s in zip(index, rows, strict=True))]


@given(st.data())
def test_nested_cuts_are_chunks_of_chunks(data: st.DataObject) -> None:
    """FSDP2 chunks the tensor-parallel shard: the last mesh dimension cuts first."""
    rows = data.draw(st.integers(0, 40))
    dp, tp = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 6))
    found = nested((dp, tp), (("strided", 0, tp), ("shard", 0)))
    assert found == (("ordered", 0, 1), ("ordered", 0, 0))
    for i, j in itertools.product(range(dp), range(tp)):
        shard = Shard(0)._split_tensor(torch.arange(rows), tp, with_padding=False)[0][j]
        wanted = Shard(0)._split_tensor(shard, dp, with_padding=False)[0][i].tolist()
        regions = local_regions((rows,), (dp, tp), found, (i, j))
        got = [r.box.offset[0] + k for r in regions for k in range(r.box.shape[0])]
        assert got == wanted


def test_holders_of_nested_cuts_are_in_mesh_order() -> None:
    """7 rows, 2 tensor and 3 data ranks: tensor rank 1 has rows 4 to 6, one for each data rank."""
    case: Case = ((7,), (3, 2), (("ordered", 0, 1), ("ordered", 0, 0)))
    grid, (holder,) = sharded_grid(*case)
    assert list(grid.axes[0].sizes()) == [2, 2, 1, 1, 1]
    assert holder.mesh_axes == (0, 1)
    assert holder.coordinates.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 1]]
    assert owner_array(*case, np.arange(6).reshape(3, 2)).tolist() == [0, 2, 1, 3, 5]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_two_cuts_that_are_ambiguous_show_in_some_local_shape(rows: int, dp: int, tp: int) -> None:
    strided: tuple[Placement, ...] = (("strided", 0, tp), ("shard", 0))
    order = nested((dp, tp), strided)
    assert order is not None
    readings = [
        [
            (local_shape((rows,), (dp, tp), p, at), local_regions((rows,), (dp, tp), p, at))
            for at in itertools.product(range(dp), range(tp))
        ]
        for p in (strided, order)
    ]
    assert ambiguous((rows,), (dp, tp), strided) == (readings[0] != readings[1])
    same_shapes = [s for s, _ in readings[0]] == [s for s, _ in readings[1]]
    assert same_shapes == (readings[0] == readings[1])


def test_three_cuts_may_be_ambiguous_behind_equal_shapes() -> None:
    """Why comparing shapes is not enough: nine rows, 2 data, 2 expert and 3 tensor ranks."""
    mesh_shape = (2, 2, 3)
    strided: tuple[Placement, ...] = (("strided", 0, 6), ("shard", 0), ("shard", 0))
    order = nested(mesh_shape, strided)
    assert order is not None
    for at in itertools.product(*map(range, mesh_shape)):
        assert local_shape((9,), mesh_shape, strided, at) == local_shape(
            (9,), mesh_shape, order, at
        )
    assert ambiguous((9,), mesh_shape, strided)
    assert not ambiguous((12,), mesh_shape, strided)
    assert not ambiguous((9,), (4,), (("strided", 0, 2),))
    assert not ambiguous((9,), (4,), (("shard", 0),))


def test_nested_follows_the_split_factors() -> None:
    """The three-way example of torch's own ``_dtensor_spec``, and what has no order."""
    strided: tuple[Placement, ...] = (("strided", 0, 2), ("strided", 0, 2), ("shard", 0))
    assert nested((4, 3, 2), strided) == (
        ("ordered", 0, 1),
        ("ordered", 0, 2),
        ("ordered", 0, 0),
    )
    plain: tuple[Placement, ...] = ("replicate", ("shard", 0), ("shard", 1))
    assert nested((2, 2, 2), plain) == plain
    assert nested((4,), (("strided", 0, 2),)) is None
    assert nested((2, 3), (("strided", 0, 2), ("shard", 0))) is None


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, 6))))
def test_nested_and_strided_agree_while_parts_are_even(sizes: tuple[int, int]) -> None:
    dp, tp = sizes
    strided: tuple[Placement, ...] = (("strided", 0, tp), ("shard", 0))
    order = nested((dp, tp), strided)
    assert order is not None
    for at in itertools.product(range(dp), range(tp)):
        shape = (dp * tp * 3, 2)
        assert local_regions(shape, (dp, tp), strided, at) == local_regions(
            shape, (dp, tp), order, at
        )


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((4,), (2, 2), (("shard", 0),)),
        ((4,), (2,), (("shard", 1),)),
        ((4,), (2,), (("shard", -1),)),
        ((), (2,), (("shard", 0),)),
        ((4,), (2,), (("strided", 0, 0),)),
        ((4,), (2,), (("ordered", 0, -1),)),
        ((4,), (0,), (("shard", 0),)),
        ((-4,), (2,), (("shard", 0),)),
        ((4,), (2,), (("partial", 0),)),
        ((4,), (2,), ("partial",)),
        ((4,), (2, 2), (("ordered", 0, 0), ("ordered", 0, 0))),
        ((4,), (2, 2), (("ordered", 0, 0), ("shard", 0))),
        ((2**40,), (2**30, 2**30), (("shard", 0), ("shard", 0))),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    with pytest.raises(ValueError):
        sharded_grid(shape, mesh_shape, placements)


def test_coordinates_and_ranks_must_be_of_the_mesh() -> None:
    case: Case = ((4,), (2, 2), (("shard", 0), "replicate"))
    for at in ((0,), (2, 0), (0, -1)):
        with pytest.raises(ValueError):
            local_regions(*case, at)
        with pytest.raises(ValueError):
            local_shape(*case, at)
        with pytest.raises(ValueError):
            owner_array(*case, np.zeros((2, 2), dtype=np.int64), at)
    with pytest.raises(ValueError):
        owner_array(*case, np.arange(4))
    for strides in ((), (1, 1), (-1,)):
        with pytest.raises(ValueError):
            local_regions(*case, (0, 0), strides)


def test_a_caller_cannot_spoil_what_is_kept() -> None:
    case: Case = ((4,), (2,), (("shard", 0),))
    local_regions(*case, (0,)).clear()
    assert len(local_regions(*case, (0,))) == 1
    owners = owner_array(*case, np.arange(2))
    owners[:] = 7
    assert owner_array(*case, np.arange(2)).tolist() == [0, 1]
    holder = sharded_grid(*case).holders[0]
    with pytest.raises(ValueError, match="read-only"):
        holder.coordinates[0] = 1


def test_sixteen_thousand_ranks_are_arrays() -> None:
    """Regular placements stay a few runs, however many ranks there are."""
    case: Case = ((128256, 16384), (2048, 8), (("strided", 0, 8), ("shard", 0)))
    grid, holders = sharded_grid(*case)
    assert grid.axes[0].runs == ((8, 16032),)
    assert grid.ncells == len(holders[0].coordinates)
    owners = owner_array(*case, np.arange(16384).reshape(2048, 8))
    assert owners[:3].tolist() == [0, 8, 16]
    assert len(np.unique(owners)) == len(owners)
