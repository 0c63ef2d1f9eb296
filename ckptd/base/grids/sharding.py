"""DTensor geometry: what each rank of a mesh holds by its placements; who writes a cell.

In it: FSDP over tensor parallelism; ambiguous placements.

A placement says what one mesh dimension does to the tensor:

``"replicate"``
    nothing: all its ranks hold the same.
``("shard", dim)``
    ``torch.chunk`` of what is left of `dim`: ceil-sized parts, the last ones short or empty.
``("strided", dim, factor)``
    torch's ``_StridedShard``: `dim` is first chunked into `factor` parts, each of these over the
    ranks, and a rank holds its share of every part, one after the other.
``("ordered", dim, position)``
    ``torch.chunk`` as well, but the cuts of `dim` are made in the order of their positions
    instead of the mesh's. See `nested`.

Placements are applied from left to right, as torch does. Everything is computed on arrays of
segments, so a mesh of 16,384 ranks costs milliseconds, and is kept for the next tensor like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Region
from ckptd.base.grids.dimcut import CutStep, DimCut, cut_dim
from ckptd.base.grids.grid import Grid, strides_of
from ckptd.types import Box

Placement: TypeAlias = Literal["replicate"] | tuple[str, int] | tuple[str, int, int]
"""The effect of one mesh dimension on a tensor; see the module."""

Shape: TypeAlias = tuple[int, ...]
Placements: TypeAlias = tuple[Placement, ...]


class Holder(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Holders of the cells of one tensor dimension.

    Attributes
    ----------
    mesh_axes
        The mesh dimensions that cut it, in rising order; empty when none does.
    coordinates
        One row per cell: the coordinates on `mesh_axes` that hold it. Read-only.
    """

    mesh_axes: tuple[int, ...]
    coordinates: NDArray[np.int64]


class Sharded(NamedTuple):
    """A distributed tensor's grid, and per dimension the holders of its cells.

    A cell lies with the ranks whose coordinates agree with the holder of each dimension; on mesh
    dimensions that cut nothing, any coordinate holds it.
    """

    grid: Grid
    holders: tuple[Holder, ...]


@lru_cache(maxsize=1024)
def sharded_grid(shape: Shape, mesh_shape: Shape, placements: Placements) -> Sharded:
    """Return the grid of a distributed tensor.

    A cell is what one rank holds contiguously: neighbouring parts of one rank are one cell, and
    a rank with several parts (a strided shard) has several cells.

    Parameters
    ----------
    shape
        Shape of the global tensor.
    mesh_shape
        Number of ranks along each mesh dimension.
    placements
        One `Placement` per mesh dimension.

    Raises
    ------
    ValueError
        The placements do not fit the tensor or the mesh.
    """
    cuts = _cuts(shape, mesh_shape, placements)
    holders = tuple(Holder(c.mesh_axes, c.coordinates) for c in cuts)
    return Sharded(Grid(tuple(c.axis for c in cuts)), holders)


def local_shape(
    shape: Shape, mesh_shape: Shape, placements: Placements, coordinate: Sequence[int]
) -> Shape:
    """Return the shape of the local tensor of the rank at `coordinate`.

    Raises
    ------
    ValueError
        The placements do not fit the tensor or the mesh, or the coordinate is not on the mesh.
    """
    cuts = _cuts(shape, mesh_shape, placements)
    where = _coordinate(coordinate, mesh_shape)
    return tuple(c.length(where) for c in cuts)


def local_regions(
    shape: Shape,
    mesh_shape: Shape,
    placements: Placements,
    coordinate: Sequence[int],
    strides: Shape | None = None,
) -> list[Region]:
    """Return what the local tensor of one rank holds of the global tensor.

    One region for plain shards, one per combination of segments for strided ones, none for an
    empty rank.

    Parameters
    ----------
    shape, mesh_shape, placements
        As in `sharded_grid`.
    coordinate
        Where the rank is on the mesh.
    strides
        The local tensor's strides in elements; row-major when left out.

    Raises
    ------
    ValueError
        As in `local_shape`, or there is not one stride per dimension, or it is negative.
    """
    where = _coordinate(coordinate, mesh_shape)
    return list(_local_regions(shape, mesh_shape, placements, where, strides))


