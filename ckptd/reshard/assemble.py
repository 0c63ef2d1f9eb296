"""The target's tables, from two composed layouts and what goes along with the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptd.errors import MismatchError
from ckptd.format.manifest import GridEntry, ManifestTables, MeshEntry, TensorEntry
from ckptd.layout.grid import Axis, Grid, whole
from ckptd.layout.lay.resolve import Resolved
from ckptd.layout.lay.scales import scale_tensor
from ckptd.layout.owners import Owners
from ckptd.reshard.compose import Composed, TensorLink
from ckptd.reshard.feed import ChunkFeed, Feeds, Literal, MixedFeeds, Recut
from ckptd.reshard.objects import Carried, Changed, carry_objects
from ckptd.reshard.source import StockTensor
from ckptd.reshard.target import Target

__all__ = ["Assembled", "assemble_target"]


@dataclass(frozen=True, eq=False)
class _Linked:
    """Feeds of one link."""

    composed: Composed
    number: int

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece."""
        return self.composed.feed(self.number, piece)


@dataclass(frozen=True, eq=False)
class Assembled:
    """The target, and what it leaves out.

    Attributes
    ----------
    target
        The target.
    composed
        The tensors that follow from layouts; target tensor number i is link i.
    dropped_objects
        Per-rank objects that another world drops.
    scales
        Numbers of the target's tensors that are scales of parameters.
    """

    target: Target
    composed: Composed
    dropped_objects: Sequence[str]
    scales: range = range(0)


@dataclass(eq=False)
class _Builder:
    world: int
    tables: ManifestTables = field(default_factory=ManifestTables)
    entries: list[TensorEntry] = field(default_factory=list)
    feeds: dict[int, Feeds] = field(default_factory=dict)

    def add(
        self,
        name: str,
        dtype: str,
        grid: Grid,
        owners: Owners,
        base: int,
        feeds: Feeds,
        aliases: tuple[str, ...] = (),
    ) -> None:
        number = self.tables.grid(GridEntry.of(grid))
        owner = self.tables.owner(owners.runs)
        self.feeds[len(self.entries)] = feeds
        entry = TensorEntry(name, dtype, grid.shape, number, owner, base, aliases)
        self.entries.append(entry)


def assemble_target(composed: Composed, lay: str) -> Assembled:
    """Return everything that is to be written.

    Parameters
    ----------
    composed
        Source and layouts.
    lay
        The target's program as text.

    Raises
    ------
    MismatchError
        Numbers that follow fused parameters disagree, groups or per-rank objects do not fit.
    """
    form = composed.composition.target
    layout = form.bound.layout
    stock = composed.stock
    build = _Builder(form.mesh.world)
    for number, link in enumerate(composed.links):
        t = link.tensor
        build.add(
            t.name,
            link.dtype.name,
            t.grid,
            t.owners,
            t.base,
            _Linked(composed, number),
            composed.aliases[t.name],
        )
    scales = _add_scales(build, composed)
    _add_scalars(build, composed)
    declared = {o.name: o.on_change for o in layout.objects}
    carried = carry_objects(stock, build.world, _groups(composed), declared)
    _add_objects(build, carried)
    target = Target(
        build.world,
        tuple(build.entries),
        build.tables.grids,
        build.tables.owners,
        MixedFeeds(build.feeds),
        tuple(carried.entries),
        _meshes(layout),
        dict(stock.metadata),
        lay,
    )
    return Assembled(target, composed, carried.dropped, scales)


def _meshes(layout: Resolved) -> tuple[MeshEntry, ...]:
    """Return the mesh as documentation: axes that make up a rank's number, outer first."""
    mesh = layout.mesh
    if mesh is None:
        return ()
    chosen = []
    left = mesh.world
    while left > 1:
        found = [
            a for a, s in mesh.strides.items() if s and s * mesh.extents[a] == left and s < left
        ]
        if not found:
            return ()
        chosen.append(found[0])
        left = mesh.strides[found[0]]
    shape = tuple(mesh.extents[a] for a in chosen)
    return (MeshEntry(tuple(chosen), shape, ((0, 1, mesh.world),)),) if chosen else ()


