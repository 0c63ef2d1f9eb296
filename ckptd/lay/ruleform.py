"""One equation in stored form: shape, numbers, grid, owners and holders of its parts.

In it: limits of cells and names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, product

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.grid import Axis, Grid
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.boxes import DimBox, Sequence, restrict, sequence
from ckptd.lay.held import Held, held, split_axes
from ckptd.lay.indexes import IndexCut, index_cut, write_name
from ckptd.lay.matching import stored_name
from ckptd.lay.places import MeshPositions, apart
from ckptd.lay.resolve import Equation, Ints, MeshShape, Resolved, Tags, ValueScope
from ckptd.lay.syntax.tree import Name, NameIndex, On

Who = tuple[int, ...]
"""For each dimension, the number of a rank's combination of coordinates on its split axes."""

_MAX_CELLS = 2**26
_MAX_NAMES = 2**24
_NOBODY = 2**62


@dataclass(frozen=True, eq=False)
class RuleForm:
    """An equation, looked up.

    Attributes
    ----------
    number
        Its place among the layout's equations.
    equation, layout, mesh, scope
        What it is made from.
    """

    number: int
    equation: Equation
    layout: Resolved
    mesh: MeshShape
    scope: ValueScope

    # --- the tensor -----------------------------------------------------------------------------

    @cached_property
    def dims(self) -> tuple[Sequence, ...]:
        """The stored tensor's dimensions."""
        return tuple(sequence(d, self.scope) for d in self.equation.dims)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The stored tensor's shape."""
        return tuple(d.length for d in self.dims)

    @cached_property
    def whole(self) -> Mapping[Tags, tuple[DimBox, ...]]:
        """Each family's elements as one box a dimension: without splits they are a lattice."""
        found = [[b for b in restrict(d, 0, d.length) if isinstance(b, DimBox)] for d in self.dims]
        return {tuple(t for b in boxes for t in b.tags): boxes for boxes in product(*found)}

    # --- its name -------------------------------------------------------------------------------

    @cached_property
    def cuts(self) -> Mapping[str, IndexCut]:
        """How the indexes of the name are dealt out, by axis.

        Raises
        ------
        UsageError
            There are absurdly many tensors of this name.
        """
        found = {
            p.axis: index_cut(self.layout, p, self.scope)
            for p in self.equation.name.parts
            if isinstance(p, NameIndex) and p.axis not in self.mesh.extents
        }
        count = math.prod(c.size for c in found.values())
        if count > _MAX_NAMES:
            raise UsageError(
                "a rule names too many tensors",
                kind="lay-rule",
                where=self.equation.text or None,
                wanted=f"at most {_MAX_NAMES}",
                found=count,
            )
        return found

    @cached_property
    def indexes(self) -> tuple[str, ...]:
        """The axes that its name has an index for, in textual order."""
        return tuple(self.cuts)

    def tensors(self) -> Iterator[tuple[int, ...]]:
        """Yield the indexes of all tensors of this name."""
        yield from product(*map(self.numbers, self.cuts))

    def numbers(self, axis: str) -> Iterable[int]:
        """Return the numbers that its names have on an axis."""
        size = self.cuts[axis].size
        only = self.equation.only.get(axis)
        return range(size) if only is None else only.below(size)

    def has(self, indexes: tuple[int, ...]) -> bool:
        """Whether there is a tensor of this name with some indexes."""
        only = self.equation.only
        return not only or all(
            only[a].has(n) for a, n in zip(self.indexes, indexes, strict=True) if a in only
        )

    def global_name(self, indexes: tuple[int, ...]) -> str:
        """Return the name in checkpoints: global numbers, and no virtual stages.

        Raises
        ------
        UsageError
            The name has a glob, or speaks of a rank axis that cuts no index of it.
        """
        return write_name(self._global_pattern, self._numbers(indexes))

    @cached_property
    def _global_pattern(self) -> Name:
        return stored_name(self.equation.name, self.mesh.local)

    def long_name(self, indexes: tuple[int, ...]) -> str:
        """Return the name on ranks, but with global numbers: what the groups of flats match."""
        return write_name(self.equation.name, self._numbers(indexes))

    def _numbers(self, indexes: tuple[int, ...]) -> dict[str, int]:
        return {**dict(zip(self.indexes, indexes, strict=True)), **self.on, **self.fixed(indexes)}

    def local_name(self, indexes: tuple[int, ...]) -> str:
        """Return the name of the rank-local tensor: numbers within the rank after ``#``."""
        fixed = self.fixed(indexes)
        numbers = self._numbers(indexes)
        for p in self.equation.name.parts:
            if isinstance(p, NameIndex) and p.local and p.axis in self.indexes:
                numbers[p.axis] = self.cuts[p.axis].local(numbers[p.axis], fixed)
        return write_name(self.equation.name, numbers)

    # --- holders --------------------------------------------------------------------------------

    @cached_property
    def on(self) -> Mapping[str, int]:
        """Coordinates that only holders of the tensor have, whatever its indexes."""
        out = {}
        for m in self.equation.modifiers:
            if isinstance(m, On):
                last = self.scope.extent(m.axis) - 1
                out[m.axis] = last if m.coordinate == "last" else m.coordinate
        return out

    def fixed(self, indexes: tuple[int, ...]) -> dict[str, int]:
        """Return the coordinates that the indexes of a tensor say."""
        out: dict[str, int] = {}
        for cut, number in zip(self.cuts.values(), indexes, strict=True):
            out.update(cut.coordinates(number))
        return out

    def holds(self, indexes: tuple[int, ...], coordinates: Mapping[str, int]) -> bool:
        """Whether a rank with these coordinates holds something of a tensor."""
        wanted = chain(self.fixed(indexes).items(), self.on.items())
        return all(coordinates.get(a, c) == c for a, c in wanted)

    def base(self, indexes: tuple[int, ...]) -> int:
        """Return what the indexes and ``on`` add to the number of the lowest rank.

        Raises
        ------
        UsageError
            ``on`` and the indexes contradict each other: no rank holds the tensor.
        """
        fixed = self.fixed(indexes)
        for axis, coordinate in self.on.items():
            if fixed.setdefault(axis, coordinate) != coordinate:
                raise UsageError(
                    "no rank holds this tensor",
                    kind="lay-rule",
                    where=self.global_name(indexes),
                    wanted=f"{axis}={coordinate}, as its rule says",
                    found=f"{axis}={fixed[axis]}, as its number says",
                )
        return sum(c * self.mesh.strides[a] for a, c in fixed.items())

    @cached_property
    def places(self) -> tuple[MeshPositions, ...]:
        """For each dimension, the combinations of coordinates that cut it."""
        return tuple(MeshPositions(self.mesh, split_axes(d)) for d in self.equation.dims)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """For each dimension, what each combination holds."""
        return tuple(
            held(dim, self.scope, p.coordinates, p.count)
            for dim, p in zip(self.equation.dims, self.places, strict=True)
        )

    @cached_property
    def axes(self) -> frozenset[str]:
        """All rank axes that decide which ranks hold which parts of it."""
        found = {a for p in self.places for a in p.axes} | set(self.on)
        found |= {a for c in self.cuts.values() for a in c.axes}
        return frozenset(a for a in found if self.mesh.strides.get(a))

    @cached_property
    def plain(self) -> bool:
        """Whether the lowest holder is the sum of what dimensions, indexes and ``on`` add."""
        fixed = {
            a for a in self.axes if a in self.on or any(a in c.axes for c in self.cuts.values())
        }
        groups = [set(p.axes) for p in self.places] + [{a} for a in fixed]
        return all(apart(self.mesh, a, b) for g, h in combinations(groups, 2) for a in g for b in h)

    def who(self, coordinates: Mapping[str, int]) -> Who:
        """Return a rank's combinations."""
        return tuple(p.index(coordinates) for p in self.places)

    def local_shape(self, who: Who) -> tuple[int, ...]:
        """Return the shape of the rank-local tensor."""
        return tuple(int(h.lengths[i]) for h, i in zip(self.held, who, strict=True))

    def local_dims(self, who: Who) -> tuple[Sequence, ...]:
        """Return the rank-local tensor's dimensions."""
        found = self._local_dims.get(who)
        if found is None:
            found = tuple(
                sequence(dim, self.scope, p.at(i))
                for dim, p, i in zip(self.equation.dims, self.places, who, strict=True)
            )
            self._local_dims[who] = found
        return found

    @cached_property
    def _local_dims(self) -> dict[Who, tuple[Sequence, ...]]:
        return {}

    # --- its cells ------------------------------------------------------------------------------

    @cached_property
    def grid(self) -> Grid:
        """The cells: no rank holds a part of one.

        Raises
        ------
        UsageError
            There are absurdly many.
        """
        axes: tuple[Axis, ...] = tuple(h.axis for h in self.held)
        if math.prod(a.ncells for a in axes) > _MAX_CELLS:
            raise UsageError("a tensor is cut into too many cells", kind="lay-rule")
        return Grid(axes)

    @cached_property
    def owners(self) -> Ints:
        """Lowest rank that holds each cell, without what `base` adds. Needs `plain`.

        Raises
        ------
        MismatchError
            No rank holds a cell.
        """
        out = np.zeros(1, dtype=np.int64)
        for d, (h, p) in enumerate(zip(self.held, self.places, strict=True)):
            lowest = np.full(h.axis.ncells, _NOBODY, dtype=np.int64)
            who, cell, _ = h.cells
            np.minimum.at(lowest, cell, p.ranks[who])
            lowest[self.unheld(d)] = 0
            out = np.add.outer(out, lowest).reshape(-1)
        return out

    def unheld(self, d: int) -> NDArray[np.bool_]:
        """Mark the cells of a dimension that no coordinates hold: fills inside of a split.

        Raises
        ------
        MismatchError
            One of them has an element.
        """
        held, dim = self.held[d], self.dims[d]
        out = np.ones(held.axis.ncells, dtype=bool)
        out[held.cells[1]] = False
        for cell in np.flatnonzero(out).tolist():
            start, size = held.axis.cell(cell)
            if any(isinstance(b, DimBox) for b in restrict(dim, start, start + size)):
                raise MismatchError(
                    "no rank holds a part of a tensor",
                    kind="lay-fit",
                    where=self.equation.text or str(self.equation.at),
                    found=f"entries [{start}, {start + size}) of dimension {d}",
                )
        return out
