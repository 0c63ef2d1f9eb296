"""`Structure` and `SavePlan`: which rank writes which piece, balance, replicas, conflicts.

In it: size from which on a tensor that all hold is split.

Every rank describes its own state; ranks with the same description form a *group* (data-parallel
and tensor-parallel ranks describe meshes, so they are alike; pipeline stages differ). From all
distinct descriptions each rank computes the same `SavePlan`: no rank plans for others, nothing
is gathered but one digest a rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import digest_hex
from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import Axis
from ckptd.base.grids.owners import Owners
from ckptd.base.grids.sharding import nested, owner_array, sharded_grid
from ckptd.base.grouping import by_key
from ckptd.base.runtime.pauses import no_collection
from ckptd.checkpoint.format.container import ChunkRef, FileMap, encode_entries
from ckptd.checkpoint.format.manifest import (
    INLINE_BYTES,
    GridEntry,
    ManifestTables,
    MeshEntry,
    Runs3,
    TensorEntry,
    in_one_piece,
)
from ckptd.checkpoint.format.witness import WitnessPlan, gather
from ckptd.decoding import json_decoder
from ckptd.errors import UsageError
from ckptd.types import dtype_of

SPLIT_BYTES = 4 << 20
"""Replicated tensors below this size are written by one rank whole."""


class TensorCut(msgspec.Struct, frozen=True):
    """How a tensor lies over the ranks that have it; without arguments each of them has it whole.

    Attributes
    ----------
    mesh, placements
        Of a DTensor; one placement for each mesh dimension, see `ckptd.base.grids.sharding`.
    grid, owners
        Of a tensor that a layout program describes.
    """

    mesh: MeshEntry | None = None
    placements: tuple[Literal["replicate"] | tuple[Any, ...], ...] = ()
    grid: GridEntry | None = None
    owners: Runs3 = ()


class Structure(msgspec.Struct, frozen=True):
    """A rank's description of its state; equal on all ranks that hold alike things.

    Attributes
    ----------
    tensors
        As they will stand in the manifest, but that `TensorEntry.grid` is a number in `cuts`.
        `TensorEntry.base` is added to the owners that a layout says.
    cuts
        How the tensors lie over the ranks, each stored once.
    objects
        Names of the replicated objects; their values change from save to save and are not part of
        the structure.
    own
        Names of plain tensors of which each rank may have values of its own: those of the lowest
        rank are saved.
    lay
        The layout program that describes some of the tensors, or empty.
    """

    tensors: tuple[TensorEntry, ...] = ()
    cuts: tuple[TensorCut, ...] = ()
    objects: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    lay: str = ""

    @staticmethod
    def of(
        tensors: Iterable[tuple[TensorEntry, TensorCut]],
        objects: tuple[str, ...] = (),
        own: tuple[str, ...] = (),
        lay: str = "",
    ) -> Structure:
        """Return the structure of tensors that come each with its cut."""
        cuts: dict[TensorCut, int] = {}
        numbered = [
            msgspec.structs.replace(t, grid=cuts.setdefault(c, len(cuts))) for t, c in tensors
        ]
        return Structure(tuple(numbered), tuple(cuts), objects, own, lay)

    def encode(self) -> bytes:
        """Return canonical JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(raw: bytes) -> Structure:
        """Invert `encode`; msgspec errors when `raw` is something else."""
        return _structures.decode(raw)


_structures = json_decoder(Structure)


class RankGroup(msgspec.Struct, frozen=True):
    """The ranks that share one structure, rising."""

    structure: Structure
    ranks: tuple[int, ...]


