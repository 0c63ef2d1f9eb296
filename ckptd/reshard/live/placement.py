"""Placement of experts: tables of which rank has which, and programs that say another one.

In it: what is wrong with a table.

A placement says for each coordinate of the mesh axis that experts are cut over (``ep``) which
experts it has. In a program it stands as ``e@ep:at[...]``, a coordinate for each expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ckptd.base.grouping import by_key
from ckptd.errors import UsageError, first_few
from ckptd.lay.held import held
from ckptd.lay.resolve import Bound, Equation, Ints, MeshShape, ValueScope, scope_of
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import (
    Assigned,
    Atom,
    Dim,
    File,
    For,
    How,
    Layout,
    Name,
    NameIndex,
    Pad,
    Product,
    Range,
    Rule,
    Split,
    Statement,
    Sum,
)
from ckptd.reshard.layouts import LayoutProgram

ExpertTable: TypeAlias = Sequence[Sequence[int]]
"""The experts of each coordinate, in any order: a rank has its experts in rising order."""
ExpertPlacement: TypeAlias = ExpertTable | Mapping[int, ExpertTable]
"""One table for all layers, or some by layer; other layers stay as they are."""
Coordinates: TypeAlias = tuple[int, ...]
"""The coordinate of each expert."""
UnitKey: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], str]
"""A unit that moves at once: logical tensors, numbers of indexes but experts', and the state."""

_SHOWN = 8


# --- tables ---------------------------------------------------------------------------------------


def coordinates_of(
    table: ExpertTable, extent: int, count: int | None, where: str | None = None
) -> Coordinates:
    """Return the coordinate of each expert.

    Parameters
    ----------
    table
        The experts of each coordinate.
    extent
        How many coordinates there are.
    count
        How many experts there are; None where only the table says it.
    where
        For errors.

    Raises
    ------
    UsageError
        It has another number of coordinates, leaves experts out, has some twice, or some that are
        not there.
    """
    if len(table) != extent:
        raise _wrong(
            "a placement needs a list of experts for each coordinate",
            where,
            f"{extent} lists",
            f"{len(table)}",
        )
    homes = by_key((int(e), coordinate) for coordinate, all in enumerate(table) for e in all)
    known = range(max([*homes, -1]) + 1 if count is None else count)
    unknown = sorted(n for n in homes if n not in known)
    missing = [n for n in known if n not in homes]
    twice = sorted(n for n, at in homes.items() if len(at) > 1)
    found = []
    if missing:
        found.append(f"missing experts: {first_few(missing, _SHOWN)}")
    if twice:
        places = (f"{n} (at {', '.join(map(str, homes[n]))})" for n in twice[:_SHOWN])
        found.append(f"duplicate experts: {', '.join(places)}")
    if unknown:
        found.append(f"unknown experts: {first_few(unknown, _SHOWN)}")
    if found:
        raise _wrong(
            "a placement must have each expert exactly once",
            where,
            f"the experts 0 to {len(known) - 1}, each at one coordinate",
            "; ".join(found),
            "replicas of all experts are an axis of the mesh that their rules do not mention",
        )
    return tuple(homes[n][0] for n in known)


def _wrong(
    message: str, where: str | None, wanted: str, found: str, hint: str | None = None
) -> UsageError:
    return UsageError(message, where=where, wanted=wanted, found=found, hint=hint)


# --- what a layout says of them -------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertCut:
    """How one rule, or one statement, cuts the experts."""

    axis: str
    how: How


def _cuts(name: Name, dims: Iterable[Dim], experts: str) -> Iterator[ExpertCut]:
    """Yield the cuts of an axis in the name and in the dimensions of a rule.

    Raises
    ------
    UsageError
        The experts are cut in two places, or together with something else.
    """
    for part in name.parts:
        if isinstance(part, NameIndex) and part.axis == experts and part.splits:
            if len(part.splits) > 1:
                raise _nested(experts, "cut twice, in a name")
            yield ExpertCut(*part.splits[0])
    for dim in dims:
        for split in _splits(dim):
            if split.inner == Atom(experts):
                yield ExpertCut(split.axis, split.how)
            elif experts in _atoms(split.inner) and not _is_cut(split.inner, experts):
                raise _nested(experts, "cut together with another axis")


def _nested(experts: str, found: str) -> UsageError:
    return _wrong(
        "experts that a table places must be cut separately",
        None,
        f"{experts}@ep in a dimension, or {{#{experts}@ep}} in a name",
        found,
    )


def _is_cut(dim: Dim, experts: str) -> bool:
    """Whether it is a stack of experts, cut: FSDP cuts it once more on the ranks that have it."""
    while isinstance(dim, Split):
        dim = dim.inner
    return dim == Atom(experts)


def _splits(dim: Dim) -> Iterator[Split]:
    if isinstance(dim, Split):
        yield dim
    for inner in _below(dim):
        yield from _splits(inner)


def _atoms(dim: Dim) -> set[str]:
    if isinstance(dim, Atom):
        return {dim.name}
    return {name for inner in _below(dim) for name in _atoms(inner)}