@lru_cache(maxsize=1024)
def _local_regions(
    shape: Shape, mesh_shape: Shape, placements: Placements, where: Shape, strides: Shape | None
) -> tuple[Region, ...]:
    """Return the regions of one rank; a model asks again and again for the same few."""
    cuts = _cuts(shape, mesh_shape, placements)
    if strides is None:
        strides = strides_of(tuple(c.length(where) for c in cuts))
    if len(strides) != len(shape) or any(s < 0 for s in strides):
        raise ValueError(f"strides {strides} for a tensor of shape {shape}")
    regions = []
    for segments in product(*(c.segments(where) for c in cuts)):
        box = Box(tuple(s.start for s in segments), tuple(s.size for s in segments))
        start = sum(s.local * stride for s, stride in zip(segments, strides, strict=True))
        if box.numel:
            regions.append(Region(box, start, strides))
    return tuple(regions)


def owner_array(
    shape: Shape,
    mesh_shape: Shape,
    placements: Placements,
    mesh_ranks: NDArray[np.int64],
    replica: Sequence[int] | None = None,
) -> NDArray[np.int64]:
    """Return the rank that is to write each cell of `sharded_grid`, in cell order.

    Parameters
    ----------
    shape, mesh_shape, placements
        As in `sharded_grid`.
    mesh_ranks
        Global rank at each coordinate of the mesh, shape `mesh_shape`.
    replica
        One coordinate per mesh dimension: which replica writes, where a mesh dimension cuts
        nothing. Other entries do not matter. Zeros when left out.

    Raises
    ------
    ValueError
        The arguments do not fit each other.
    """
    if mesh_ranks.shape != mesh_shape:
        raise ValueError(f"ranks of a mesh of {mesh_ranks.shape} for one of {mesh_shape}")
    chosen = _coordinate(replica if replica is not None else (0,) * len(mesh_shape), mesh_shape)
    return mesh_ranks.reshape(-1)[_mesh_positions(shape, mesh_shape, placements, chosen)]


@lru_cache(maxsize=256)
def _mesh_positions(
    shape: Shape, mesh_shape: Shape, placements: Placements, replica: Shape
) -> NDArray[np.int64]:
    """Row-major mesh position that writes each cell, in cell order."""
    mesh_strides = strides_of(mesh_shape)
    holders = sharded_grid(shape, mesh_shape, placements).holders
    cutting = {axis for holder in holders for axis in holder.mesh_axes}
    base = sum(replica[m] * s for m, s in enumerate(mesh_strides) if m not in cutting)
    positions = np.array([base], dtype=np.int64)
    for holder in holders:
        steps = np.array([mesh_strides[m] for m in holder.mesh_axes], dtype=np.int64)
        positions = np.add.outer(positions, holder.coordinates @ steps).reshape(-1)
    positions.flags.writeable = False
    return positions


def nested(mesh_shape: Shape, placements: Placements) -> Placements | None:
    """Return the placements that FSDP over tensor parallelism really makes, or None.

    FSDP2 chunks the tensor-parallel *shard* over its ranks and describes the outcome as strided
    placements, which say the same only while the parts come out even: 7 rows over 2 tensor and 3
    data ranks put row 6 on another rank than the description says. Read as strided, such a
    checkpoint would hold rows at wrong places. The nested form cuts in the order in which FSDP2
    cuts; dimensions without strided placements are left as they are.

    Returns
    -------
    Placements or None
        None when no order of plain cuts has these split factors (a fused gate and up projection,
        for one); only the strided reading makes sense then.
    """
    out = list(placements)
    parsed = [_parsed(p) for p in placements]
    for dim in {p.dim for p in parsed if p.kind == "strided"}:
        order: list[int] = []
        for axis in reversed(range(len(parsed))):
            if parsed[axis].dim != dim:
                continue
            place = _place_of(parsed[axis].value, [mesh_shape[m] for m in order])
            if place is None:
                return None
            order.insert(place, axis)
        for position, axis in enumerate(order):
            out[axis] = ("ordered", dim, position)
    return tuple(out)


