"""Replicas that must be equal (``same``): parts of tensors that several ranks hold.

In it: how much of templates is kept.

A mesh axis that a rule does not mention holds replicas of the whole tensor. One that cuts some
branches of a sum holds replicas of the others; and ranks that pack a tensor into buffers of
different lengths have ranges of it in common. An alias that is cut as the rule that it copies is
one more holder. All of these are ranges of cells of the stored tensor's grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from ckptd.base.grids.block import Templates
from ckptd.base.grouping import by_key
from ckptd.lay.flats import cell_cuts, shares
from ckptd.lay.holders import holders_of
from ckptd.lay.places import free_ranges
from ckptd.lay.resolve import Ints
from ckptd.lay.ruleform import RuleForm, Who
from ckptd.lay.stored import StoredForm, TensorKey, local_cells
from ckptd.lay.syntax.tree import Average, Replicas
from ckptd.types import Box

_KEPT = 1_000_000


class ReplicatedPart(NamedTuple):
    """A part of a stored tensor that several ranks hold.

    Attributes
    ----------
    cell
        Number of the cell in the grid of the tensor's rule.
    lo, hi
        Row-major elements of the cell.
    ranks
        All of them, rising.
    group
        The same text for the same ranks.
    holders
        Number of a rule, and the ranks that hold the part by it, rising: the rule of the tensor,
        and aliases.
    """

    cell: int
    lo: int
    hi: int
    ranks: Ints
    group: str
    holders: tuple[tuple[int, Ints], ...]


@dataclass(frozen=True, eq=False)
class ReplicatedParts:
    """Finds the parts of a layout's tensors that several ranks hold.

    Rules whose replicas may differ (``any``) have none. Of what is averaged or summed, ranks that
    differ along that axis hold values of their own.

    Attributes
    ----------
    form
        The layout.
    """

    form: StoredForm
    _cells: Templates[object, tuple[ReplicatedPart, ...]] = field(
        default_factory=lambda: Templates(_KEPT)
    )

    def of_tensor(self, key: TensorKey) -> Iterator[ReplicatedPart]:
        """Yield all parts of a tensor that several ranks hold."""
        rule, axes = self.form.rules[key[0]], self._apart(key)
        if axes is not None and not self._unique(rule, axes):
            for cell in range(rule.grid.ncells):
                yield from self._parts(key, cell, axes)

    def of_rank(self, key: TensorKey, rank: int) -> Iterator[ReplicatedPart]:
        """Yield the parts of a tensor that a rank and others hold; the tensor may be an alias's."""
        rule = self.form.rules[key[0]]
        original = (self.originals.get(rule.number, rule.number), *key[1:])
        axes = self._apart(original)
        if axes is None or self._apart(key) is None or self._unique(rule, axes):
            return
        for cell in self.boxes(rule, rule.who(self.form.mesh.coordinates(rank))):
            for part in self._parts(original, cell, axes):
                if any(n == rule.number and _has(ranks, rank) for n, ranks in part.holders):
                    yield part

    @cached_property
    def originals(self) -> dict[int, int]:
        """Number of the rule that an alias copies, where both are cut alike.

        Rules whose replicas are chosen or combined are left out.
        """
        return {
            copy.number: original.number
            for copy in self.form.rules
            if copy.number not in self.form.stored_numbers and _are_checked(copy)
            for original in self.form.stored_rules
            if _is_copy(copy, original) and _are_checked(original)
        }

    @cached_property
    def copied(self) -> frozenset[int]:
        """Numbers of the rules that aliases copy."""
        return frozenset(self.originals.values())

    @cached_property
    def _copies(self) -> dict[int, list[RuleForm]]:
        return by_key((of, self.form.rules[copy]) for copy, of in self.originals.items())

    def boxes(self, rule: RuleForm, who: Who) -> dict[int, Box]:
        """Return where the cells that a rank holds lie in its tensor as it is without flats."""
        found = self._boxes.get((rule.number, who))
        if found is None:
            found = self._boxes[rule.number, who] = dict(local_cells(rule, who))
        return found

    @cached_property
    def _boxes(self) -> dict[tuple[int, Who], dict[int, Box]]:
        return {}

    # --- holders --------------------------------------------------------------------------------

    def _apart(self, key: TensorKey) -> tuple[str, ...] | None:
        """Return the axes along which holders of a cell have values of their own; None: all."""
        rule, indexes, state = key
        modifiers = self.form.rules[rule].equation.modifiers
        if any(isinstance(m, Replicas) and m.kind == "any" for m in modifiers):
            return None
        strides = self.form.mesh.strides
        out = [m.axis for m in modifiers if isinstance(m, Average) and strides.get(m.axis)]
        flat = self.form.packing.flat_of(rule, indexes, state)
        return tuple(out) if flat is None else (self._flat_axis(flat), *out)

    def _flat_axis(self, flat: int) -> str:
        return self.form.bound.layout.flats[flat].split[0]

    def _unique(self, rule: RuleForm, axes: Sequence[str]) -> bool:
        """Whether it is plain that no two ranks hold anything of a rule in common.

        Ranges of flats may overlap where ranks that hold the same pack it into other buffers; such
        ranks differ on an axis that is free here.
        """
        key = (rule.number, tuple(axes))
        if key not in self._known_unique:
            free = free_ranges(self.form.mesh, rule.axes | set(axes)) if rule.plain else None
            alone = rule.number not in self.copied and rule.number not in self.originals
            self._known_unique[key] = (
                alone
                and free == []
                and all(len(np.unique(h.cells[1])) == len(h.cells[1]) for h in rule.held)
            )
        return self._known_unique[key]

    @cached_property
    def _known_unique(self) -> dict[tuple[int, tuple[str, ...]], bool]:
        return {}

    def _parts(
        self, key: TensorKey, cell: int, axes: tuple[str, ...]
    ) -> tuple[ReplicatedPart, ...]:
        rules = self._rules(key)
        flats = [self.form.packing.flat_of(r.number, *key[1:]) for r in rules]
        name: object = (cell, axes, *((r.number, *r.fixed(key[1]).items()) for r in rules))
        if any(f is not None for f in flats):
            name = (cell, axes, key[:2], self.form.packing.alike(key[2]))
        found = self._cells.get(name)
        if found is None:
            found = tuple(self._all_parts(rules, flats, key, cell, axes))
            self._cells.put(name, found, weight=1 + sum(len(p.ranks) for p in found))
        return found

    def _rules(self, key: TensorKey) -> list[RuleForm]:
        """Return the rule of a tensor, and the aliases that have a copy of it."""
        copies = (c for c in self._copies.get(key[0], ()) if c.has(key[1]))
        return [self.form.rules[key[0]], *copies]

    def _all_parts(
        self,
        rules: Sequence[RuleForm],
        flats: Sequence[int | None],
        key: TensorKey,
        cell: int,
        axes: tuple[str, ...],
    ) -> Iterator[ReplicatedPart]:
        numel = rules[0].grid.cell_box(cell).numel
        at = tuple(int(i) for i in np.unravel_index(cell, rules[0].grid.cell_shape))
        cuts: list[_Cut] = []
        for rule, flat in zip(rules, flats, strict=True):
            mine = (rule.number, *key[1:])
            apart = axes if rule is rules[0] else self._apart(mine) or ()
            holders = holders_of(rule, key[1], at, apart).all()
            if flat is None:
                cuts.append(_Cut(rule.number, np.array([0, numel]), holders, 0))
            else:
                cuts += self._cuts(rule, mine, cell, flat, holders)
        ends = np.unique(np.concatenate([c.ends for c in cuts])).tolist()
        shifts = [0]
        for axis in axes if flats[0] is None else axes[1:]:
            steps = range(self.form.mesh.extents[axis])
            shifts = [s + i * self.form.mesh.strides[axis] for s in shifts for i in steps]
        for lo, hi in pairwise(ends):
            by_rule: dict[int, list[Ints]] = {}
            for cut in cuts:
                part = int(np.searchsorted(cut.ends, lo, "right")) - 1
                by_rule.setdefault(cut.rule, []).append(cut.ranks + part * cut.stride)
            for shift in shifts:
                pairs = [(n, np.sort(np.concatenate(r)) + shift) for n, r in by_rule.items()]
                ranks = np.unique(np.concatenate([r for _, r in pairs]))
                if sum(len(r) for _, r in pairs) > 1:
                    group = xxhash.xxh3_64_hexdigest(ranks.data)
                    yield ReplicatedPart(cell, lo, hi, ranks, group, tuple(pairs))

    def _cuts(
        self, rule: RuleForm, key: TensorKey, cell: int, flat: int, holders: Ints
    ) -> Iterator[_Cut]:
        """Yield how ranks cut a cell that lies in their buffers.

        Ranks that pack different tensors may cut it in different places.
        """
        packing = self.form.packing
        stride = self.form.mesh.strides[self._flat_axis(flat)]
        for ranks in packing.alike_ranks(flat, holders):
            slot = packing.slot(flat, *key, int(ranks[0]))
            who = rule.who(self.form.mesh.coordinates(int(ranks[0])))
            starts = shares(slot.numel, slot.offset, packing.starts(flat, slot.length))
            box = self.boxes(rule, who)[cell]
            yield _Cut(rule.number, cell_cuts(box, rule.local_shape(who), starts), ranks, stride)


class _Cut(NamedTuple):
    """A cell's cut over some ranks, and those `stride` apart: where the part of each begins."""

    rule: int
    ends: Ints
    ranks: Ints
    stride: int


def _has(ranks: Ints, rank: int) -> bool:
    at = int(np.searchsorted(ranks, rank))
    return at < len(ranks) and int(ranks[at]) == rank


def _are_checked(rule: RuleForm) -> bool:
    """Whether all replicas of a rule are equal: none is chosen, and none combined."""
    return not any(
        isinstance(m, Average) or (isinstance(m, Replicas) and m.kind == "any")
        for m in rule.equation.modifiers
    )


def _is_copy(copy: RuleForm, original: RuleForm) -> bool:
    """Whether the tensors of two rules are cut alike and hold the same."""
    a, b = copy.equation, original.equation
    return (a.dims, dict(a.families), dict(a.pinned)) == (
        b.dims,
        dict(b.families),
        dict(b.pinned),
    ) and copy.indexes == original.indexes
