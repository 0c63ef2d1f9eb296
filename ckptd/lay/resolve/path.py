"""Tag paths: ways through the sums of a rule, each to one logical tensor; limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.errors import UsageError
from ckptd.lay.resolve.equation import Tags
from ckptd.lay.syntax.tree import Atom, Dim, Pad, Product, Split, Sum

_MAX_PATHS = 4096
_MAX_LEAVES = 262_144


@dataclass(frozen=True, slots=True)
class Leaf:
    """An atom on a way, and the dimension that it stands in."""

    atom: str
    dim: int


@dataclass(frozen=True, slots=True)
class Path:
    """One way.

    Attributes
    ----------
    tags
        Of the sums on the way, outermost and leftmost first.
    leaves
        Atoms, in textual order.
    splits
        ``(dimension, split)`` for each split on the way.
    """

    tags: Tags = ()
    leaves: tuple[Leaf, ...] = ()
    splits: tuple[tuple[int, Split], ...] = ()

    def __add__(self, other: Path) -> Path:
        return Path(self.tags + other.tags, self.leaves + other.leaves, self.splits + other.splits)


def paths(dims: Sequence[Dim]) -> tuple[Path, ...]:
    """Return all ways through the dimensions of a rule; one, if there is no sum.

    Raises
    ------
    UsageError
        ``lay-rule``: there are absurdly many.
    """
    found = [Path()]
    for k, dim in enumerate(dims):
        found = _both(found, _paths(dim, k))
    return tuple(found)


def _paths(dim: Dim, k: int) -> list[Path]:
    match dim:
        case Atom():
            return [Path(leaves=(Leaf(dim.name, k),))]
        case Split():
            return [Path(splits=((k, dim),)) + p for p in _paths(dim.inner, k)]
        case Pad():
            return _paths(dim.inner, k)
        case Sum():
            return [Path((b.tag,)) + p for b in dim.branches for p in _paths(b.dim, k)]
        case Product():
            found = [Path()]
            for part in dim.parts:
                found = _both(found, _paths(part, k))
            return found
    return [Path()]


def _both(left: list[Path], right: list[Path]) -> list[Path]:
    ways = len(left) * len(right)
    longest = max((len(p.leaves) for p in (*left[:1], *right[:1])), default=0)
    if ways > _MAX_PATHS or ways * longest > _MAX_LEAVES:
        raise UsageError(
            f"more than {_MAX_PATHS} ways through the sums of one rule", kind="lay-rule"
        )
    return [a + b for a in left for b in right]