class SavePlan(msgspec.Struct, frozen=True, dict=True):
    """The tables of the coming manifest, identical on every rank; file number is rank.

    Attributes
    ----------
    leaders
        Lowest rank of each group of alike ranks: it reports the group's objects.
    homes
        For each replicated object the rank that stores it when it is too large for the manifest.
    lay
        The program of the layout that described tensors, or empty.
    digest
        Names the plan: a rank that reports another one has a different idea of the state.
    """

    world: int
    grids: tuple[GridEntry, ...]
    owners: tuple[Runs3, ...]
    tensors: tuple[TensorEntry, ...]
    meshes: tuple[MeshEntry, ...]
    leaders: tuple[int, ...] = (0,)
    homes: dict[str, int] = {}
    lay: str = ""
    digest: str = ""

    @cached_property
    def filemap(self) -> FileMap:
        """The byte ranges that follow from the tables."""
        return FileMap(self.tensors, [g.grid for g in self.grids], [Owners(r) for r in self.owners])

    @cached_property
    def witness(self) -> WitnessPlan:
        """Which values of its tensors the witness has."""
        return WitnessPlan.over(self.tensors)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max((_nbytes(t.shape, t.dtype) for t in self.tensors), default=0)

    def stamped(self) -> SavePlan:
        """Return the plan with its digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(bare, digest=digest_hex(msgspec.json.encode(bare)))


class _Balance:
    """Deterministic longest-processing-time assignment of pieces to ranks."""

    def __init__(self, world: int) -> None:
        self.load = [0] * world
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def least(self, candidates: tuple[int, ...], nbytes: int) -> int:
        """Give a piece to the least loaded candidate and return it."""
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = self._heaps[candidates] = [(self.load[r], r) for r in candidates]
            heapq.heapify(heap)
        # Loads grow through other groups as well: refresh stale tops before using one.
        while heap[0][0] != self.load[heap[0][1]]:
            heapq.heapreplace(heap, (self.load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self.load[rank] += nbytes
        heapq.heapreplace(heap, (self.load[rank], rank))
        return rank


@no_collection()
def build_plan(groups: Sequence[RankGroup], world: int) -> SavePlan:
    """Decide which rank writes what, from every distinct structure of the job.

    A pure function: all ranks call it with the same arguments and get the same plan. Replicated
    tensors are spread over their holders by bytes, large ones cut along their first dimension,
    so that no rank writes what it holds in common with others more than its share.

    Raises
    ------
    UsageError
        kind ``structure``: ranks disagree on dtype or shape of a tensor.
    """
    merged = _merge(groups)
    tables, balance = ManifestTables(), _Balance(world)
    placing = _Placing(tables, balance)
    entries: dict[str, TensorEntry] = {}
    plain: list[tuple[TensorEntry, tuple[int, ...]]] = []
    own = {name for group in groups for name in group.structure.own}
    for name, (tensor, cut, ranks) in merged.items():
        if cut.grid is None and cut.mesh is None:
            # One rank's alone: pieces of several ranks would be a mixture.
            plain.append((tensor, ranks[:1] if name in own else ranks))
        else:
            numbers = placing.place(tensor, cut, ranks)
            entries[name] = TensorEntry(name, tensor.dtype, tensor.shape, *numbers, tensor.aliases)
    # Big pieces first: that is what makes the greedy assignment a good one.
    sizes = [_nbytes(t.shape, t.dtype) for t, _ in plain]
    share = max(SPLIT_BYTES, sum(sizes) // max(1, world))
    row_cut = cache(partial(_row_cut, tables, share))
    rows = [row_cut(t.shape, n, len(r)) for (t, r), n in zip(plain, sizes, strict=True)]
    owners = _assign(plain, sizes, [counts for _, counts in rows], balance)
    placed = cache(lambda files: tables.placed(np.array(files)))
    for (t, _), (grid, _), files in zip(plain, rows, owners, strict=True):
        entries[t.name] = TensorEntry(t.name, t.dtype, t.shape, grid, *placed(files), t.aliases)
    meshes = {c.mesh: None for g in groups for c in g.structure.cuts if c.mesh is not None}
    homes: dict[str, int] = {}
    for group in groups:
        for name in group.structure.objects:
            homes[name] = min(homes.get(name, group.ranks[0]), group.ranks[0])
    return SavePlan(
        world=world,
        grids=tables.grids,
        owners=tables.owners,
        tensors=tuple([entries[name] for name in merged]),
        meshes=tuple(meshes)[:64],
        leaders=tuple(g.ranks[0] for g in groups),
        homes=homes,
        lay=_lay(groups),
    ).stamped()


@lru_cache(maxsize=4096)
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtype_of(dtype).itemsize


def _lay(groups: Sequence[RankGroup]) -> str:
    """Return the one layout program of all ranks."""
    first = groups[0].structure.lay
    other = next((g for g in groups if g.structure.lay != first), None)
    if other is not None:
        raise UsageError(
            "ranks have different layout programs",
            kind="structure",
            wanted=f"the program of rank {groups[0].ranks[0]} on every rank",
            found=f"another one on rank {other.ranks[0]}",
        )
    return first


def _merge(
    groups: Sequence[RankGroup],
) -> dict[str, tuple[TensorEntry, TensorCut, tuple[int, ...]]]:
    """Join the groups' tensors by name, in order of first appearance."""
    if len(groups) == 1:  # nobody disagrees with anybody
        structure, all_ranks = groups[0].structure, tuple(sorted(groups[0].ranks))
        one = {t.name: (t, structure.cuts[t.grid], all_ranks) for t in structure.tensors}
        if len(one) == len(structure.tensors):
            _check_meanings(groups, one, {t.name: t.aliases for t in structure.tensors})
            return one
    merged: dict[str, tuple[TensorEntry, TensorCut]] = {}
    holding: dict[str, list[int]] = {}
    aliases: dict[str, list[str]] = {}
    for number, group in enumerate(groups):
        for tensor in group.structure.tensors:
            cut = group.structure.cuts[tensor.grid]
            known = aliases.setdefault(tensor.name, [])
            if tensor.aliases:
                known += [a for a in tensor.aliases if a not in known]
            seen = merged.get(tensor.name)
            if seen is None:
                merged[tensor.name], holding[tensor.name] = (tensor, cut), [number]
                continue
            if (seen[0].dtype, seen[0].shape) != (tensor.dtype, tensor.shape):
                first = groups[holding[tensor.name][0]].ranks[0]
                raise UsageError(
                    "ranks disagree on a tensor",
                    kind="structure",
                    where=tensor.name,
                    wanted=f"{seen[0].dtype}{list(seen[0].shape)} as on rank {first}",
                    found=f"{tensor.dtype}{list(tensor.shape)} on rank {group.ranks[0]}",
                    hint="declare values that differ per rank with ckptd.PerRank, or give tensors "
                    "of different stages different names",
                )
            if (seen[1], seen[0].base) == (cut, tensor.base):
                holding[tensor.name].append(number)
            elif seen[1].grid is not None or cut.grid is not None:
                raise _cut_twice(tensor.name, groups, holding[tensor.name][0], number)
    _check_meanings(groups, merged, aliases)
    # Thousands of names have the same holders: their ranks are joined once.
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
    out: dict[str, tuple[TensorEntry, TensorCut, tuple[int, ...]]] = {}
    for name, (tensor, cut) in merged.items():
        key = tuple(holding[name])
        if key not in ranks:
            ranks[key] = tuple(sorted(r for i in key for r in groups[i].ranks))
        if len(aliases[name]) != len(tensor.aliases):
            tensor = msgspec.structs.replace(tensor, aliases=tuple(aliases[name]))
        out[name] = (tensor, cut, ranks[key])
    return out


