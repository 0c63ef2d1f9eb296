"""Which ranks hold one thing in common: found from all structures, name by name.

Ranks of one structure are alike, but a thing's holders are often more than those: pipeline stages
share an embedding, and a rank that keeps one value more than the others still trains the same
model. Names that the same ranks hold in the same way make one *kind*; ranks compare one digest a
kind, so that what is compared grows with the kinds (a few) and never with ranks times names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ckptd.engine.structure import Group, LocalTensor, mesh_array
from ckptd.errors import UsageError
from ckptd.format.digest import digest_hex

__all__ = ["Holders", "Shared"]

_Cut: TypeAlias = tuple[tuple[int, Any], ...]
"""How a tensor is cut: size and placement of each mesh dimension that cuts it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What ranks compare together.

    Attributes
    ----------
    key
        The same on all ranks that hold the same names, and the same part of each.
    first
        Whether this is the lowest of those ranks.
    alone
        Whether this is the only one.
    """

    key: str
    first: bool
    alone: bool


class Holders:
    """Finds, for each name of one rank, with which others it holds that name in common.

    Parameters
    ----------
    groups
        All structures of the job, in the order that all ranks have them.
    rank
        Whose names are looked up.

    Raises
    ------
    UsageError
        kind ``structure``: a tensor is cut in one way on some ranks and otherwise on others, so
        that nothing can be compared and one of them would be lost.
    """

    def __init__(self, groups: Sequence[Group], rank: int) -> None:
        self._groups = groups
        self._rank = rank
        self._own = next(i for i, g in enumerate(groups) if rank in g.ranks)
        # A kind is a chain: one link for each structure that has the name. Links are interned,
        # so that names which the same structures hold alike end at one link.
        self._links: dict[tuple[int, int, int, Any], int] = {}
        self._chain: list[tuple[int, int, int, Any]] = []
        self._meshes: dict[Any, int] = {}
        self._tensors: dict[str, int] = {}
        self._objects: dict[str, int] = {}
        self._own_values: set[str] = set()
        self._cuts: dict[tuple[int, Any], _Cut] = {}
        self._found: dict[tuple[str, int], Shared] = {}
        self._described: dict[int, list[tuple[int, int, Any]]] = {}
        first: dict[str, tuple[_Cut | None, int]] = {}
        for number, group in enumerate(groups):
            meshes = [self._meshes.setdefault(m, len(self._meshes)) for m in group.structure.meshes]
            for tensor in group.structure.tensors:
                mesh = meshes[tensor.mesh] if tensor.mesh >= 0 else -1
                placements = _hashable(tensor.placements)
                cut = self._cut(tensor, group, mesh, placements)
                seen = first.setdefault(tensor.name, (cut, number))
                if seen[0] != cut:
                    raise _cut_twice(tensor.name, groups, seen[1], number)
                if tensor.own:
                    self._own_values.add(tensor.name)
                before = self._tensors.get(tensor.name, -1)
                self._tensors[tensor.name] = self._link(before, number, mesh, placements)
            for name in group.structure.objects:
                before = self._objects.get(name, -1)
                self._objects[name] = self._link(before, number, -1, ())

    def _link(self, before: int, group: int, mesh: int, placements: Any) -> int:
        link = (before, group, mesh, placements)
        number = self._links.setdefault(link, len(self._links))
        if number == len(self._chain):
            self._chain.append(link)
        return number

    def _cut(self, tensor: LocalTensor, group: Group, mesh: int, placements: Any) -> _Cut | None:
        if tensor.grid >= 0:
            return None  # a layout says which part of it a rank holds
        if mesh < 0:
            return ()
        found = self._cuts.get((mesh, placements))
        if found is None:
            shape = group.structure.meshes[tensor.mesh].shape
            found = self._cuts[mesh, placements] = tuple(
                (n, p) for n, p in zip(shape, placements, strict=True) if n > 1 and p != "replicate"
            )
        return found

    # -- what is asked ---------------------------------------------------------------------------

    def tensor(self, name: str) -> Shared:
        """Return with whom this rank compares a tensor that it has."""
        if name in self._own_values:
            return Shared("own", False, True)
        return self._shared("tensor", self._tensors[name])

    def object(self, name: str) -> Shared:
        """Return with whom this rank compares a replicated object that it has."""
        return self._shared("object", self._objects[name])

    @property
    def alike(self) -> Shared:
        """The ranks of this rank's structure."""
        ranks = self._groups[self._own].ranks
        return Shared(f"alike:{self._own}", ranks[0] == self._rank, len(ranks) == 1)

    def _shared(self, what: str, kind: int) -> Shared:
        found = self._found.get((what, kind))
        if found is None:
            found = self._found[what, kind] = self._find(what, kind)
        return found

    def _find(self, what: str, kind: int) -> Shared:
        links = self._links_of(kind)
        mesh, placements = next((m, p) for g, m, p in links if g == self._own)
        at: tuple[int, ...] = ()
        if mesh >= 0:
            at = self._coordinates(mesh, placements, self._rank)
        count, lowest = 0, self._rank
        by_mesh: dict[tuple[int, Any], list[int]] = {}
        for group, number, placed in links:
            by_mesh.setdefault((number, placed), []).append(group)
        for (number, placed), members in by_mesh.items():
            ranks = self._ranks(members)
            if number >= 0:
                ranks = np.intersect1d(ranks, self._slice(number, placed, at))
            count += len(ranks)
            lowest = min(lowest, int(ranks.min())) if len(ranks) else lowest
        kept = [(g, m, repr(p)) for g, m, p in links]
        name = digest_hex(repr((kept, at)).encode())[:16]
        return Shared(f"{what}:{name}", lowest == self._rank, count <= 1)

    def _links_of(self, kind: int) -> list[tuple[int, int, Any]]:
        if kind not in self._described:
            links, at = [], kind
            while at >= 0:
                at, group, mesh, placements = self._chain[at]
                links.append((group, mesh, placements))
            self._described[kind] = links[::-1]
        return self._described[kind]

    def _ranks(self, groups: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.concatenate([np.asarray(self._groups[g].ranks, np.int64) for g in groups])

    def _array(self, mesh: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return mesh_array(next(m for m, n in self._meshes.items() if n == mesh))

    def _axes(self, mesh: int, placements: Any) -> list[int]:
        shape = self._array(mesh).shape
        return [
            axis
            for axis, (n, p) in enumerate(zip(shape, placements, strict=True))
            if n > 1 and p != "replicate"
        ]

    def _coordinates(self, mesh: int, placements: Any, rank: int) -> tuple[int, ...]:
        """Return where a rank is on the dimensions that cut a tensor."""
        array = self._array(mesh)
        at = np.unravel_index(int(np.flatnonzero(array.reshape(-1) == rank)[0]), array.shape)
        return tuple(int(at[axis]) for axis in self._axes(mesh, placements))

    def _slice(
        self, mesh: int, placements: Any, at: tuple[int, ...]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the ranks of a mesh at these places on the dimensions that cut a tensor."""
        index: list[Any] = [slice(None)] * self._array(mesh).ndim
        for axis, where in zip(self._axes(mesh, placements), at, strict=True):
            index[axis] = where
        return np.atleast_1d(self._array(mesh)[tuple(index)]).reshape(-1)


def _hashable(placements: Sequence[Any]) -> tuple[Any, ...]:
    """JSON turns tuples into lists."""
    return tuple(p if isinstance(p, str) else tuple(p) for p in placements)


def _cut_twice(name: str, groups: Sequence[Group], one: int, other: int) -> UsageError:
    def told(number: int) -> str:
        tensor = next(t for t in groups[number].structure.tensors if t.name == name)
        if tensor.grid >= 0:
            how = "cut by the layout"
        elif tensor.mesh < 0:
            how = "a plain tensor"
        else:
            mesh = groups[number].structure.meshes[tensor.mesh]
            how = f"{list(tensor.placements)} on a mesh {list(mesh.shape)}"
        return f"{how} on rank {groups[number].ranks[0]}"

    return UsageError(
        "ranks disagree on how a tensor is cut",
        kind="structure",
        where=name,
        wanted=told(one),
        found=told(other),
        hint="one of them would be saved and the others lost: give tensors of different stages "
        "different names, or cut them alike; with a layout, every rank gives the same one",
    )
