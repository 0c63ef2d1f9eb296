"""Tables of the target: tensors, scales, optimizer groups, objects, values of each rank.

In it: what becomes of values of ranks when their number changes (``on_change``: drop, error and
hint).

Replicated objects are copied. Optimizer groups are sets of names, and names change with the
layout. Values of ranks are kept where the world stays as large; else `on_change` decides, as it
does in a load: what a live object has to do then (drawing a seed, reducing values) is written down
for it, since no live object is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ckptd.base.grids.grid import Axis, Grid, whole
from ckptd.base.grids.owners import Owners
from ckptd.checkpoint.format.manifest import (
    GridEntry,
    ManifestTables,
    MeshEntry,
    ObjectEntry,
    TensorEntry,
)
from ckptd.checkpoint.format.reseed import DROP, REDUCE, RESEED, derive_seed, marked
from ckptd.decoding import ANYTHING
from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.lay.matching import NameTemplates
from ckptd.lay.resolve import Resolved
from ckptd.lay.scales import overall_scale, quantized_as, scale_tensor
from ckptd.reshard.compose import Composed, TensorLink, not_plain
from ckptd.reshard.groups import Renames, are_torchs, gathered, groups_name, renamed
from ckptd.reshard.plan import ChunkFeed, Feed, Target, recut
from ckptd.reshard.source import SourceTensors, StockTensor


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
    apart
        Numbers of those that the source's program does not speak of.
    """

    target: Target
    composed: Composed
    dropped_objects: Sequence[str]
    scales: range = range(0)
    apart: range = range(0)


@dataclass(eq=False)
class _Builder:
    world: int
    tables: ManifestTables = field(default_factory=ManifestTables)
    entries: list[TensorEntry] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)

    def add(
        self,
        name: str,
        dtype: str,
        grid: Grid,
        owners: Owners,
        base: int,
        feed: Feed,
        aliases: tuple[str, ...] = (),
    ) -> None:
        number = self.tables.grid(GridEntry.of(grid))
        owner = self.tables.owner(owners.runs)
        self.feeds.append(feed)
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
        Numbers that follow fused parameters disagree, groups or per-rank objects do not fit, or
        what the source's program does not speak of.
    UsageError
        What the source's program does not speak of has another's name.
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
            link.held,
            t.owners,
            t.base,
            partial(composed.feed, number),
            composed.aliases[t.name],
        )
    scales = _add_scales(build, composed)
    _add_scalars(build, composed)
    apart = _add_apart(build, composed)
    declared = {o.name: o.on_change for o in layout.objects}
    carried = carry_objects(stock, build.world, _groups(composed), declared)
    _add_objects(build, carried)
    target = Target(
        build.world,
        tuple(build.entries),
        build.tables.grids,
        build.tables.owners,
        build.feeds,
        tuple(carried.entries),
        _meshes(layout),
        dict(stock.metadata),
        lay,
        requires=stock.requires,
    )
    return Assembled(target, composed, carried.dropped, scales, apart)


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


def _scales(composed: Composed, link: TensorLink, grid: Grid, piece: int) -> ChunkFeed:
    """Return what fills a piece of the scales of a quantized tensor."""
    box = grid.piece(piece).box
    at = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    scales = composed.target_scales
    return ChunkFeed(literal=lambda: np.ascontiguousarray(scales(link).stored[at]).tobytes())


def _overall(composed: Composed, link: TensorLink, piece: int) -> ChunkFeed:
    """Return what fills the number that multiplies all scales of a tensor."""
    return ChunkFeed(literal=lambda: composed.target_scales(link).overall.tobytes())


def _add_scales(build: _Builder, composed: Composed) -> range:
    """Add the scales of quantized parameters; return their numbers."""
    first = len(build.entries)
    form = composed.composition.target
    for link in composed.links:
        found = None if link.key[2] else scale_tensor(form, link.key[0], link.key[1])
        modifier = quantized_as(form, link.key[0])
        if found is None or modifier is None:
            continue
        kind = modifier.kind or "float32"
        feed = partial(_scales, composed, link, found.grid)
        build.add(found.name, kind, found.grid, found.owners, found.base, feed)
        above = overall_scale(form, link.key[0], link.key[1])
        if above is not None:
            feed = partial(_overall, composed, link)
            build.add(above.name, "float32", above.grid, above.owners, above.base, feed)
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
                    "parameters that are joined into one tensor have different optimizer steps",
                    kind="lay-fit",
                    where=link.tensor.name,
                    wanted=f"{first.name} and {other.name} to be equal",
                )
        rule = composed.composition.target.rules[link.key[0]]
        build.add(
            layout.state_name(rule.global_name(link.key[1]), short),
            first.dtype.name,
            whole(first.shape),
            Owners(((max(0, link.tensor.owners.owner(0)), 0, 1),)),
            link.tensor.base,
            recut(first.number, first.grid, whole(first.shape)),
        )