def _check_meanings(
    groups: Sequence[RankGroup], tensors: Mapping[str, object], aliases: Mapping[str, Sequence[str]]
) -> None:
    """Raise `UsageError` where a name is one thing on one rank and another elsewhere.

    A checkpoint could hold both, and a load would have to pick: one of them would be lost.
    """
    first: dict[str, str] = {}
    for name, others in aliases.items():
        for alias in others:
            if alias in tensors or first.setdefault(alias, name) != name:
                raise _two_meanings(groups, alias)
    for group in groups:
        for name in group.structure.objects:
            if name in tensors or name in first:
                raise _two_meanings(groups, name)


def _two_meanings(groups: Sequence[RankGroup], name: str) -> UsageError:
    """Say what each of two ranks has under a name."""
    found: dict[str, int] = {}
    for group in groups:
        structure = group.structure
        for tensor in structure.tensors:
            if tensor.name == name:
                found.setdefault("a separate tensor", group.ranks[0])
            elif name in tensor.aliases:
                found.setdefault(f"another name of {tensor.name}", group.ranks[0])
        if name in structure.objects:
            found.setdefault("a value", group.ranks[0])
    meanings = [f"{what} on rank {rank}" for what, rank in found.items()]
    return UsageError(
        "a name means different things on different ranks",
        kind="structure",
        where=name,
        wanted=meanings[0],
        found="; ".join(meanings[1:]),
        hint="every rank must have the same under one name: a tensor (torch.as_tensor(value)) or a "
        "value (tensor.item()) on all ranks, tied on all or on none; ckptd.PerRank(value, "
        "on_change=...) on all ranks holds what differs",
    )


