"""Coordinates on some mesh axes, and the ranks that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from ckptd.errors import UsageError
from ckptd.lay.resolve import Axes, Ints, MeshShape


def apart(mesh: MeshShape, first: str, second: str) -> bool:
    """Whether two axes speak of different digits of a rank's number.

    The lowest rank with given coordinates on such axes is then the sum of what each adds.
    """
    a, b = mesh.strides[first], mesh.strides[second]
    end_a, end_b = a * mesh.extents[first], b * mesh.extents[second]
    if end_a == a or end_b == b or not a or not b:
        return True
    return b % end_a == 0 or a % end_b == 0


@dataclass(frozen=True, eq=False)
class MeshPositions:
    """All combinations of coordinates that ranks have on some mesh axes.

    Attributes
    ----------
    mesh
        The mesh.
    axes
        Rank axes of it.
    """

    mesh: MeshShape
    axes: Axes

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not self.mesh.strides.get(axis):
                raise UsageError(
                    f"a dimension is split over {axis}, which is not a rank axis of the mesh",
                    kind="lay-rule",
                )

    @cached_property
    def _numbers(self) -> tuple[Ints, Ints] | None:
        """Mixed-radix numbers of the combinations that exist and their lowest ranks; None: all."""
        if all(apart(self.mesh, a, b) for a, b in combinations(self.axes, 2)):
            return None
        numbers = np.zeros(self.mesh.world, dtype=np.int64)
        ranks = np.arange(self.mesh.world, dtype=np.int64)
        for axis in self.axes:
            extent = self.mesh.extents[axis]
            numbers = numbers * extent + ranks // self.mesh.strides[axis] % extent
        found, lowest = np.unique(numbers, return_index=True)
        return found, lowest.astype(np.int64)

    @cached_property
    def count(self) -> int:
        """Number of combinations."""
        if self._numbers is None:
            return math.prod(self.mesh.extents[a] for a in self.axes)
        return len(self._numbers[0])

    @cached_property
    def coordinates(self) -> dict[str, Ints]:
        """Coordinate on each axis, by combination."""
        left = np.arange(self.count) if self._numbers is None else self._numbers[0]
        out = {}
        for axis in reversed(self.axes):
            left, out[axis] = np.divmod(left, self.mesh.extents[axis])
        return out

    @cached_property
    def ranks(self) -> Ints:
        """Lowest rank of each combination."""
        if self._numbers is not None:
            return self._numbers[1]
        out = np.zeros(self.count, dtype=np.int64)
        for axis, found in self.coordinates.items():
            out += found * self.mesh.strides[axis]
        return out

    def index(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of the combination that a rank has."""
        number = 0
        for axis in self.axes:
            number = number * self.mesh.extents[axis] + coordinates[axis]
        if self._numbers is None:
            return number
        return int(np.searchsorted(self._numbers[0], number))

    def at(self, index: int) -> dict[str, int]:
        """Return the coordinates of a combination."""
        return {a: int(found[index]) for a, found in self.coordinates.items()}


def free_ranges(mesh: MeshShape, axes: Iterable[str]) -> list[tuple[int, int]] | None:
    """Return ``(stride, count)`` of the digits of a rank's number that no axis speaks of.

    None where the axes do not part the number into digits.
    """
    spans = sorted({(mesh.strides[a], mesh.strides[a] * mesh.extents[a]) for a in axes})
    out: list[tuple[int, int]] = []
    end = 1
    for lo, hi in spans:
        if lo < end:
            # Part of an axis that was here already, or one that goes on beyond it.
            if hi % end and end % hi:
                return None
            end = max(end, hi)
            continue
        if lo % end:
            return None
        if lo > end:
            out.append((end, lo // end))
        end = hi
    if mesh.world % end:
        return None
    if mesh.world > end:
        out.append((end, mesh.world // end))
    return out