def _scalars_of(composed: Composed, link: TensorLink, scalar: str) -> list[StockTensor]:
    """Return the numbers of one kind that follow the sources of a parameter."""
    form = composed.composition.source
    layout = form.bound.layout
    out = []
    for rule, indexes, _ in link.sources:
        name = layout.state_name(form.rules[rule].global_name(indexes), scalar)
        found = composed.stock.by_name.get(name)
        if found is not None:
            out.append(found)
    if out and len(out) != len(link.sources):
        raise MismatchError(
            "the source lacks a per-parameter number",
            kind="lay-cover",
            where=link.tensor.name,
            wanted=f"{scalar} of {len(link.sources)} parameters",
            found=f"of {len(out)}",
        )
    return out


# --- what no program speaks of --------------------------------------------------------------------


def _add_apart(build: _Builder, composed: Composed) -> range:
    """Add what the source's program does not speak of, cut by rows; return the numbers."""
    stock, first = composed.stock, len(build.entries)
    known = {name for e in build.entries for name in (e.name, *e.aliases)}
    templates = NameTemplates(composed.composition.source.bound.layout)
    for tensor in stock.tensors:
        if tensor.name not in stock.apart:
            continue
        if tensor.plain is not None:
            raise not_plain(tensor.name, "a tensor that the layout does not mention")
        name = _apart_name(composed, templates, tensor)
        for one in (name, *tensor.aliases):
            if one in known:
                raise UsageError(
                    "a tensor that the layout does not mention has the name of another one",
                    where=one,
                    hint="drop one of them: -e 'from: NAME = drop'",
                )
            known.add(one)
        grid, owners = _rows(tensor.shape, build.world)
        feed = recut(tensor.number, tensor.grid, grid)
        build.add(name, tensor.dtype.name, grid, owners, 0, feed, tensor.aliases)
    return range(first, len(build.entries))


def _apart_name(composed: Composed, templates: NameTemplates, tensor: StockTensor) -> str:
    """Return the name of such a tensor: one that follows a parameter goes with it.

    Raises
    ------
    MismatchError
        kind ``lay-cover``: the parameter is fused, parted or turned.
    """
    composition = composed.composition
    source, target = composition.source, composition.target
    state = templates.take_any(tensor.name)
    links = composed.by_parameter.get(state.name, ()) if state else ()
    if state is None or not links:
        return tensor.name
    link = links[0]
    rules = [source.rules[key[0]] for key in link.sources], target.rules[link.key[0]]
    if len(links) > 1 or len(rules[0]) > 1 or rules[0][0].dims != rules[1].dims:
        raise MismatchError(
            "a state of another shape than its parameter can only be kept unchanged",
            kind="lay-cover",
            where=tensor.name,
            wanted=f"{state.name} as one tensor of the same dimensions",
            hint="to drop it: -e 'from: NAME = drop'",
        )
    new = rules[1].global_name(link.key[1])
    return target.bound.layout.state_name(new, state.state)


def _rows(shape: tuple[int, ...], world: int) -> tuple[Grid, Owners]:
    """Return how rows are dealt out; what has fewer than ranks is whole."""
    if not shape or shape[0] < world or world == 1:
        return whole(shape), Owners(((0, 0, 1),))
    few, more = divmod(shape[0], world)
    rows = Axis.from_sizes([few + (rank < more) for rank in range(world)])
    others = (Axis.from_sizes([n]) for n in shape[1:])
    return Grid((rows, *others)), Owners.from_array(range(world))


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
    before, after = (groups_name(form.bound.layout.state_names) for form in (source, target))
    return {before: (after, renames)}


def _add_objects(build: _Builder, carried: Carried) -> None:
    for _, tensor in carried.copied:
        grid, owners = tensor.grid, _same_ranks(tensor)
        feed = recut(tensor.number, tensor.grid, grid)
        build.add(tensor.name, tensor.dtype.name, grid, owners, 0, feed, tensor.aliases)
    for changed in carried.changed:
        _add_changed(build, changed)


def _same_ranks(tensor: StockTensor) -> Owners:
    """Return the holders of an encoded object: rank 0, or each rank its own value."""
    if tensor.ranks is None:
        return Owners(((0, 0, tensor.grid.npieces),))
    return Owners.from_array(tensor.ranks)


def _add_changed(build: _Builder, changed: Changed) -> None:
    grid = Grid((Axis.from_sizes([len(v) for v in changed.values]),))
    owners = Owners.from_array(range(build.world))
    feed = partial(_made, changed.values)
    build.add(changed.entry.tensor, "uint8", grid, owners, 0, feed)