def _laid_owners(tensor: TensorEntry, owners: Runs3, holders: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the writers of the pieces of a tensor whose pieces and owners a layout says."""
    files = Owners(owners).array(tensor.base)
    lacking = set(files.tolist()) - set(holders)
    if lacking:
        raise UsageError(
            "a rank lacks a tensor that the layout places on it",
            kind="structure",
            where=tensor.name,
            wanted=f"the tensor on rank {min(lacking)} as well",
            found=f"ranks {list(holders[:16])} have it",
        )
    return files


_Placed: TypeAlias = tuple[tuple[int, int, int], list[int]]
"""Numbers of a grid and of its owners, and their base; then the writers, where counted."""


class _Placing:
    """Places tensors that are cut over ranks; what alike ones have in common is looked up once.

    It follows from shape, cut, base and holders, and from which copy of the shards is written.
    """

    def __init__(self, tables: ManifestTables, balance: _Balance) -> None:
        self._tables = tables
        self._balance = balance
        self._known: dict[Any, _Placed | None] = {}
        self._written: dict[tuple[int, ...], list[int]] = {}
        """Bytes of each copy of the shards, for each form of a mesh with copies."""

    def place(
        self, tensor: TensorEntry, cut: TensorCut, holders: tuple[int, ...]
    ) -> tuple[int, int, int]:
        """Return the numbers of a tensor's grid and owners, and their base."""
        sizes, free, count = _copies(cut)
        written = self._written.setdefault((*sizes, -1, *free), [0] * count)
        # Copies of one shard lie on the replicated dimensions; the copy that has written least so
        # far writes this tensor. Not every coordinate is a copy: a mesh may have a pipeline
        # dimension, and the tensor only one stage.
        for pick in sorted(range(len(written)), key=written.__getitem__):
            # By id: `_merge` has one tuple for the same holders, and that of a large job is long.
            key = pick, tensor.shape, tensor.base, cut, id(holders)
            if key not in self._known:
                self._known[key] = self._look(tensor, cut, holders, pick)
            if (found := self._known[key]) is not None:
                nbytes = _nbytes(tensor.shape, tensor.dtype)
                written[pick] += max(1, nbytes)
                for rank in found[1]:
                    self._balance.load[rank] += nbytes // len(found[1])
                return found[0]
        raise UsageError(
            "the ranks do not hold this tensor completely",
            kind="structure",
            where=tensor.name,
            wanted=f"every shard on the mesh {cut.mesh and cut.mesh.names} {list(sizes)}",
            found=f"the tensor on ranks {list(holders[:16])} only",
        )

    def _look(
        self, tensor: TensorEntry, cut: TensorCut, holders: tuple[int, ...], pick: int
    ) -> _Placed | None:
        """Place one copy of the shards; None where some are with ranks that lack the tensor."""
        if cut.mesh is None or cut.grid is not None:
            grid = (cut.grid or GridEntry(())).grid
            files = _laid_owners(tensor, cut.owners, holders)
        else:
            shape, ranks = cut.mesh.shape, mesh_array(cut.mesh)
            placements = nested(shape, cut.placements) or cut.placements
            grid = sharded_grid(tensor.shape, shape, placements).grid
            free, coordinate = _copies(cut)[1], [0] * len(shape)
            at = np.unravel_index(pick, [shape[i] for i in free]) if free else ()
            for axis, value in zip(free, at, strict=True):
                coordinate[axis] = int(value)
            files = owner_array(tensor.shape, shape, placements, ranks, coordinate)
            if len(holders) != ranks.size and not set(files.tolist()) <= set(holders):
                return None
        numbers = self._tables.grid(GridEntry.of(grid)), *self._tables.placed(files)
        # A large job needs no count of what is cut over its ranks already.
        return numbers, files.tolist() if len(files) <= 64 else []


@lru_cache(maxsize=1024)
def _copies(cut: TensorCut) -> tuple[tuple[int, ...], list[int], int]:
    """Return the sizes of a mesh, on which dimensions copies of one shard lie, and their number."""
    sizes = () if cut.mesh is None or cut.grid is not None else cut.mesh.shape
    free = [i for i, n in enumerate(sizes) if n > 1 and cut.placements[i] == "replicate"]
    return sizes, free, math.prod([sizes[i] for i in free])


def mesh_array(mesh: MeshEntry) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ranks of a mesh in its shape."""
    return Owners(mesh.ranks).array().reshape(mesh.shape)


def _row_cut(
    tables: ManifestTables, share: int, shape: tuple[int, ...], nbytes: int, holders: int
) -> tuple[int, list[int]]:
    """Cut what several ranks hold along its rows, into pieces of about `share` bytes.

    Returns the number of the grid, and the rows of each piece.
    """
    if not shape:
        return tables.grid(GridEntry(())), [1]
    parts = min(holders, shape[0], -(-nbytes // share))
    cut = Axis(((shape[0], 1),))
    if parts > 1 and 0 not in shape:
        small, extra = divmod(shape[0], parts)
        cut = Axis.from_sizes([small + 1] * extra + [small] * (parts - extra))
    inner = [((n, 1),) for n in shape[1:]]
    return tables.grid(GridEntry((cut.runs, *inner))), list(cut.sizes())


def _assign(
    plain: Sequence[tuple[TensorEntry, tuple[int, ...]]],
    sizes: Sequence[int],
    rows: Sequence[list[int]],
    balance: _Balance,
) -> list[tuple[int, ...]]:
    """Return which rank writes each piece of each tensor."""
    if len(balance.load) == 1:
        return [(0,) * len(counts) for counts in rows]
    todo = []
    for order, (nbytes, counts) in enumerate(zip(sizes, rows, strict=True)):
        row_bytes = nbytes // max(1, sum(counts))
        for piece, n in enumerate(counts):
            todo.append((-n * row_bytes, order, piece))
    owners = [[0] * len(counts) for counts in rows]
    for negative, order, piece in sorted(todo):
        owners[order][piece] = balance.least(plain[order][1], -negative)
    return [*map(tuple, owners)]


_Cut: TypeAlias = tuple[tuple[int, Any], ...]
"""How a tensor is cut: size and placement of each mesh dimension that cuts it."""


def _part_of(cut: TensorCut) -> _Cut | None:
    if cut.grid is not None:
        return None  # a layout says which part of it a rank holds
    sizes = () if cut.mesh is None else cut.mesh.shape
    placed = zip(sizes, cut.placements, strict=True)
    return tuple((n, p) for n, p in placed if n > 1 and p != "replicate")


class Shared(msgspec.Struct, frozen=True):
    """A group of ranks that hold the same parts of tensors, and compare them.

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


class ReplicaHolders:
    """Finds, for each name of one rank, with which others it holds that name in common.

    Parameters
    ----------
    groups
        All structures of the job, in the order that all ranks have them.
    rank
        The rank whose names are looked up.

    Raises
    ------
    UsageError
        kind ``structure``: a tensor is cut in one way on some ranks and otherwise on others, so
        that nothing can be compared and one of them would be lost.
    """

    def __init__(self, groups: Sequence[RankGroup], rank: int) -> None:
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
        self._found: dict[tuple[str, int], Shared] = {}
        self._described: dict[int, list[tuple[int, int, Any]]] = {}
        first: dict[str, tuple[_Cut | None, int]] = {}
        for number, group in enumerate(groups):
            self._own_values.update(group.structure.own)
            meshes = [self._mesh(cut) for cut in group.structure.cuts]
            parts = [_part_of(cut) for cut in group.structure.cuts]
            for tensor in group.structure.tensors:
                part = parts[tensor.grid]
                seen = first.setdefault(tensor.name, (part, number))
                if seen[0] != part:
                    raise _cut_twice(tensor.name, groups, seen[1], number)
                before = self._tensors.get(tensor.name, -1)
                placements = group.structure.cuts[tensor.grid].placements
                link = self._link(before, number, meshes[tensor.grid], placements)
                self._tensors[tensor.name] = link
            for name in group.structure.objects:
                before = self._objects.get(name, -1)
                self._objects[name] = self._link(before, number, -1, ())

    def _link(self, before: int, group: int, mesh: int, placements: Any) -> int:
        link = (before, group, mesh, placements)
        number = self._links.setdefault(link, len(self._links))
        if number == len(self._chain):
            self._chain.append(link)
        return number

    def _mesh(self, cut: TensorCut) -> int:
        return -1 if cut.mesh is None else self._meshes.setdefault(cut.mesh, len(self._meshes))

    # -- what is asked ---------------------------------------------------------------------------

    def tensor(self, name: str) -> Shared:
        """Return the group of ranks with which this rank compares a tensor that it has."""
        if name in self._own_values:
            return Shared("own", False, True)
        return self._shared("tensor", self._tensors[name])

    def object(self, name: str) -> Shared:
        """Return the group of ranks with which this rank compares a replicated object."""
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
        by_mesh = by_key(((number, placed), group) for group, number, placed in links)
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
        return [i for i, n in enumerate(shape) if n > 1 and placements[i] != "replicate"]

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


def _cut_twice(name: str, groups: Sequence[RankGroup], one: int, other: int) -> UsageError:
    def held(number: int) -> str:
        structure = groups[number].structure
        cut = structure.cuts[next(t.grid for t in structure.tensors if t.name == name)]
        if cut.grid is not None:
            how = "cut by the layout"
        elif cut.mesh is None:
            how = "a plain tensor"
        else:
            how = f"{list(cut.placements)} on a mesh {list(cut.mesh.shape)}"
        return f"{how} on rank {groups[number].ranks[0]}"

    return UsageError(
        "ranks disagree on how a tensor is cut",
        kind="structure",
        where=name,
        wanted=held(one),
        found=held(other),
        hint="only one of them would be saved: give tensors of different stages "
        "different names, or cut them alike; with a layout, every rank gives the same one",
    )


class RankPlan:
    """One rank's share of a plan: chunks, header entries, witness slots; computed once."""

    def __init__(self, plan: SavePlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.chunks: Sequence[ChunkRef] = plan.filemap.chunks(rank)
        self.entries = plan.filemap.header_entries(rank)
        self.data_bytes = self.chunks[-1].end if self.chunks else 0
        self.sizes: NDArray[np.int64] = np.array(
            [c.end - c.start for c in self.chunks], dtype=np.int64
        )
        self.is_alone = plan.world == 1
        """Whether no other rank writes: then nothing is to be gathered."""
        self.small_bytes = INLINE_BYTES if self.is_alone and in_one_piece(plan.owners) else -1
        """Up to how many bytes one data file holds all: no digest index, no witness beside it."""

    def witness(self, data: memoryview) -> tuple[bytes, bytes]:
        """Return the slots this rank sees and their values, for a complete data section."""
        buffer = np.frombuffer(data, dtype=np.uint8)[: self.data_bytes]
        slots, placed = self._witness
        return slots, b"".join([gather(buffer, size, at).tobytes() for size, at in placed])

    @cached_property
    def header(self) -> tuple[bytes, int]:
        """Entries of all chunks, encoded for the header of their file; see `encode_entries`."""
        return encode_entries(self.entries)

    @cached_property
    def _witness(self) -> tuple[bytes, list[tuple[int, NDArray[np.int64]]]]:
        """Slots in file order; by item size, where in the data section their elements are."""
        pieces = {id(c.piece): c.piece for c in self.chunks}
        regions = {key: tuple(piece_regions(piece)) for key, piece in pieces.items()}
        buffers = [(c.tensor, regions[id(c.piece)]) for c in self.chunks]
        found = [*self.plan.witness.select_all(buffers)]
        if not found:
            return b"", []
        slots, elements, which = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(which, kind="stable")
        chunk = which[order]
        sizes = np.array([self.plan.filemap.dtypes[c.tensor].itemsize for c in self.chunks])[chunk]
        # Items of one size lie together, the largest first: each chunk begins at a whole one.
        places = np.array([c.start for c in self.chunks])[chunk] // sizes + elements[order]
        ends = np.flatnonzero(np.diff(sizes)) + 1
        by_size = zip(sizes[[0, *ends]].tolist(), np.split(places, ends), strict=True)
        return slots[order].astype("<u4").tobytes(), [*by_size]