@lru_cache(maxsize=1024)
def ambiguous(shape: Shape, mesh_shape: Shape, placements: Placements) -> bool:
    """Whether the strided and the `nested` reading of these placements differ for this shape.

    They do only where parts come out uneven. What FSDP2 made is nested; what ``distribute_tensor``
    made of explicit strided placements is strided. With two cuts of a dimension some rank's
    `local_shape` then tells which it was; with three, not even that need be so.

    Raises
    ------
    ValueError
        The placements do not fit the tensor or the mesh.
    """
    strided = sharded_grid(shape, mesh_shape, placements)
    order = nested(mesh_shape, placements)
    if order is None or order == placements:
        return False
    other = sharded_grid(shape, mesh_shape, order)
    return strided.grid != other.grid or any(
        not np.array_equal(a.coordinates, b.coordinates)
        for a, b in zip(strided.holders, other.holders, strict=True)
    )


def _place_of(factor: int, parts: list[int]) -> int | None:
    """Return how many of the cuts in `parts` come before one with this split factor."""
    made = 1
    for place, count in enumerate([*parts, 0]):
        if made == factor:
            return place
        made *= count
    return None


@lru_cache(maxsize=4096)
def _cuts(shape: Shape, mesh_shape: Shape, placements: Placements) -> tuple[DimCut, ...]:
    """Return the cut of each tensor dimension."""
    if len(placements) != len(mesh_shape):
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh_shape}")
    if any(n < 1 for n in mesh_shape) or any(n < 0 for n in shape):
        raise ValueError(f"a tensor of {shape} on a mesh of {mesh_shape}")
    steps: list[list[tuple[int, CutStep]]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        kind, dim, value = _parsed(placement)
        if kind == "replicate":
            continue
        if not 0 <= dim < len(shape) or value < (kind != "ordered"):
            raise ValueError(f"placement {placement} for a tensor of shape {shape}")
        order, factor = (value, 1) if kind == "ordered" else (axis, value)
        steps[dim].append((order, CutStep(axis, mesh_shape[axis], factor)))
    _check_orders(placements)
    return tuple(
        cut_dim(n, tuple(step for _, step in sorted(found)))
        for n, found in zip(shape, steps, strict=True)
    )


class _Parsed(NamedTuple):
    """A placement with all its fields: `value` is the split factor, or the position."""

    kind: str
    dim: int
    value: int


def _parsed(placement: Placement) -> _Parsed:
    """Return the fields of a placement; what it leaves out is filled in."""
    match placement:
        case "replicate":
            return _Parsed("replicate", -1, 0)
        case ("shard", int(dim)):
            return _Parsed("shard", dim, 1)
        case ("strided" | "ordered" as kind, int(dim), int(value)):
            return _Parsed(kind, dim, value)
    raise ValueError(f"unknown placement {placement!r}")


def _check_orders(placements: Placements) -> None:
    """The cuts of one dimension are all ordered, each at its own position, or none is."""
    parsed = [_parsed(p) for p in placements]
    ordered = [(p.dim, p.value) for p in parsed if p.kind == "ordered"]
    others = {p.dim for p in parsed if p.kind in ("shard", "strided")}
    if len(set(ordered)) != len(ordered) or others & {dim for dim, _ in ordered}:
        raise ValueError(f"the cuts in {placements} have no order")


def _coordinate(coordinate: Sequence[int], mesh_shape: Shape) -> Shape:
    """Return `coordinate` as a tuple of ints that is on the mesh."""
    where = tuple(int(c) for c in coordinate)
    if len(where) != len(mesh_shape) or any(
        not 0 <= c < n for c, n in zip(where, mesh_shape, strict=True)
    ):
        raise ValueError(f"coordinate {where} on a mesh of {mesh_shape}")
    return where