@dataclass(frozen=True, eq=False)
class _Scales:
    """Feeds of the scales of one quantized tensor."""

    composed: Composed
    link: TensorLink
    grid: Grid

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece."""
        box = self.grid.piece(piece).box
        at = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
        scales = self.composed.target_scales
        return ChunkFeed(literal=lambda: np.ascontiguousarray(scales(self.link)[at]).tobytes())


def _add_scales(build: _Builder, composed: Composed) -> range:
    """Add the scales of quantized parameters; return their numbers."""
    first = len(build.entries)
    form = composed.composition.target
    for link in composed.links:
        found = None if link.key[2] else scale_tensor(form, link.key[0], link.key[1])
        if found is not None:
            feeds = _Scales(composed, link, found.grid)
            build.add(found.name, "float32", found.grid, found.owners, found.base, feeds)
    return range(first, len(build.entries))


# --- numbers that follow parameters -------------------------------------------------------------


def _add_scalars(build: _Builder, composed: Composed) -> None:
    """Give each parameter the numbers of the parameters that it is made of, which must agree."""
    source = composed.composition.source.bound.layout
    stock = composed.stock
    wanted: list[tuple[TensorLink, str, list[StockTensor]]] = []
    for link in composed.links:
        if link.key[2]:
            continue
        for scalar in source.scalars:
            found = _scalars_of(composed, link, scalar.name)
            if found:
                wanted.append((link, scalar.name, found))
    values = stock.read_scalars([t.name for _, _, found in wanted for t in found])
    layout = composed.composition.target.bound.layout
    for link, short, found in wanted:
        first = found[0]
        for other in found[1:]:
            if (values[other.name], other.dtype) != (values[first.name], first.dtype):
                raise MismatchError(
                    "parameters that become one tensor are at different steps",
                    kind="lay-fit",
                    where=link.tensor.name,
                    wanted=f"{first.name} and {other.name} to be equal",
                )
        name = layout.state_names.replace("{state}", short)
        rule = composed.composition.target.rules[link.key[0]]
        build.add(
            name.replace("{name}", rule.global_name(link.key[1])),
            first.dtype.name,
            whole(first.shape),
            Owners(((max(0, link.tensor.owners.owner(0)), 0, 1),)),
            link.tensor.base,
            Recut(first.number, first.grid, whole(first.shape)),
        )


def _scalars_of(composed: Composed, link: TensorLink, scalar: str) -> list[StockTensor]:
    """Return the numbers of one kind that follow the sources of a parameter."""
    form = composed.composition.source
    layout = form.bound.layout
    out = []
    for rule, indexes, _ in link.sources:
        name = layout.state_names.replace("{state}", scalar)
        name = name.replace("{name}", form.rules[rule].global_name(indexes))
        found = composed.stock.by_name.get(name)
        if found is not None:
            out.append(found)
    if out and len(out) != len(link.sources):
        raise MismatchError(
            "the source lacks a number that follows a parameter",
            kind="lay-cover",
            where=link.tensor.name,
            wanted=f"{scalar} of {len(link.sources)} parameters",
            found=f"of {len(out)}",
        )
    return out


# --- objects ------------------------------------------------------------------------------------


def _groups(composed: Composed) -> dict[str, tuple[str, dict[str, list[str]]]]:
    """Return for the groups object of the source its new name, and the new names in it."""
    source, target = composed.composition.source, composed.composition.target
    renames: dict[str, list[str]] = {}
    for link in composed.links:
        if link.key[2]:
            continue
        new = target.rules[link.key[0]].global_name(link.key[1])
        for rule, indexes, _ in link.sources:
            old = source.rules[rule].global_name(indexes)
            renames.setdefault(old, []).append(new)
    for name in composed.dropped:
        renames.setdefault(name, [])
    before = source.bound.layout.state_names.partition("{name}")[0]
    after = target.bound.layout.state_names.partition("{name}")[0]
    return {f"{before}groups": (f"{after}groups", renames)}


def _add_objects(build: _Builder, carried: Carried) -> None:
    for _, tensor in carried.copied:
        grid, owners = tensor.grid, _same_ranks(build, tensor)
        feeds = Recut(tensor.number, tensor.grid, grid)
        build.add(tensor.name, tensor.dtype.name, grid, owners, 0, feeds, tensor.aliases)
    for changed in carried.changed:
        _add_changed(build, changed)


def _same_ranks(build: _Builder, tensor: StockTensor) -> Owners:
    """Return who holds an encoded object: rank 0, or each rank its own value."""
    if tensor.ranks is None:
        return Owners(((0, 0, tensor.grid.npieces),))
    return Owners.from_array(tensor.ranks)


def _add_changed(build: _Builder, changed: Changed) -> None:
    grid = Grid((Axis.from_sizes([len(v) for v in changed.values]),))
    owners = Owners.from_array(range(build.world))
    build.add(changed.entry.tensor, "uint8", grid, owners, 0, Literal(changed.values))
