"""What several ranks hold of one tensor: the parts whose values must be equal on all of them.

A mesh axis that a rule does not mention holds replicas of the whole tensor. One that cuts some
branches of a sum holds replicas of the others; and ranks that pack a tensor into buffers of
different lengths have ranges of it in common. All of these are ranges of cells of the stored
tensor's grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from ckptd.layout.block import Templates
from ckptd.layout.lay.flats import cell_cuts, shares
from ckptd.layout.lay.holders import holders_of
from ckptd.layout.lay.places import free_ranges
from ckptd.layout.lay.resolve import Ints
from ckptd.layout.lay.ruleform import RuleForm, Who
from ckptd.layout.lay.stored import StoredForm, TensorKey, local_cells
from ckptd.layout.lay.syntax import Average, Replicas
from ckptd.types import Box

__all__ = ["ReplicatedPart", "ReplicatedParts"]

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
        Rising.
    group
        The same text for the same ranks.
    """

    cell: int
    lo: int
    hi: int
    ranks: Ints
    group: str


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
        """Yield the parts of a tensor that one rank and others hold."""
        rule, axes = self.form.rules[key[0]], self._apart(key)
        if axes is not None and not self._unique(rule, axes):
            for cell in self.boxes(rule, rule.who(self.form.mesh.coordinates(rank))):
                for part in self._parts(key, cell, axes):
                    at = int(np.searchsorted(part.ranks, rank))
                    if at < len(part.ranks) and part.ranks[at] == rank:
                        yield part

    def boxes(self, rule: RuleForm, who: Who) -> dict[int, Box]:
        """Return where the cells that a rank holds lie in its tensor as it is without flats."""
        found = self._boxes.get((rule.number, who))
        if found is None:
            found = self._boxes[rule.number, who] = dict(local_cells(rule, who))
        return found

    @cached_property
    def _boxes(self) -> dict[tuple[int, Who], dict[int, Box]]:
        return {}

    # --- who holds what -------------------------------------------------------------------------

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
            self._known_unique[key] = free == [] and all(
                len(np.unique(h.cells[1])) == len(h.cells[1]) for h in rule.held
            )
        return self._known_unique[key]

    @cached_property
    def _known_unique(self) -> dict[tuple[int, tuple[str, ...]], bool]:
        return {}

    def _parts(
        self, key: TensorKey, cell: int, axes: tuple[str, ...]
    ) -> tuple[ReplicatedPart, ...]:
        rule = self.form.rules[key[0]]
        flat = self.form.packing.flat_of(*key)
        name: object = (rule.number, tuple(rule.fixed(key[1]).items()), cell, axes)
        if flat is not None:
            name = (key[:2], self.form.packing.alike(key[2]), cell, axes)
        found = self._cells.get(name)
        if found is None:
            found = tuple(self._all_parts(rule, key, cell, axes, flat))
            self._cells.put(name, found, weight=1 + sum(len(p.ranks) for p in found))
        return found

    def _all_parts(
        self, rule: RuleForm, key: TensorKey, cell: int, axes: tuple[str, ...], flat: int | None
    ) -> Iterator[ReplicatedPart]:
        at = tuple(int(i) for i in np.unravel_index(cell, rule.grid.cell_shape))
        holders = holders_of(rule, key[1], at, axes).all()
        if flat is None:
            ranges = [(0, rule.grid.cell_box(cell).numel, holders)]
        else:
            ranges = list(self._ranges(rule, key, cell, flat, holders))
            axes = axes[1:]
        shifts = [0]
        for axis in axes:
            steps = range(self.form.mesh.extents[axis])
            shifts = [s + i * self.form.mesh.strides[axis] for s in shifts for i in steps]
        for lo, hi, ranks in ranges:
            for shift in shifts if len(ranks) > 1 and hi > lo else ():
                mine = np.sort(ranks) + shift
                yield ReplicatedPart(cell, lo, hi, mine, xxhash.xxh3_64_hexdigest(mine.data))

    def _ranges(
        self, rule: RuleForm, key: TensorKey, cell: int, flat: int, holders: Ints
    ) -> Iterator[tuple[int, int, Ints]]:
        """Yield the ranges of a cell that holders have in their parts of buffers, and who has each.

        Ranks that pack different tensors may cut the cell in different places.
        """
        packing = self.form.packing
        stride = self.form.mesh.strides[self._flat_axis(flat)]
        cuts: list[tuple[Ints, Ints]] = []
        for ranks in packing.alike_ranks(flat, holders):
            first = int(ranks[0])
            slot = packing.slot(flat, rule.number, key[1], key[2], first)
            who = rule.who(self.form.mesh.coordinates(first))
            starts = shares(slot.numel, slot.offset, packing.starts(flat, slot.length))
            box = self.boxes(rule, who)[cell]
            cuts.append((cell_cuts(box, rule.local_shape(who), starts), ranks))
        ends = np.unique(np.concatenate([c for c, _ in cuts])) if cuts else ()
        for lo, hi in pairwise(map(int, ends)):
            found = [r + (int(np.searchsorted(c, lo, "right")) - 1) * stride for c, r in cuts]
            yield lo, hi, np.concatenate(found)
