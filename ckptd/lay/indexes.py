"""Numbers in names (``{l@pp}``): which a rank has, local and global ones; writes names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from ckptd.errors import MismatchError, UsageError
from ckptd.lay.held import held
from ckptd.lay.resolve import Resolved, ValueScope, stage_parts
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Assigned, Atom, Dim, Glob, Name, NameIndex, Split, Text

BUFFER = "buffer"
"""Index in the name of buffers that represents the number of a buffer on its rank."""


@dataclass(frozen=True)
class IndexCut:
    """How the numbers of an index are dealt to the coordinates of mesh axes.

    Attributes
    ----------
    size
        How many numbers there are.
    axes
        The mesh axes, outermost first; none: every rank has all numbers.
    extents
        Their extents.
    starts
        Row-major over `axes`: the first number of each combination, and `size` at the end.
    dealt
        The numbers of each combination, where they do not follow each other; `starts` is empty
        then.
    """

    size: int
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    starts: tuple[int, ...]
    dealt: tuple[tuple[int, ...], ...] = ()

    def coordinates(self, number: int) -> Mapping[str, int]:
        """Return the coordinates that a number lies at."""
        found = self._coordinates.get(number)
        if found is None:
            found = self._coordinates[number] = self._find(number)
        return found

    @cached_property
    def _coordinates(self) -> dict[int, Mapping[str, int]]:
        return {}

    def _find(self, number: int) -> Mapping[str, int]:
        if self.dealt:
            at = self._combinations[number]
        else:
            # The last combination that starts there: the ones before it are empty.
            at = bisect_right(self.starts, number, 0, len(self.starts) - 1) - 1
        out = {}
        for axis, extent in zip(reversed(self.axes), reversed(self.extents), strict=True):
            at, out[axis] = divmod(at, extent)
        return out

    @cached_property
    def _combinations(self) -> dict[int, int]:
        return {n: at for at, numbers in enumerate(self.dealt) for n in numbers}

    def number(self, local: int, coordinates: Mapping[str, int]) -> int:
        """Return the number that is the `local`-th at some coordinates; of none, a higher one."""
        at = self._at(coordinates)
        if not self.dealt:
            return self.starts[at] + local
        mine = self.dealt[at]
        return mine[local] if local < len(mine) else self.size + local

    def local(self, number: int, coordinates: Mapping[str, int]) -> int:
        """Return which one a number is at the coordinates that it lies at."""
        at = self._at(coordinates)
        return self.dealt[at].index(number) if self.dealt else number - self.starts[at]

    def numbers(self, coordinates: Mapping[str, int]) -> Sequence[int]:
        """Return all numbers at some coordinates, which must speak of all axes."""
        at = self._at(coordinates)
        return self.dealt[at] if self.dealt else range(self.starts[at], self.starts[at + 1])

    def all_numbers(self, coordinates: Mapping[str, int]) -> list[int]:
        """Return all numbers at some coordinates; axes that they leave out have any coordinate."""
        choices = [
            [coordinates[a]] if a in coordinates else range(n)
            for a, n in zip(self.axes, self.extents, strict=True)
        ]
        found = (self.numbers(dict(zip(self.axes, c, strict=True))) for c in product(*choices))
        return [n for numbers in found for n in numbers]

    def _at(self, coordinates: Mapping[str, int]) -> int:
        at = 0
        for axis, extent in zip(self.axes, self.extents, strict=True):
            at = at * extent + coordinates[axis]
        return at


def index_cut(layout: Resolved, index: NameIndex, scope: ValueScope) -> IndexCut:
    """Return how an index is cut: as a ``pipe`` over its mesh axes says, or as it says itself.

    Raises
    ------
    MismatchError
        A stage string has another number of layers, or a split does not divide.
    UsageError
        A size or a mesh axis is not known.
    """
    size = scope.size(index.axis)
    said = tuple(axis for axis, _ in index.splits)
    pipe = next((p for p in layout.pipes if (p.axis, p.splits) == (index.axis, said)), None)
    if pipe is not None and layout.mesh is not None:
        stages = stage_parts(pipe, layout.mesh)
        total = sum(s.size for s in stages)
        if total != size:
            raise MismatchError(
                "a stage string has another number of layers than the model",
                kind="lay-fit",
                where=f'pipe {pipe.axis} "{pipe.stages[:200]}"',
                wanted=f"{index.axis} = {size}",
                found=total,
            )
        starts = tuple(s.start for s in stages)
        extents = tuple(scope.extent(a) for a in pipe.splits)
        return IndexCut(size, pipe.splits, extents, (*starts, size))
    if not said:
        return IndexCut(size, (), (), (0, size))
    dim: Dim = Atom(index.axis)
    for axis, how in index.splits:
        dim = Split(dim, axis, how)
    return _from_split(dim, index, size, scope)


def _from_split(dim: Dim, index: NameIndex, size: int, scope: ValueScope) -> IndexCut:
    axes = tuple(axis for axis, _ in index.splits)
    extents = tuple(scope.extent(a) for a in axes)
    count = int(np.prod(extents))
    found = np.unravel_index(np.arange(count), extents)
    coordinates = {a: c.astype(np.int64) for a, c in zip(axes, found, strict=True)}
    parts = held(dim, scope, coordinates, count)
    if any(isinstance(how, Assigned) for _, how in index.splits):
        dealt: list[list[int]] = [[] for _ in range(count)]
        for who, start, n in zip(parts.who, parts.stored, parts.size, strict=True):
            dealt[who] += range(start, start + n)
        return IndexCut(size, axes, extents, (), tuple(map(tuple, dealt)))
    # Every other split takes a contiguous part in the order of coordinates, so the parts follow
    # each other.
    starts = (np.cumsum(parts.lengths) - parts.lengths).tolist()
    return IndexCut(size, axes, extents, (*starts, size))


def write_name(name: Name, numbers: Mapping[str, int]) -> str:
    """Write a name.

    Parameters
    ----------
    name
        The pattern.
    numbers
        What represents each index.

    Raises
    ------
    UsageError
        A glob is left in it, or nothing represents an index.
    """
    return "".join(_written(part, name, numbers) for part in name.parts)


def _written(part: object, name: Name, numbers: Mapping[str, int]) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, NameIndex) and part.axis in numbers:
        return str(numbers[part.axis]).zfill(part.width)
    if isinstance(part, Glob):
        raise UsageError(
            "a name with globs cannot name one tensor", kind="lay-rule", found=name.parts
        )
    raise UsageError(
        "an index of a name has no value",
        kind="lay-rule",
        where=show(name),
        wanted="an axis of the tensor, or a mesh axis that the rule is cut over",
        found=show(part) if isinstance(part, NameIndex) else part,
    )
