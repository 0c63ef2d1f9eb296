"""Live tensors described: DTensor meshes and placements, which are refused, local regions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from ckptd.base.grids.block import Region, box_region
from ckptd.base.grids.owners import Owners
from ckptd.base.grids.sharding import Placement, ambiguous, local_regions, local_shape, nested
from ckptd.base.torch.tensors import PLAIN, dtype_name, is_dtensor, local_tensor
from ckptd.checkpoint.format.manifest import MeshEntry, TensorEntry
from ckptd.checkpoint.save.structure import Structure, TensorCut
from ckptd.checkpoint.torch.state.leaves import Leaves
from ckptd.errors import UsageError
from ckptd.types import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class LocalRegions(msgspec.Struct, frozen=True, dict=True):
    """Part of one tensor that this rank holds.

    Attributes
    ----------
    local
        The local tensor (for a plain tensor, the tensor).
    regions
        Where boxes of the logical tensor lie in it, as if it were contiguous; or by its strides.
    """

    local: torch.Tensor
    regions: tuple[Region, ...]


@lru_cache(4096)
def whole_region(shape: tuple[int, ...]) -> tuple[Region]:
    """Return what a whole tensor of a shape holds: for all of them the same object."""
    return (box_region(Box.whole(tuple(shape))),)


class Describer:
    """Describes tensors for one process group; meshes are looked at once.

    Parameters
    ----------
    ranks
        Global ranks of the group by group rank. Files and plans speak of group ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._group_rank = {r: i for i, r in enumerate(ranks)}
        self._meshes: dict[int, _Mesh] = {}
        self._known: dict[Any, tuple[MeshEntry, tuple[int, ...], tuple[Placement, ...]]] = {}
        self._regions: dict[Any, tuple[tuple[int, ...], tuple[Region, ...]]] = {}

    def structure(self, leaves: Leaves, objects: Sequence[str]) -> Structure:
        """Return this rank's structure.

        Raises
        ------
        UsageError
            A placement that cannot be saved, or a mesh that reaches outside the group.
        """
        tensors = []
        uncut = TensorCut()
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # of many tensors few are kept
        forms = leaves.forms(leaves.tensors)
        for name, (tensor, aliases) in zip(leaves.tensors, forms, strict=True):
            cut = uncut
            if type(tensor) not in PLAIN and is_dtensor(tensor):
                mesh, _, placements = self._sharding(name, tensor)
                cut = TensorCut(mesh, placements)
            shape = tuple(tensor.shape)
            shape = shapes.setdefault(shape, shape)
            entry = TensorEntry(name, dtype_name(tensor.dtype), shape, 0, 0, 0, aliases)
            tensors.append((entry, cut))
        # Those that are recalled and have values of their own were made above.
        own = tuple(x.name for x in leaves.made() if x.own and not is_dtensor(x.tensor))
        return Structure.of(tensors, tuple(sorted(objects)), own)

    def held(self, name: str, tensor: torch.Tensor, *, strided: bool = False) -> LocalRegions:
        """Return what this rank holds of a tensor.

        Parameters
        ----------
        strided
            Count positions by the local tensor's strides, from its first element.

        Raises
        ------
        UsageError
            The local tensor has not the shape that its placements imply.
        """
        if not is_dtensor(tensor):
            shape = tuple(tensor.shape)
            if not strided:
                return LocalRegions(tensor, whole_region(shape))
            return LocalRegions(tensor, (box_region(Box.whole(shape), tuple(tensor.stride())),))
        known = self._sharding(name, tensor)
        local = local_tensor(tensor)
        # What is known is kept, so that its id is not given to another one.
        key = id(known), tensor.shape, local.stride() if strided else None
        if key not in self._regions:
            entry, coordinate, placements = known
            shape = tuple(tensor.shape)
            cuts = nested(entry.shape, placements) or placements
            found = local_regions(shape, entry.shape, cuts, coordinate, key[2])
            wanted = local_shape(shape, entry.shape, cuts, coordinate)
            self._regions[key] = wanted, tuple(found)
        wanted, regions = self._regions[key]
        if local.shape != wanted:
            raise UsageError(
                "a local tensor's shape does not match its placements",
                where=name,
                wanted=wanted,
                found=f"{tuple(local.shape)} for {tensor.placements} of {tuple(tensor.shape)}",
                hint="redistribute() it to Shard or Replicate placements before saving",
            )
        return LocalRegions(local, regions)

    def _sharding(
        self, name: str, tensor: DTensor
    ) -> tuple[MeshEntry, tuple[int, ...], tuple[Placement, ...]]:
        mesh = self._mesh(tensor.device_mesh, name)
        orders = [tuple(e.mesh_dims) for e in getattr(tensor._spec, "shard_order", None) or ()]
        # With their types: a strided shard may be equal to a plain one.
        placed = tuple([(type(p), p) for p in tensor.placements])
        key = id(mesh), placed, tensor.shape, *orders
        if (known := self._known.get(key)) is not None:
            return known
        placements: list[Placement] = ["replicate"] * len(mesh.entry.shape)
        for axis, placement in zip(mesh.axes, tensor.placements, strict=True):
            placements[axis] = _placement(name, placement, tensor.dim())
        turned = any(placements[a] != "replicate" for a in mesh.turned)
        _check_order(name, tensor, orders, turned=turned)
        _check_readable(name, tuple(tensor.shape), mesh.entry, tuple(placements))
        if mesh.at is None:
            raise UsageError("this rank is not on the tensor's mesh", where=name)
        return self._known.setdefault(key, (mesh.entry, mesh.at, tuple(placements)))

    def _mesh(self, mesh: Any, name: str) -> _Mesh:
        """Look at a mesh, once.

        Ranks see different slices of one root mesh; only the root looks the same to all, and
        only a description that is the same to all is cheap at scale.
        """
        if id(mesh) not in self._meshes:
            root = _root(mesh)
            names = tuple(root.mesh_dim_names or ())
            own = tuple(mesh.mesh_dim_names or ())
            if root is not mesh and own and all(n in names for n in own):
                axes = tuple(names.index(n) for n in own)
            else:
                root, axes = mesh, tuple(range(mesh.ndim))
            try:
                ranks = [self._group_rank[int(r)] for r in root.mesh.flatten()]
            except KeyError as error:
                raise UsageError(
                    "the tensor's mesh reaches outside the checkpointer's process group",
                    where=name,
                    found=f"global rank {error}",
                    hint="Checkpointer(..., process_group=a group that holds the whole mesh)",
                ) from None
            entry = MeshEntry(
                # The format wants a name for each dimension; meshes may have none.
                tuple(root.mesh_dim_names or (f"dim{i}" for i in range(root.ndim))),
                tuple(root.mesh.shape),
                Owners.from_array(ranks).runs,
            )
            # The mesh itself is kept, so that its id is not given to another one.
            grid = root.mesh
            turned = tuple(a for a in range(grid.ndim) if bool((grid.diff(dim=a) <= 0).any()))
            where = (grid == torch.distributed.get_rank()).nonzero().tolist()
            at = tuple(where[0]) if where else None
            self._meshes[id(mesh)] = _Mesh(mesh, entry, axes, turned, at)
        return self._meshes[id(mesh)]


