"""Ranks that hold a cell (replicas), and which of them gives it to which rank (a hash).

In it: from how many ranks on arrays are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ckptd.lay.places import free_ranges
from ckptd.lay.resolve import Ints, MeshShape
from ckptd.lay.ruleform import RuleForm


@dataclass(frozen=True, eq=False)
class HolderSet:
    """Ranks: one of some numbers, plus any digits at some places.

    Attributes
    ----------
    numbers
        Without the free digits.
    free
        ``(stride, count)`` of digits that may be anything.
    """

    numbers: Ints
    free: tuple[tuple[int, int], ...]

    @cached_property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.numbers) * math.prod(n for _, n in self.free)

    @cached_property
    def first(self) -> int:
        """Lowest rank."""
        return int(self.numbers.min())

    def all(self) -> Ints:
        """Return all ranks, in no order."""
        return self.nth(np.arange(self.count, dtype=np.int64))

    def nth(self, which: Ints) -> Ints:
        """Return the ranks of some numbers below `count`."""
        which, at = np.divmod(which, len(self.numbers))
        ranks: Ints = self.numbers[at]
        for stride, n in self.free:
            which, digit = np.divmod(which, n)
            ranks = ranks + digit * stride
        return ranks

    def has(self, ranks: Ints) -> NDArray[np.bool_]:
        """Whether each of some ranks is one of them."""
        left = ranks
        for stride, n in self.free:
            left = left - ranks // stride % n * stride
        return np.isin(left, self.numbers)

    def nth_one(self, which: int) -> int:
        """Return the rank of one number below `count`, as `nth`."""
        which, at = divmod(which, len(self.numbers))
        rank = int(self.numbers[at])
        for stride, n in self.free:
            which, digit = divmod(which, n)
            rank += digit * stride
        return rank

    def has_one(self, rank: int) -> bool:
        """Whether a rank is one of them."""
        left = rank
        for stride, n in self.free:
            left -= rank // stride % n * stride
        return left in self._known

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self.numbers.tolist())


def holders_of(
    rule: RuleForm, indexes: tuple[int, ...], cell: Sequence[int], zero: Sequence[str]
) -> HolderSet:
    """Return the ranks that hold a cell of a tensor.

    Parameters
    ----------
    rule, indexes
        The tensor.
    cell
        Number of the cell in each dimension. Cells that no rank has (fills inside of a split)
        have no holders.
    zero
        Axes on which only coordinate 0 counts: those of flats and of averages.
    """
    axes = rule.axes | set(zero)
    free = free_ranges(rule.mesh, axes) if rule.plain else None
    if free is None:
        return HolderSet(_listed(rule, indexes, cell, zero), ())
    numbers = np.array([rule.base(indexes)], dtype=np.int64)
    for held, places, c in zip(rule.held, rule.places, cell, strict=True):
        numbers = np.add.outer(numbers, places.ranks[held.holders(c)]).reshape(-1)
    return HolderSet(numbers, tuple(free))


def _listed(
    rule: RuleForm, indexes: tuple[int, ...], cell: Sequence[int], zero: Sequence[str]
) -> Ints:
    """Look at all ranks: for meshes whose axes share digits of a rank's number."""
    mesh: MeshShape = rule.mesh
    wanted = rule.fixed(indexes) | dict(rule.on) | dict.fromkeys(zero, 0)
    ranks = np.arange(mesh.world, dtype=np.int64)
    keep = np.ones(mesh.world, dtype=bool)
    for axis, coordinate in wanted.items():
        if mesh.strides[axis]:
            keep &= ranks // mesh.strides[axis] % mesh.extents[axis] == coordinate
    found = []
    for rank in ranks[keep].tolist():
        who = rule.who(mesh.coordinates(rank))
        pairs = zip(rule.held, who, cell, strict=True)
        if all(i in held.holders(c) for held, i, c in pairs):
            found.append(rank)
    return np.array(found, dtype=np.int64)


def choose(holders: HolderSet, ranks: Ints, nearest: Ints, seed: Sequence[int]) -> Ints:
    """Return for each of some ranks which holder it takes a cell from.

    The nearest if it is one, else one by a hash of the rank's number and the cell: a pure
    function, so that the two sides of a transfer agree without a word, and the load is spread.

    Parameters
    ----------
    holders
        Which ranks have the cell.
    ranks
        Which ranks want it.
    nearest
        For each of them the rank that it would best take it from: itself, as numbers on either
        side mean the same process, or the one that leads its flat.
    seed
        What tells the cell from others.
    """
    if holders.count == 1:
        return np.full(len(ranks), holders.first, dtype=np.int64)
    prefix = 0
    for value in seed:
        prefix = _mixed(prefix ^ value)
    if len(ranks) <= _FEW:
        pairs = zip(ranks.tolist(), nearest.tolist(), strict=True)
        return np.array([_choose_one(holders, r, n, prefix) for r, n in pairs], dtype=np.int64)
    with np.errstate(over="ignore"):
        number = _all_mixed(ranks.astype(np.uint64) ^ np.uint64(prefix))
    which = (number % np.uint64(holders.count)).astype(np.int64)
    return np.where(holders.has(nearest), nearest, holders.nth(which))


_FEW = 16
"""Up to so many ranks plain integers are faster than arrays."""
_WORD = (1 << 64) - 1
_GAMMA, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _choose_one(holders: HolderSet, rank: int, nearest: int, prefix: int) -> int:
    if holders.has_one(nearest):
        return nearest
    return holders.nth_one(_mixed(prefix ^ rank) % holders.count)


def _mixed(number: int) -> int:
    """One step of splitmix64."""
    number = (number + _GAMMA) & _WORD
    number = ((number ^ (number >> 30)) * _MIX) & _WORD
    number = ((number ^ (number >> 27)) * _MIX_AGAIN) & _WORD
    return number ^ (number >> 31)


def _all_mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 for each of some numbers."""
    number = number + np.uint64(_GAMMA)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(_MIX)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    return number ^ (number >> np.uint64(31))
