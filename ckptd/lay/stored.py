"""`StoredForm`: tensors, grids and owners of a checkpoint of a layout, whatever the ranks.

In it: tensors of one name.

Splits are taken out of the rules and numbers in names are global. What ranks hold are cells of a
rectilinear grid, and each cell belongs to the lowest rank that holds it. Grids and owners are made
once per rule; layers and states share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import Owners
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.flats import cell_cuts, flat_axis, shares
from ckptd.lay.indexes import BUFFER, write_name
from ckptd.lay.packing import Packing
from ckptd.lay.resolve import Bound, Ints, MeshShape, ValueScope, scope_of
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.syntax.tree import Alias, Dim, NameIndex
from ckptd.types import Box

TensorKey = tuple[int, tuple[int, ...], str]
"""Number of the rule, indexes in the name, short name of the state (empty: the parameter)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes
    ----------
    name
        Its name there.
    rule, indexes, state
        Where it comes from: number of the equation, global numbers in the name, short name of the
        state or empty.
    grid
        Its pieces.
    owners, base
        Lowest rank that holds each piece: the map's number plus `base`.
    """

    name: str
    rule: int
    indexes: tuple[int, ...]
    state: str
    grid: Grid
    owners: Owners
    base: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.grid.shape


@dataclass(frozen=True, eq=False)
class StoredForm:
    """All stored tensors of a layout, made when they are asked for.

    Attributes
    ----------
    bound
        The layout.
    sizes, refined
        Further sizes and parts of atoms, from the layout that this one is combined with.
    """

    bound: Bound
    sizes: Mapping[str, int] = field(default_factory=dict)
    refined: Mapping[str, Dim] = field(default_factory=dict)

    @cached_property
    def scope(self) -> ValueScope:
        """Values of the names in the layout: sizes, extents, refined atoms."""
        own = scope_of(self.bound)
        sizes = {**self.sizes, **own.sizes}
        return ValueScope(sizes, own.extents, {**self.refined, **own.refined})

    @cached_property
    def mesh(self) -> MeshShape:
        """The mesh; of one rank where the layout has none."""
        return self.bound.layout.mesh or MeshShape(1, {}, {})

    @cached_property
    def rules(self) -> tuple[RuleForm, ...]:
        """All equations."""
        layout = self.bound.layout
        return tuple(
            RuleForm(i, e, layout, self.mesh, self.scope) for i, e in enumerate(layout.equations)
        )

    @cached_property
    def stored_rules(self) -> tuple[RuleForm, ...]:
        """Equations whose tensors are stored: aliases are copies of what others hold."""
        return tuple(
            r for r in self.rules if not any(isinstance(m, Alias) for m in r.equation.modifiers)
        )

    @cached_property
    def stored_numbers(self) -> frozenset[int]:
        """Numbers of `stored_rules`."""
        return frozenset(r.number for r in self.stored_rules)

    @cached_property
    def states(self) -> Mapping[str, str]:
        """Stored name of each state, by short name; the parameter itself is the empty one."""
        return {"": ""} | {s.name: s.stored for s in self.bound.layout.states}

    @cached_property
    def packing(self) -> Packing:
        """Where the layout's flats put everything."""
        return Packing(self.bound.layout, self.mesh, self.scope, self.rules)

    def name(self, base: str, state: str) -> str:
        """Return the name of a tensor of a state, by the name of its rule.

        Parameters
        ----------
        base
            The name by the rule, with global or local numbers.
        state
            Short name, or empty.
        """
        layout = self.bound.layout
        if not state:
            return layout.params.replace("{name}", base)
        return layout.state_name(base, self.states[state])

    def buffer_name(self, flat: int, number: int, state: str, group: Sequence[str] = ()) -> str:
        """Return what a buffer is called on a rank.

        Parameters
        ----------
        flat
            Number of the flat that packs it.
        number
            Of the buffer, on the rank.
        state
            Short name, or empty.
        group
            The numbers of its group, in the order of the pattern's indexes.
        """
        found = self.bound.layout.flats[flat]
        if found.called is None:
            return f"flat.{number}.{state or 'params'}"
        parts = found.group.name.parts if found.group.name else ()
        axes = [p.axis for p in parts if isinstance(p, NameIndex)]
        numbers = {a: int(n) for a, n in zip(axes, group, strict=True)}
        return self.name(write_name(found.called, {**numbers, BUFFER: number}), state)

    def keys(self) -> Iterator[TensorKey]:
        """Yield all stored tensors' keys: rule by rule, index by index, state by state."""
        for rule in self.stored_rules:
            for indexes in rule.tensors():
                for state in self.states:
                    yield rule.number, indexes, state

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield all stored tensors.

        Raises
        ------
        UsageError, MismatchError
            A rule cannot be stored; the message says why.
        """
        for rule, indexes, state in self.keys():
            yield self.tensor(rule, indexes, state)

    @cached_property
    def by_name(self) -> Mapping[str, TensorKey]:
        """Key of each stored tensor, by its name.

        Raises
        ------
        UsageError
            Two tensors have one name.
        """
        out: dict[str, TensorKey] = {}
        for rule, indexes, state in self.keys():
            name = self.name(self.rules[rule].global_name(indexes), state)
            if name in out:
                raise UsageError("two stored tensors have one name", kind="lay-rule", where=name)
            out[name] = (rule, indexes, state)
        return out

    def tensor(self, rule: int, indexes: tuple[int, ...], state: str) -> StoredTensor:
        """Return one stored tensor.

        Raises
        ------
        UsageError, MismatchError
            As `tensors`.
        """
        key = (rule, indexes, state)
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = self._tensor(*key)
        return found

    @cached_property
    def _tensors(self) -> dict[TensorKey, StoredTensor]:
        return {}

    def _tensor(self, number: int, indexes: tuple[int, ...], state: str) -> StoredTensor:
        rule = self.rules[number]
        base_name = rule.global_name(indexes)
        name = self.name(base_name, state)
        base = rule.base(indexes) if rule.plain else 0
        flat = self.packing.flat_of(number, indexes, state)
        if flat is None:
            grid, owners = self._cells(rule, indexes)
        else:
            same = (number, indexes, self.packing.alike(state))
            found = self._state_pieces.get(same)
            if found is None:
                found = self._pieces(rule, indexes, state, flat, base)
                self._state_pieces[same] = found
            grid, owners = found
        return StoredTensor(name, number, indexes, state, grid, owners, base)

    # --- cells ----------------------------------------------------------------------------------

    def _cells(self, rule: RuleForm, indexes: tuple[int, ...]) -> tuple[Grid, Owners]:
        key = (rule.number, () if rule.plain else tuple(rule.fixed(indexes).items()))
        found = self._cell_owners.get(key)
        if found is None:
            owners = Owners.from_array(self.cell_owners(rule, indexes))
            found = self._cell_owners[key] = (rule.grid, owners)
        return found

    @cached_property
    def _cell_owners(self) -> dict[object, tuple[Grid, Owners]]:
        return {}

    def cell_owners(self, rule: RuleForm, indexes: tuple[int, ...]) -> Ints:
        """Return the lowest rank that holds each cell, without the base of a plain rule.

        Raises
        ------
        MismatchError
            No rank holds a cell.
        """
        if rule.plain:
            return rule.owners
        # Axes that share digits of a rank's number: look at the ranks one by one, highest first.
        wanted = rule.fixed(indexes) | dict(rule.on)
        out = np.full(rule.grid.cell_shape, -1, dtype=np.int64)
        for rank in reversed(range(self.mesh.world)):
            coordinates = self.mesh.coordinates(rank)
            if all(coordinates.get(a, c) == c for a, c in wanted.items()):
                who = rule.who(coordinates)
                cells = [h.cells_of(i)[0] for h, i in zip(rule.held, who, strict=True)]
                out[np.ix_(*cells)] = rank
        return _without_fills(rule, out).reshape(-1)

    # --- flats ----------------------------------------------------------------------------------

    def _pieces(
        self, rule: RuleForm, indexes: tuple[int, ...], state: str, flat: int, base: int
    ) -> tuple[Grid, Owners]:
        """Cut each cell the way its owner's buffer is cut."""
        holders = self.cell_owners(rule, indexes)
        ranks = np.unique(holders).tolist()
        slots = []
        for r in ranks:
            slot = self.packing.slot(flat, rule.number, indexes, state, base + r)
            slots.append((r, slot.offset, slot.length))
        key = (rule.number, flat, tuple(slots))
        found = self._flat_pieces.get(key)
        if found is None:
            found = self._flat_pieces[key] = self._cut(rule, flat, holders, slots)
        return found

    @cached_property
    def _state_pieces(self) -> dict[object, tuple[Grid, Owners]]:
        return {}

    @cached_property
    def _flat_pieces(self) -> dict[object, tuple[Grid, Owners]]:
        return {}

    def _cut(
        self, rule: RuleForm, flat: int, holders: Ints, slots: list[tuple[int, int, int]]
    ) -> tuple[Grid, Owners]:
        axis = self.bound.layout.flats[flat].split[0]
        stride = self.mesh.strides[axis]
        axes: dict[int, Axis] = {}
        owners: dict[int, Ints] = {}
        for rank, offset, length in slots:
            who = rule.who(self.mesh.coordinates(rank))
            shape = rule.local_shape(who)
            starts = shares(math.prod(shape), offset, self.packing.starts(flat, length))
            for cell, box in local_cells(rule, who):
                if holders[cell] == rank:
                    axes[cell], whose = flat_axis(cell_cuts(box, shape, starts))
                    owners[cell] = rank + whose * stride
        for cell in range(rule.grid.ncells):
            if cell not in axes:
                # Fills inside of a split: no rank's buffer has them.
                axes[cell] = Axis(((rule.grid.cell_box(cell).numel, 1),))
                owners[cell] = holders[cell : cell + 1]
        found = [axes[c] for c in range(rule.grid.ncells)]
        all_owners = np.concatenate([owners[c] for c in range(rule.grid.ncells)])
        return Grid(rule.grid.axes, _shared(rule.grid, found)), Owners.from_array(all_owners)


