"""Save under a layout: tensors, scalars and objects of a rank as parts of those that are stored.

In it: refusals of tensors that are missing or of another shape; `torch/layout/binder.py` says who
writes.

A rank holds cells of the stored tensors' grids, or ranges in cells; the writer of each is
said by the layout, with the work spread over replicas. Tensors that the layout does not name, and
objects, are saved as without one; what follows a parameter gets the parameter's stored name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from msgspec import structs

from ckptd.base.digest import digest_hex
from ckptd.base.grids.block import flat_regions
from ckptd.base.grids.grid import strides_of
from ckptd.base.torch.tensors import is_dtensor
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.format.manifest import GridEntry, TensorEntry
from ckptd.checkpoint.save.structure import ReplicaHolders, Shared, Structure, TensorCut
from ckptd.checkpoint.torch.feed import CopyStep, StridedWindow
from ckptd.checkpoint.torch.layouts import LayoutSave
from ckptd.checkpoint.torch.replicas import Samples
from ckptd.checkpoint.torch.state.leaves import Leaves, ObjectLeaf, TensorLeaf
from ckptd.errors import MismatchError, SaveError, UsageError, first_few
from ckptd.lay.local import LocalPiece
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.stored import StoredTensor, local_cells
from ckptd.reshard.torch.layout.binder import JobLayout
from ckptd.reshard.torch.layout.program import combined
from ckptd.types import Box


@dataclass(frozen=True, slots=True)
class LeafPart:
    """Part of a stored tensor that a leaf holds.

    Attributes
    ----------
    stored
        The tensor.
    leaf
        The rank-local tensor or buffer.
    piece
        The piece in it: of the tensor, or of a copy of it.
    """

    stored: StoredTensor
    leaf: TensorLeaf
    piece: LocalPiece


class _Replica(NamedTuple):
    """Part of a tensor that this rank and others hold: the name, the ranks, and its views here.

    `tensor` is the id of the local tensor that the views are of.
    """

    name: str
    shared: Shared
    tensor: int
    views: Sequence[torch.Tensor]


@dataclass(eq=False)
class BoundLeaves(LayoutSave):
    """The leaves of a state, sorted by what the layout says of them.

    Attributes
    ----------
    job
        The layout.
    leaves
        What is saved as without a layout, by the names that it has in checkpoints.
    parts
        What lies in stored tensors, by their names.
    followers
        Numbers that follow a parameter: the parameter's rule and indexes by name in checkpoints.
    copies
        What lies in copies of stored tensors, which are compared and not saved.
    """

    job: JobLayout
    leaves: Leaves
    parts: dict[str, LeafPart] = field(default_factory=dict)
    followers: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    copies: list[LeafPart] = field(default_factory=list)
    _found_replicas: list[_Replica] | None = None

    @property
    def known(self) -> None:
        """See `LayoutSave`: a token represents views of memory, which a layout's views are not."""

    @property
    def sources(self) -> Mapping[str, TensorLeaf]:
        """The leaf that each tensor of the checkpoint is copied from, by its name there.

        Leaves that are only compared are there too, by names that no tensor has.
        """
        own = {n: p.leaf for n, p in self.parts.items()}
        copies = {f"copy {n}": part.leaf for n, part in enumerate(self.copies)}
        return {**self.leaves.tensors, **own, **copies}

    def structure(self, bare: Structure) -> Structure:
        """Add the stored tensors to the structure of everything else."""
        tensors = [(tensor, bare.cuts[tensor.grid]) for tensor in bare.tensors]
        for name, part in self.parts.items():
            stored = part.stored
            cut = TensorCut(grid=GridEntry.of(stored.grid), owners=stored.owners.runs)
            base = stored.base + self.job.writers.shift(stored)
            entry = TensorEntry(name, part.leaf.dtype, stored.shape, 0, 0, base)
            tensors.append((entry, cut))
        return Structure.of(tensors, bare.objects, bare.own, self.job.kept)

    # --- copies ---------------------------------------------------------------------------------

    def steps(self, name: str, chunk: ChunkRef) -> Iterator[CopyStep] | None:
        """Return the copies of one chunk of a stored tensor; None for other tensors."""
        part = self.parts.get(name)
        return None if part is None else self._steps(name, part, chunk)

    def _steps(self, name: str, part: LeafPart, chunk: ChunkRef) -> Iterator[CopyStep]:
        rule = self.job.form.rules[part.stored.rule]
        who = rule.who(self.job.coordinates)
        place = self._cells(rule)[chunk.piece.box.offset]
        shape = rule.local_shape(who)
        flat = self.job.form.packing.flat_of(rule.number, part.stored.indexes, part.stored.state)
        if flat is None:
            box = None if place.shape == shape else place
            yield CopyStep(name, box, chunk.start, chunk.end)
            return
        size = (chunk.end - chunk.start) // chunk.piece.numel
        strides = strides_of(shape)
        for region in flat_regions(place, *(chunk.piece.flat or (0, place.numel))):
            first = sum(o * s for o, s in zip(region.box.offset, strides, strict=True))
            at = first - part.piece.lo + part.piece.at
            start = chunk.start + region.start * size
            window = StridedWindow(region.box.shape, strides, at)
            yield CopyStep(name, window, start, start + region.numel * size)

    def _cells(self, rule: RuleForm) -> Mapping[tuple[int, ...], Box]:
        """Return where each cell that this rank holds lies in its tensor, by the cell's offset."""
        found = self._places.get(rule.number)
        if found is None:
            who = rule.who(self.job.coordinates)
            found = self._places[rule.number] = {
                rule.grid.cell_box(cell).offset: box for cell, box in local_cells(rule, who)
            }
        return found

    # --- replicas -------------------------------------------------------------------------------

    def views(self, holders: ReplicaHolders) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return what other ranks hold of the layout's tensors, by the id of this rank's part."""
        parts = chain(self.parts.values(), self.copies)
        out: dict[int, list[torch.Tensor]] = {id(p.leaf.local): [] for p in parts}
        for found in self._replicas(holders):
            out[found.tensor] += found.views
        return out

    def replica_tables(
        self, holders: ReplicaHolders, sample: Samples
    ) -> dict[Shared, dict[str, str]] | None:
        """Return digests by name, for each group of ranks that hold the same.

        Of a tensor of the layout these are the ranks that hold a part of it, whatever else they
        hold. A tensor that the layout does not name is the same on all ranks that have it, on
        whatever stage they are: were it not, one would be saved and the others lost. `sample` gives
        the digests.

        Raises
        ------
        SaveError
            kind ``replicas-differ``: this rank has a copy of a tensor that differs from it.
        """
        if self.job.whole:
            return None
        tables: dict[Shared, dict[str, str]] = {}
        for found in self._replicas(holders):
            digests = "".join(map(sample, found.views))
            if len(found.views) > 1:
                digests = digest_hex(digests.encode())[:16]
            seen = tables.setdefault(found.shared, {}).setdefault(found.name, digests)
            if seen != digests:
                raise SaveError(
                    "a copy of a tensor is not equal to it",
                    kind="replicas-differ",
                    where=f"{found.name} on rank {self.job.rank}",
                    wanted="one value under all names that are aliases by the layout",
                    hint="if it is a separate tensor, give it a separate rule without alias",
                )
        for name, leaf in self.leaves.tensors.items():
            if is_dtensor(leaf.tensor):
                continue
            shared = holders.tensor(name)
            group = "plain"
            if name in self.followers:
                group = self._group(self.job.form.rules[self.followers[name][0]].axes)
            if not shared.alone:
                here = structs.replace(shared, key=f"{group}:{shared.key}")
                tables.setdefault(here, {})[name] = sample(leaf.local)
        return tables

    def _replicas(self, holders: ReplicaHolders) -> list[_Replica]:
        # Once a save: digests are found again by the views that they were taken of.
        if self._found_replicas is None:
            self._found_replicas = []
            copied = self.job.replicated.copied
            for name, part in self.parts.items():
                shared = holders.tensor(name)
                if part.stored.rule in copied:
                    self._found_replicas += self._replicas_of(part)
                elif not shared.alone:
                    self._found_replicas += self._replicas_of(part, f":{shared.key}")
            for part in self.copies:
                self._found_replicas += self._replicas_of(part)
        return self._found_replicas

    def _replicas_of(self, part: LeafPart, key: str = "") -> Iterator[_Replica]:
        """Yield what groups of ranks hold of one tensor; `key` tells groups of the same ranks."""
        tensor = part.leaf.local
        for found in self.job.common.of(part.piece, part.stored.state):
            here = Shared(found.group + key, found.first, False)
            yield _Replica(part.stored.name, here, id(tensor), found.views(tensor))

    def _group(self, axes: frozenset[str]) -> str:
        """Name the ranks that agree with this one on some axes."""
        at = sorted((a, c) for a, c in self.job.coordinates.items() if a in axes)
        return "lay:" + ",".join(f"{a}={c}" for a, c in at)

    @cached_property
    def _places(self) -> dict[int, Mapping[tuple[int, ...], Box]]:
        return {}


def laid_leaves(job: JobLayout, leaves: Leaves) -> BoundLeaves:
    """Sort the leaves of a state by what the layout says of them.

    Raises
    ------
    MismatchError
        ``lay-fit``: a tensor has another shape than the layout says, or a parameter is missing.
    UsageError
        ``lay-use``: a DTensor by a name that the layout has for rank-local tensors; a rule by
        which replicas are combined.
    """
    if job.whole:
        return BoundLeaves(job, leaves)
    averaged = combined(job.form.bound.layout)
    if averaged is not None:
        raise UsageError(
            "a save cannot combine values of ranks",
            kind="lay-use",
            where=averaged,
            hint="average the replicas before the save, or write `any` to take one of them",
        )
    rest = Leaves(objects=_objects(job, leaves), per_rank=leaves.per_rank)
    out = BoundLeaves(job, rest)
    seen: set[str] = set()
    for leaf in leaves.tensors.values():
        for name in (leaf.name, *leaf.aliases):
            _sort(job, out, leaf, name, seen)
    _check_complete(job, seen)
    return out


def _sort(job: JobLayout, out: BoundLeaves, leaf: TensorLeaf, name: str, seen: set[str]) -> None:
    """Put one name of a leaf where it belongs."""
    kind = job.kind(name)
    if kind.tensor is not None:
        _check(leaf, name, kind.tensor.shape)
        seen.add(kind.tensor.name)
        for piece in kind.tensor.pieces:
            if piece.rule in job.form.stored_numbers:
                stored = job.form.tensor(piece.rule, piece.indexes, kind.tensor.state)
                out.parts[stored.name] = LeafPart(stored, leaf, piece)
            elif piece.rule in job.replicated.originals and name == leaf.name:
                original = job.replicated.originals[piece.rule]
                stored = job.form.tensor(original, piece.indexes, kind.tensor.state)
                out.copies.append(LeafPart(stored, leaf, piece))
    elif kind.scalar is not None:
        rule, indexes, scalar = kind.scalar
        saved = scalar_name(job, rule, indexes, scalar)
        out.leaves.tensors[saved] = structs.replace(leaf, name=saved, aliases=())
        out.followers[saved] = (rule, indexes)
    elif not kind.dropped and name == leaf.name:
        others = tuple(a for a in leaf.aliases if job.kind(a).tensor is None)
        out.leaves.tensors[name] = structs.replace(leaf, aliases=others)


def scalar_name(job: JobLayout, rule: int, indexes: tuple[int, ...], scalar: str) -> str:
    """Return what a number that follows a parameter is called in checkpoints."""
    layout = job.form.bound.layout
    stored = job.form.rules[rule].global_name(indexes)
    return layout.state_name(stored, scalar)


def _check(leaf: TensorLeaf, name: str, shape: tuple[int, ...]) -> None:
    if is_dtensor(leaf.tensor):
        raise UsageError(
            "a DTensor has the name of a rank-local tensor",
            kind="lay-use",
            where=name,
            hint="describe DTensors as whole tensors, by a layout 'on none'",
        )
    check_shape(name, shape, leaf.shape)


def check_shape(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raise `MismatchError` where a tensor has another shape than the layout says."""
    if found != wanted:
        raise MismatchError(
            "a tensor has another shape than the layout says",
            kind="lay-fit",
            where=name,
            wanted=wanted,
            found=found,
        )


def _check_complete(job: JobLayout, seen: set[str]) -> None:
    """All parameters of this rank are there: states may be missing, all of a layer may not."""
    missing = [n for n, t in job.local.items() if not t.state and n not in seen and t.pieces]
    if missing:
        raise MismatchError(
            "the state lacks tensors that this rank holds by the layout",
            kind="lay-fit",
            where=first_few(missing, 6),
            wanted="a tensor for each",
        )


# --- optimizer groups ---------------------------------------------------------------------------


def _objects(job: JobLayout, leaves: Leaves) -> dict[str, ObjectLeaf]:
    """Return the objects, with stored names in optimizer groups."""
    name, prefix = job.spelling.groups
    out = dict(leaves.objects)
    groups = out.get(name)
    if groups is not None and groups.kind == "groups":
        stored = {
            prefix + local: prefix + job.form.rules[rule].global_name(indexes)
            for local, (rule, indexes) in job.tensors.items()
        }
        out[name] = structs.replace(groups, raw=[_renamed(g, stored) for g in groups.raw])
    return out


def _renamed(group: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {**group, "params": sorted(names.get(p, p) for p in group["params"])}