def _below(dim: Dim) -> tuple[Dim, ...]:
    match dim:
        case Split() | Pad():
            return (dim.inner,)
        case Product():
            return dim.parts
        case Sum():
            return tuple(b.dim for b in dim.branches)
    return ()


def _cut_of(name: Name, dims: Iterable[Dim], experts: str) -> ExpertCut | None:
    found = set(_cuts(name, dims, experts))
    if len(found) > 1:
        raise _nested(experts, "cut in two places")
    return found.pop() if found else None


def tables_of(bound: Bound, experts: str) -> dict[tuple[int, int | None], Coordinates]:
    """Return where the experts of each rule lie: by number of the rule and layer.

    The layer is None for rules that have no other index than that of experts, or several.

    Raises
    ------
    UsageError
        No rule cuts them, or one does it in another way than a table could.
    """
    scope = scope_of(bound)
    out: dict[tuple[int, int | None], Coordinates] = {}
    axes: set[str] = set()
    for number, equation in enumerate(bound.layout.equations):
        cut = _cut_of(equation.name, equation.dims, experts)
        if cut is None:
            continue
        axes.add(cut.axis)
        found = _owners(cut, experts, scope)
        layer = _layer_axis(equation, experts, bound.layout.mesh)
        layers: Iterable[int | None] = [None]
        if layer is not None:
            size = scope.size(layer)
            only = equation.only.get(layer)
            layers = range(size) if only is None else only.below(size)
        for at in layers:
            out[number, at] = found
    if len(axes) != 1:
        raise _wrong(
            "experts must be placed over one axis of the mesh",
            bound.layout.name,
            f"rules with {experts}@AXIS or {{#{experts}@AXIS}}",
            f"axes {', '.join(sorted(axes))}" if axes else "no rule that cuts the experts",
        )
    return out


def _owners(cut: ExpertCut, experts: str, scope: ValueScope) -> Coordinates:
    if isinstance(cut.how, Assigned):
        return cut.how.coordinates
    extent = scope.extent(cut.axis)
    numbers: Ints = np.arange(extent, dtype=np.int64)
    parts = held(Split(Atom(experts), cut.axis, cut.how), scope, {cut.axis: numbers}, extent)
    return tuple(np.repeat(parts.who, parts.size).tolist())


def _layer_axis(equation: Equation, experts: str, mesh: MeshShape | None) -> str | None:
    known = {*(mesh.extents if mesh else ()), experts}
    found = [p.axis for p in equation.name.parts if isinstance(p, NameIndex)]
    others = [a for a in found if a not in known]
    return others[0] if len(others) == 1 else None


def expert_forms(bound: Bound, experts: str) -> StoredForm:
    """Return the stored form of a layout that has nothing but the rules that cut the experts.

    Raises
    ------
    UsageError
        States of experts lie in buffers, with those of others.
    """
    layout = bound.layout
    numbers = {number for number, _ in tables_of(bound, experts)}
    whole = StoredForm(bound)
    for number in sorted(numbers):
        rule = whole.rules[number]
        first = next(iter(rule.tensors()), None)
        flats = [s for s in whole.states if first and _packed(whole, number, first, s)]
        if flats:
            raise _wrong(
                "experts whose states lie in buffers cannot be moved in place",
                rule.equation.text or layout.name,
                "a tensor for each state",
                f"a flat of {', '.join(s or 'params' for s in flats)}",
                "create model and optimizer with the new placement; ckptd.relayout fills them",
            )
    kept = tuple(e for n, e in enumerate(layout.equations) if n in numbers)
    fewer = replace(layout, equations=kept, flats=(), drops=(), drop_places=())
    return StoredForm(Bound(fewer, bound.sizes))


def _packed(form: StoredForm, rule: int, indexes: tuple[int, ...], state: str) -> bool:
    return form.packing.flat_of(rule, indexes, state) is not None


def unit_key(form: StoredForm, rule: int, indexes: tuple[int, ...], state: str, e: str) -> UnitKey:
    """Return what a tensor is moved together with: the experts of a layer, of one state."""
    found = form.rules[rule]
    names = tuple(sorted(f.name for f in found.equation.families.values()))
    others = tuple(n for a, n in zip(found.indexes, indexes, strict=True) if a != e)
    return names, others, state


# --- another placement ----------------------------------------------------------------------------


def place_experts(
    program: LayoutProgram, placement: ExpertPlacement, experts: str = "e", count: int | None = None
) -> LayoutProgram:
    """Return a program that is like another one, with the experts where a placement says.

    Parameters
    ----------
    program
        Its layout, or one that it uses and that stands in the same program, has the rules.
    placement
        Where they are to lie.
    experts
        The axis of experts in the space.
    count
        How many there are; None where only the placement says it.

    Raises
    ------
    UsageError
        The placement or the rules are not of the kind that fit each other.
    """
    mesh = program.resolve().mesh
    changer = _Changer(placement, experts, mesh, count)
    items = tuple(
        replace(i, statements=tuple(changer.statements(i.statements)))
        if isinstance(i, Layout)
        else i
        for i in program.file.items
    )
    if not changer.found:
        raise _wrong(
            "no rule of the program cuts the experts",
            program.layout,
            f"rules with {experts}@AXIS, or {{#{experts}@AXIS}} in the name",
            "rules of a shipped layout, or none",
            "write the rules of the experts into the layout: they override those that it uses",
        )
    return replace(program, file=File(items))