def local_cells(rule: RuleForm, who: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Yield the cells that a rank holds, each with its box in the rank-local tensor.

    Parameters
    ----------
    rule
        The rule of the tensor.
    who
        The rank's combination for each dimension.
    """
    found = [
        [
            (c, at, h.axis.cell(c)[1])
            for c, at in zip(*(v.tolist() for v in h.cells_of(i)), strict=True)
        ]
        for h, i in zip(rule.held, who, strict=True)
    ]
    for cells in product(*found):
        number = rule.grid.cell_index(tuple(c for c, _, _ in cells))
        yield number, Box(tuple(at for _, at, _ in cells), tuple(n for _, _, n in cells))


def _shared(grid: Grid, axes: list[Axis]) -> tuple[Axis, ...]:
    """One flat cut for all cells where they are alike."""
    alike = all(len(a.runs) == 1 for a in grid.axes) and all(a == axes[0] for a in axes)
    return (axes[0],) if alike else tuple(axes)


def _without_fills(rule: RuleForm, owners: Ints) -> Ints:
    """Give what no rank has to the first holder, if it is all fills."""
    missed = owners < 0
    for d in range(owners.ndim):
        along = [1] * owners.ndim
        along[d] = -1
        missed &= ~rule.unheld(d).reshape(along)
    if missed.any():
        raise MismatchError(
            "no rank holds a part of a tensor",
            kind="lay-fit",
            where=rule.equation.text or str(rule.equation.at),
            found=f"cell {tuple(int(i[0]) for i in np.nonzero(missed))} of {owners.shape}",
            hint="two dimensions are cut over the same ranks",
        )
    return np.where(owners < 0, owners[owners >= 0].min() if (owners >= 0).any() else 0, owners)
