"""Load between layouts: what a live tensor wants of a checkpoint; missing, unexpected names.

In it: values of parameters that become one (step counters), and how they have to agree; objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec import structs

from ckptd.base.grids.block import Fill, Region, box_region
from ckptd.checkpoint.load.plan import Conversion, Want, put_fill
from ckptd.checkpoint.torch.filling import U8, Filling, LiveTarget
from ckptd.checkpoint.torch.layouts import LayoutLoad
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.leaves import Leaves, SavedNames, TensorLeaf
from ckptd.checkpoint.torch.state.restore import Matching
from ckptd.errors import MismatchError, first_few
from ckptd.lay.copies import TargetPlan
from ckptd.lay.local import BoundTensor
from ckptd.reshard.changes import change_of
from ckptd.reshard.torch.layout.binder import JobLayout
from ckptd.reshard.torch.layout.source import BoundSource
from ckptd.types import Box, DType, dtype_of


@dataclass(frozen=True, slots=True, eq=False)
class FilledTensor:
    """A tensor of this rank that was asked for, and what it comes into.

    Attributes
    ----------
    regions
        Which boxes of the tensor lie where in the target, where ranks hold boxes of it.
    """

    leaf: TensorLeaf
    tensor: BoundTensor
    target: LiveTarget
    regions: tuple[Region, ...] = ()


@dataclass(eq=False)
class BoundLoad(LayoutLoad):
    """One load of one rank.

    Attributes
    ----------
    source
        The checkpoint, composed with the job's layout.
    describer
        Of the job.
    filled
        The tensors of this rank that are filled.
    """

    source: BoundSource
    describer: Describer
    hint = "a cast in a rule of the job's layout changes types; "

    def __post_init__(self) -> None:
        super().__init__(self.source.rest, self.describer)
        self.filled: list[FilledTensor] = []
        self._fills: list[tuple[LiveTarget, DType, tuple[Fill, ...]]] = []
        self._same: list[tuple[str, list[U8]]] = []
        self._rows: dict[str, Callable[[], TargetPlan]] = {}
        self._numbers: dict[str, int] = {}

    @property
    def job(self) -> JobLayout:
        """The layout of the live state."""
        return self.source.job

    # --- names ----------------------------------------------------------------------------------

    @cached_property
    def offered(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of what the checkpoint has for this rank, by the rank's own names.

        Raises
        ------
        MismatchError
            ``lay-cover``, ``lay-fit``: something is there in part only, or in several types.
        """
        out = {}
        for name, tensor in self.job.local.items():
            dtype = self._dtype(tensor)
            if dtype is not None:
                out[name] = (dtype, tensor.shape)
        layout = self.job.form.bound.layout
        for local, (rule, indexes) in self.job.tensors.items():
            for scalar in layout.scalars:
                found = self._scalars(rule, indexes, scalar.name)
                if found:
                    entry = self.source.saved.manifest.tensors[found[0]]
                    out[layout.state_name(local, scalar.name)] = (entry.dtype, entry.shape)
        return out

    def _dtype(self, tensor: BoundTensor) -> str | None:
        try:
            dtype = self.source.dtype(tensor)
        except MismatchError as error:
            # The logical tensor is not in the source at all: the tensor is missing.
            if error.kind == "lay-cover" and error.found is None:
                return None
            raise
        return None if dtype is None else dtype.name

    def _scalars(self, rule: int, indexes: tuple[int, ...], scalar: str) -> list[int]:
        try:
            return self.source.scalars(rule, indexes, scalar)
        except MismatchError:
            return []

    def names(self, rest: SavedNames, wanted: Callable[[str], bool]) -> SavedNames:
        """Add what is offered to the names of everything else, with groups by the job's name."""
        tensors = {n: e for n, e in self.offered.items() if wanted(n)}
        objects, groups = dict(rest.objects), dict(rest.groups)
        live, saved = self.job.spelling.groups[0], self.source.spelling.groups[0]
        if live != saved and saved in objects and live not in objects:
            objects[live] = objects.pop(saved)
            groups[live] = groups.pop(saved, None)
        tensors = {**rest.tensors, **tensors}
        return replace(rest, tensors=tensors, objects=objects, groups=groups)

    def to_saved(self, rename: Callable[[str], str]) -> Callable[[str], str]:
        """Return `rename`, with the job's name of optimizer groups led to the checkpoint's."""
        live, saved = self.job.spelling.groups[0], self.source.spelling.groups[0]
        return lambda name: saved if name == live else rename(name)

    # --- matching -------------------------------------------------------------------------------

    def others(self, leaves: Leaves) -> Leaves:
        """Return the leaves that the job's layout does not speak of."""
        names = {n: x for n, x in leaves.tensors.items() if not self._kinds(x)}
        return structs.replace(leaves, tensors=names)

    def _kinds(self, leaf: TensorLeaf) -> bool:
        kinds = (self.job.kind(n) for n in (leaf.name, *leaf.aliases))
        return any(k.tensor is not None or k.scalar is not None or k.dropped for k in kinds)

    def match(
        self,
        leaves: Leaves,
        wanted: Callable[[str], bool],
        filling: Filling,
        found: Matching,
    ) -> None:
        """Plan the filling of everything that the layout speaks of."""
        states: set[str] = set()
        for leaf in leaves.tensors.values():
            if not self._kinds(leaf):
                continue
            for name in (leaf.name, *leaf.aliases):
                kind = self.job.kind(name)
                if not wanted(name) or kind.dropped or leaf.name in found.tensors:
                    continue
                if kind.tensor is not None:
                    states.add(kind.tensor.state)
                    self._one(leaf, name, kind.tensor, filling, found)
                elif kind.scalar is not None:
                    self._scalar(leaf, name, kind.scalar, filling, found)
        found.unexpected += self._unexpected(wanted, states)

    def _unexpected(self, wanted: Callable[[str], bool], states: set[str]) -> list[str]:
        """Return tensors of the checkpoint that this rank's state has no place for."""
        out = [n for n in self.source.unused() if wanted(n)]
        if "" in states or not states:
            # A rank that has parameters has all their states, or the state has no optimizer; one
            # that has none leaves it to the others.
            form = self.source.form
            gone = {s for s in form.states if s not in states}
            keys = form.by_name
            out += [
                n
                for n in self.source.names.tensors
                if n in keys and keys[n][2] in gone and wanted(n)
            ]
        return list(dict.fromkeys(out))

    def _one(
        self,
        leaf: TensorLeaf,
        name: str,
        tensor: BoundTensor,
        filling: Filling,
        found: Matching,
    ) -> None:
        offered = self.offered.get(tensor.name)
        if offered is None:
            found.missing.append(name)
            return
        if (leaf.dtype, leaf.shape) != offered:
            found.differences.append(
                f"{name}: wanted {leaf.dtype}{list(leaf.shape)}, "
                f"found {offered[0]}{list(offered[1])}"
            )
            return
        found.tensors[leaf.name] = -1
        if self.job.whole:
            boxes = filling.boxes(name, leaf.tensor)
            if boxes is None:
                return
            target, regions = boxes
            piece = tensor.pieces[0]
            key = (piece.rule, piece.indexes, tensor.state)
            of = partial(self.source.composition.regions, key)
            plan = of(regions)
            held = self.describer.held(name, leaf.tensor)
            self._rows[leaf.name] = partial(of, held.regions)
            self.filled.append(FilledTensor(leaf, tensor, target, regions))
        else:
            rows = filling.rows(self.describer.held(name, leaf.tensor).local.detach())
            if rows is None:
                return
            target, plan = rows, self.source.composition.local_tensor(self.job.rank, tensor)
            self._rows[leaf.name] = lambda: plan
            self.filled.append(FilledTensor(leaf, tensor, target))
        self.wants += self._wants(leaf, plan, target)
        self._fills.append((target, dtype_of(leaf.dtype), plan.fills))

    def row_by_row(
        self, leaf: TensorLeaf, number: int, target: U8
    ) -> tuple[Sequence[Want], Callable[[], None]]:
        """Return what gives a tensor of this rank in the order of its rows, and what ends it."""
        if number >= 0:
            return super().row_by_row(leaf, number, target)
        if leaf.name in self._numbers:
            return [self._number(self._numbers[leaf.name], target)], lambda: None
        plan = self._rows[leaf.name]()

        def finish() -> None:
            for fill in plan.fills:
                put_fill(fill, dtype_of(leaf.dtype), target)

        return [*self._wants(leaf, plan, target)], finish

    def _wants(self, leaf: TensorLeaf, plan: TargetPlan, target: LiveTarget) -> Iterator[Want]:
        dtype = dtype_of(leaf.dtype)
        for source in plan.sources:
            number = self.source.names.tensors[source.source.name]
            kind = self.source.filemap.dtypes[number]
            change = change_of(kind, dtype, source.values, leaf.name)
            conversion = Conversion(change, kind, dtype) if change else None
            yield Want(number, (), target, source.pieces, conversion)

    def _scalar(
        self,
        leaf: TensorLeaf,
        name: str,
        scalar: tuple[int, tuple[int, ...], str],
        filling: Filling,
        found: Matching,
    ) -> None:
        numbers = self._scalars(*scalar)
        if not numbers:
            found.missing.append(name)
            return
        target = filling.value(leaf.tensor.detach())
        if target is None:
            return
        found.tensors[leaf.name] = -1
        values = [target, *(np.empty(target.nbytes, np.uint8) for _ in numbers[1:])]
        self._numbers[leaf.name] = numbers[0]
        self.wants += map(self._number, numbers, values)
        self._same.append((name, values))

    def _number(self, number: int, target: U8) -> Want:
        shape = self.source.saved.manifest.tensors[number].shape
        return Want(number, (box_region(Box((0,) * len(shape), shape)),), target)

    def objects(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return decoded objects, with this rank's names in optimizer groups."""
        name = self.job.spelling.groups[0]
        if name in values:
            values = {**values, name: self.source.groups(values[name])}
        return values

    def finish(self, filling: Filling) -> None:
        """Compare numbers that became one, and write what no element of the source represents.

        Raises
        ------
        MismatchError
            kind ``lay-fit``: numbers disagree (`state_corrupted`).
        """
        for name, values in self._same:
            if any(not np.array_equal(v, values[0]) for v in values[1:]):
                raise different_numbers(name, [v.tobytes().hex() for v in values])
        for target, dtype, fills in self._fills:
            for fill in fills:
                filling.fill(target, fill, dtype)


def different_numbers(name: str, found: Collection[object]) -> MismatchError:
    """Return the error for parameters that become one tensor, and have not one number."""
    error = MismatchError(
        "parameters with different numbers become one tensor",
        kind="lay-fit",
        where=name,
        found=first_few(found, 4),
    )
    error.state_corrupted = True
    return error