class _Mesh(NamedTuple):
    """Facts of a device mesh, which is kept alive.

    Attributes
    ----------
    entry
        That of its root.
    axes
        The root's axis of each of its axes.
    turned
        The axes of the root along which ranks do not ascend.
    at
        Where this rank is on the root.
    """

    mesh: Any
    entry: MeshEntry
    axes: tuple[int, ...]
    turned: tuple[int, ...]
    at: tuple[int, ...] | None


def _check_order(
    name: str, tensor: DTensor, orders: Sequence[tuple[int, ...]], *, turned: bool
) -> None:
    """Refuse a tensor whose parts lie in another order than the coordinates of its mesh.

    torch cuts by places in process groups, which are sorted by rank, or from the right to the left
    where ``shard_order`` says so. Rows of a checkpoint would be at wrong places for other layouts.
    """
    strided = any(type(p).__name__ == "_StridedShard" for p in tensor.placements)
    if turned or (not strided and any(o != tuple(sorted(o)) for o in orders)):
        raise UsageError(
            "the parts of this tensor do not lie in the order of its mesh",
            where=name,
            wanted="a mesh whose ranks ascend along each axis that cuts, from left to right",
            found=f"{tensor.placements} over ranks {tensor.device_mesh.mesh.tolist()}",
            hint="create the mesh with ascending ranks, or redistribute() the tensor before saving",
        )


def _check_readable(
    name: str, shape: tuple[int, ...], mesh: MeshEntry, placements: tuple[Placement, ...]
) -> None:
    """Refuse placements that say two things at once.

    Three uneven cuts of one dimension, strided ones among them: what FSDP2 makes and what
    ``distribute_tensor`` makes then have equal shapes and different rows, and nothing tells which
    one this is (``docs/design/layout.md``). A checkpoint would hold rows at wrong places.
    """
    cuts = [p[1] for p in placements if p != "replicate"]
    crowded = any(cuts.count(dim) > 2 for dim in cuts)
    if crowded and ambiguous(shape, mesh.shape, placements):
        raise UsageError(
            "placements of this tensor are ambiguous",
            where=name,
            wanted="at most two cuts of one dimension, or sizes that divide evenly",
            found=f"{list(shape)} by {list(placements)}",
            hint="redistribute() it before saving",
        )


def _root(mesh: Any) -> Any:
    get_root = getattr(mesh, "_get_root_mesh", None)
    return (get_root() if get_root else None) or mesh


def _placement(name: str, placement: Any, ndim: int) -> Placement:
    if placement.is_replicate():
        return "replicate"
    if type(placement).__name__ == "_StridedShard":
        return ("strided", placement.dim % ndim, int(placement.split_factor))
    if placement.is_shard():
        return ("shard", placement.dim % ndim)
    raise UsageError(
        "a tensor with this placement cannot be saved",
        where=name,
        wanted="Shard, Replicate or strided placements",
        found=str(placement),
        hint="redistribute() it first; Partial sums belong to no rank",
    )