@dataclass
class _Changer:
    placement: ExpertPlacement
    experts: str
    mesh: MeshShape | None
    count: int | None
    found: bool = False

    def statements(self, statements: Iterable[Statement]) -> Iterator[Statement]:
        """Yield statements with the rules of experts changed."""
        ahead: dict[Rule, None] = {}
        behind: list[Statement] = []
        for s in statements:
            cut = _cut_of(s.name, s.dims, self.experts) if isinstance(s, Rule) else None
            if cut is None or not isinstance(s, Rule):
                behind.append(s)
                continue
            self.found = True
            placed, left = self._rule(s, cut)
            ahead |= dict.fromkeys(placed)
            behind += left
        yield from ahead
        yield from behind

    def _rule(self, rule: Rule, cut: ExpertCut) -> tuple[list[Rule], list[Rule]]:
        """Return the rules of layers that are placed, and what the old one still says."""
        extent = self.mesh.extents.get(cut.axis) if self.mesh else None
        if extent is None:
            raise _wrong("experts need a mesh", None, "a mesh", f"none with {cut.axis}")
        if not isinstance(self.placement, Mapping):
            everywhere = coordinates_of(self.placement, extent, self.count)
            return [], [_assigned(rule, self.experts, cut.axis, everywhere)]
        known = {*(self.mesh.extents if self.mesh else ()), self.experts}
        axes = [p.axis for p in rule.name.parts if isinstance(p, NameIndex) and p.axis not in known]
        if len(axes) != 1:
            raise _wrong(
                "layers with their own placement need one index in the names of the experts",
                None,
                "layers.{l}...",
                f"indexes {', '.join(axes) or 'none'}",
                "give one table for all layers",
            )
        by_table: dict[Coordinates, list[int]] = {}
        for layer, table in sorted(self.placement.items()):
            at = coordinates_of(table, extent, self.count, f"layer {layer}")
            by_table.setdefault(at, []).append(int(layer))
        bare = replace(rule, modifiers=tuple(m for m in rule.modifiers if not _is_for(m, axes[0])))
        placed = []
        for coordinates, layers in by_table.items():
            only = For(axes[0], tuple(_ranges(layers)))
            changed = _assigned(bare, self.experts, cut.axis, coordinates)
            placed.append(replace(changed, modifiers=(*changed.modifiers, only)))
        return placed, _less(rule, axes[0], set(self.placement))


def _is_for(modifier: object, axis: str) -> bool:
    return isinstance(modifier, For) and modifier.axis == axis


def _less(rule: Rule, axis: str, layers: set[int]) -> list[Rule]:
    """Return a rule without layers that others now have, where it lists its own."""
    mine = [m for m in rule.modifiers if isinstance(m, For) and m.axis == axis]
    numbers: set[int] = set()
    for r in mine[0].ranges if len(mine) == 1 else ():
        if not isinstance(r.first, int) or not isinstance(r.last, int):
            return [rule]
        numbers |= set(range(r.first, r.last + 1, r.step))
    if len(mine) != 1:
        # The first to have a name keeps it: those that are placed stand before it.
        return [rule]
    left = sorted(numbers - layers)
    if not left:
        return []
    others = tuple(m for m in rule.modifiers if m is not mine[0])
    return [replace(rule, modifiers=(*others, For(axis, tuple(_ranges(left)))))]


def _ranges(numbers: Sequence[int]) -> Iterator[Range]:
    """Yield rising numbers as ranges."""
    at = 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        yield Range(numbers[at], numbers[end])
        at = end + 1


def _assigned(rule: Rule, experts: str, axis: str, table: Coordinates) -> Rule:
    how = Assigned(table)
    parts = tuple(
        replace(p, splits=((axis, how),))
        if isinstance(p, NameIndex) and p.axis == experts and p.splits
        else p
        for p in rule.name.parts
    )
    dims = tuple(_put(d, Atom(experts), how) for d in rule.dims)
    return replace(rule, name=replace(rule.name, parts=parts), dims=dims)


def _put(dim: Dim, experts: Atom, how: How) -> Dim:
    match dim:
        case Split() if dim.inner == experts:
            return replace(dim, how=how)
        case Split() | Pad():
            return replace(dim, inner=_put(dim.inner, experts, how))
        case Product():
            return replace(dim, parts=tuple(_put(p, experts, how) for p in dim.parts))
        case Sum():
            branches = (replace(b, dim=_put(b.dim, experts, how)) for b in dim.branches)
            return replace(dim, branches=tuple(branches))
    return dim