def _made(values: Sequence[bytes], piece: int) -> ChunkFeed:
    """Return what fills a piece of an object that was made again."""
    return ChunkFeed(literal=lambda: values[piece])


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A per-rank object of another world: the encoded value of each rank of the target."""

    entry: ObjectEntry
    values: Sequence[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """Objects of the source, as the target gets them.

    Attributes
    ----------
    entries
        Objects of the target, in order; those with a tensor are in one of the next two as well.
    copied
        Tensors of the source that hold encoded objects and are copied as they are.
    changed
        Objects with new values.
    dropped
        Names of those whose values are left out.
    """

    entries: Sequence[ObjectEntry]
    copied: Sequence[tuple[ObjectEntry, StockTensor]]
    changed: Sequence[Changed]
    dropped: Sequence[str]


def carry_objects(
    stock: SourceTensors,
    world: int,
    groups: Mapping[str, tuple[str, Renames]],
    declared: Mapping[str, str],
) -> Carried:
    """Return the target's objects.

    Parameters
    ----------
    stock
        The source.
    world
        Ranks of the target.
    groups
        For the name of a groups object: its new name, and the new names of each parameter.
    declared
        What the target's layout says of objects on a change of world, by name.

    Raises
    ------
    MismatchError
        An object says that another world is an error. kind ``lay-fit``: parameters of different
        groups become one tensor.
    """
    entries: list[ObjectEntry] = []
    copied: list[tuple[ObjectEntry, StockTensor]] = []
    changed: list[Changed] = []
    dropped: list[str] = []
    objects: Sequence[ObjectEntry] = stock.objects
    for old, (new, renames) in groups.items():
        if not are_torchs(new):
            objects = gathered(objects, old, list(renames))
    for entry in objects:
        if entry.per_rank and world != stock.world:
            on_change = declared.get(entry.name, entry.per_rank)
            if on_change == "drop":
                dropped.append(entry.name)
            values = _changed(stock, entry, on_change, world)
            entry = msgspec.structs.replace(entry, per_rank=on_change)
            changed.append(Changed(entry, values))
        elif entry.tensor:
            copied.append((entry, stock.by_name[entry.tensor]))
        elif entry.kind == "groups" and entry.name in groups:
            name, renames = groups[entry.name]
            value = renamed(entry, renames)
            entry = msgspec.structs.replace(entry, name=name, value=value)
        entries.append(entry)
    return Carried(entries, copied, changed, dropped)


# --- per-rank values ----------------------------------------------------------------------------


def _changed(stock: SourceTensors, entry: ObjectEntry, on_change: str, world: int) -> list[bytes]:
    """Return what each rank of another world gets."""
    if on_change == "error":
        raise MismatchError(
            "a per-rank value does not fit another number of ranks",
            where=entry.name,
            wanted=f"{stock.world} ranks, as saved",
            found=f"{world} ranks",
            hint=f"decide in the target's layout: obj {entry.name} on-change drop",
        )
    if on_change == "drop":
        return [msgspec.json.encode(marked(DROP, None))] * world
    by_rank = stock.encoded(entry.name)
    values = [decoded_object(by_rank[rank], entry.name) for rank in sorted(by_rank)]
    if on_change == "reduce":
        values = [_numbered(v, n, len(values)) for n, v in enumerate(values)]
        return [msgspec.json.encode(marked(REDUCE, values))] * world
    texts = {json.dumps(v, sort_keys=True) for v in values}
    if len(texts) == 1 and len(values) > 1:
        # Streams that all ranks shared must not drift apart because a rank more takes part.
        return [msgspec.json.encode(values[0])] * world
    seeds = (derive_seed(values[0], rank, world) for rank in range(world))
    return [msgspec.json.encode(marked(RESEED, seed)) for seed in seeds]


def _numbered(raw: Any, n: int, of: int) -> Any:
    """Return encoded value `n` of those that become one: no other has the numbers of its parts."""
    if isinstance(raw, list):
        return [_numbered(v, n, of) for v in raw]
    if not isinstance(raw, dict):
        return raw
    new = {k: _numbered(v, n, of) for k, v in raw.items()}
    key = {"shared": "id", "again": "v"}.get(str(raw.get("$")), "")
    return new | {key: raw[key] * of + n} if type(raw.get(key)) is int else new


def decoded_object(raw: bytes, where: str) -> Any:
    """Return an object that lies in a chunk; `CorruptError` where it is no JSON."""
    try:
        return ANYTHING.decode(raw)
    except msgspec.MsgspecError as error:
        raise CorruptError(
            "an encoded object is not JSON", where=where, found=str(error)[:200]
        ) from None
