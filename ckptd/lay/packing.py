"""Which tensors of a rank lie in which flat buffer: groups, order, numbers of buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ckptd.lay.flats import FlatSlot, Packed, pack
from ckptd.lay.indexes import IndexCut, index_cut
from ckptd.lay.places import apart
from ckptd.lay.resolve import Ints, MeshShape, Resolved, ValueScope, evaluate, found_regex, parts
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.syntax.tree import Flat, NameIndex

_Tensor = tuple[int, tuple[int, ...]]
"""Number of the rule, indexes in the name."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Tensors that share buffers, and where they lie.

    Attributes
    ----------
    tensors
        In order.
    packed
        Where they lie in whole buffers. Of ``flat parts`` each has one for itself.
    rows
        The number of the buffer that each lies in on a rank.
    groups
        What tells the group of each buffer from others: the numbers in its names.
    """

    tensors: tuple[_Tensor, ...]
    packed: Packed
    rows: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]

    @cached_property
    def places(self) -> Mapping[_Tensor, FlatSlot]:
        """Slot of each tensor."""
        return dict(zip(self.tensors, self.packed.slots, strict=True))

    @cached_property
    def numbers(self) -> Mapping[_Tensor, int]:
        """Place of each tensor in the order."""
        return {tensor: i for i, tensor in enumerate(self.tensors)}


class RankBuffers(NamedTuple):
    """One rank's part of the buffers of a flat.

    Attributes
    ----------
    lengths
        Of each buffer.
    ahead
        For each tensor, how much of its buffer lies before this rank's part of it.
    """

    lengths: tuple[int, ...]
    ahead: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Packing:
    """The flats of a layout.

    A flat takes a tensor of a state if it speaks of the state, if its name pattern (where it has
    one) matches the tensor's name, and if its mesh axis has nothing to do with the axes that cut
    the tensor already. So experts, which are cut over ranks that other tensors are replicated on,
    go to a flat of their own. The first flat that takes a tensor gets it.
    """

    layout: Resolved
    mesh: MeshShape
    scope: ValueScope
    rules: tuple[RuleForm, ...]

    def flat_of(self, rule: int, indexes: tuple[int, ...], state: str) -> int | None:
        """Return the number of the flat that packs a tensor, or None.

        Parameters
        ----------
        rule, indexes
            The tensor.
        state
            Short name of the state, or empty.
        """
        return next(
            (f for f in self._candidates(rule, state) if self.group(f, rule, indexes) is not None),
            None,
        )

    def group(self, flat: int, rule: int, indexes: tuple[int, ...]) -> tuple[str, ...] | None:
        """Return what tells the groups of a flat apart; None if its pattern does not match."""
        name = self.layout.flats[flat].group.name
        if name is None:
            return ()
        found = found_regex(name).fullmatch(self.rules[rule].long_name(indexes))
        if found is None:
            return None
        # The pattern's groups are its indexes and globs, in order; only indexes tell apart.
        kinds = [isinstance(p, NameIndex) for p in name.parts if type(p).__name__ != "Text"]
        return tuple(g for g, is_index in zip(found.groups(), kinds, strict=True) if is_index)

    def _candidates(self, rule: int, state: str) -> tuple[int, ...]:
        key = (rule, state)
        if key not in self._cached_candidates:
            self._cached_candidates[key] = tuple(
                i
                for i, flat in enumerate(self.layout.flats)
                if _takes(flat, state)
                and flat.split[0] not in self.rules[rule].axes
                and all(apart(self.mesh, flat.split[0], a) for a in self.rules[rule].axes)
            )
        return self._cached_candidates[key]

    @cached_property
    def _cached_candidates(self) -> dict[tuple[int, str], tuple[int, ...]]:
        return {}

    def starts(self, flat: int, length: int) -> Ints:
        """Return where the parts of a buffer begin, by coordinate, and where the last one ends."""
        key = (flat, length)
        if key not in self._starts:
            axis, how = self.layout.flats[flat].split
            extent = self.scope.extent(axis)
            lengths = np.full(extent, length, dtype=np.int64)
            numbers = np.arange(extent, dtype=np.int64)
            found = parts(lengths, how, extent, numbers, self.scope)[0]
            self._starts[key] = np.append(found, length)
        return self._starts[key]

    @cached_property
    def _starts(self) -> dict[tuple[int, int], Ints]:
        return {}

    # --- the tensors of a rank ------------------------------------------------------------------

    def on_rank(self, rank: int) -> tuple[_Tensor, ...]:
        """Return the tensors that a rank holds, in the order of modules.

        Rules that follow each other and whose names begin alike, up to an index, are one module a
        number of that index: all of layer 0 comes before layer 1.
        """
        coordinates = self.mesh.coordinates(rank)
        key = tuple(coordinates[a] for a in self._deciding)
        if key not in self._on_rank:
            self._on_rank[key] = tuple(self._modules(self.rules, coordinates, {}, 0))
        return self._on_rank[key]

    @cached_property
    def _deciding(self) -> tuple[str, ...]:
        """The rank axes that decide which tensors a rank has."""
        found = {a for r in self.rules for c in r.cuts.values() for a in c.axes}
        found |= {a for r in self.rules for a in r.on}
        return tuple(sorted(a for a in found if self.mesh.strides[a]))

    @cached_property
    def _on_rank(self) -> dict[tuple[int, ...], tuple[_Tensor, ...]]:
        return {}

    def _modules(
        self,
        rules: Sequence[RuleForm],
        coordinates: Mapping[str, int],
        numbers: Mapping[str, int],
        depth: int,
    ) -> Iterator[_Tensor]:
        """Yield the tensors of rules whose names have the first `depth` indexes in common.

        Parameters
        ----------
        rules
            The rules.
        coordinates
            Of the rank, and on local axes what the numbers so far say.
        numbers
            By axis, for the indexes so far.
        depth
            How many these are.
        """
        for start, group in groupby(rules, lambda r: _beginning(r, depth)):
            if start is None:
                for rule in group:
                    indexes = tuple(numbers[a] for a in rule.indexes)
                    here = all(coordinates.get(a, c) == c for a, c in rule.on.items())
                    if here and rule.has(indexes):
                        yield rule.number, indexes
                continue
            index, found = start[1], list(group)
            for number in self._numbers(index, coordinates):
                fixed = {**coordinates, **self._said(index, number)}
                yield from self._modules(found, fixed, {**numbers, index.axis: number}, depth + 1)

    def _is_local(self, index: NameIndex) -> bool:
        return index.axis in self.mesh.extents

    def _said(self, index: NameIndex, number: int) -> Mapping[str, int]:
        """Return the coordinates on local axes that a number says."""
        if self._is_local(index):
            return {index.axis: number}
        said = self._cut(index).coordinates(number)
        return {a: c for a, c in said.items() if not self.mesh.strides[a]}

    def _numbers(self, index: NameIndex, coordinates: Mapping[str, int]) -> Sequence[int]:
        """Return the numbers that an index has on a rank."""
        if self._is_local(index):
            if index.axis in coordinates:
                return [coordinates[index.axis]]
            return range(self.mesh.extents[index.axis])
        cut = self._cut(index)
        key = (index, tuple(coordinates.get(a) for a in cut.axes))
        found = self._dealt.get(key)
        if found is None:
            found = self._dealt[key] = sorted(cut.all_numbers(coordinates))
        return found

    @cached_property
    def _dealt(self) -> dict[tuple[NameIndex, tuple[int | None, ...]], list[int]]:
        return {}

    def _cut(self, index: NameIndex) -> IndexCut:
        found = self._cuts.get(index)
        if found is None:
            found = self._cuts[index] = index_cut(self.layout, index, self.scope)
        return found

    @cached_property
    def _cuts(self) -> dict[NameIndex, IndexCut]:
        return {}

    # --- buffers --------------------------------------------------------------------------------

    def buffers(self, flat: int, state: str, rank: int) -> Buffer:
        """Return what a rank packs by one flat; ranks that differ on its axis pack the same.

        Raises
        ------
        UsageError
            An alignment is zero or cannot be computed.
        """
        axis = self.layout.flats[flat].split[0]
        rank -= self.mesh.coordinates(rank)[axis] * self.mesh.strides[axis]
        coordinates = self.mesh.coordinates(rank)
        at = tuple(coordinates[a] for a in self._telling(flat))
        key = (flat, at, self.alike(state))
        if key not in self._buffers:
            self._buffers[key] = self._packed(flat, state, rank)
        return self._buffers[key]

    @cached_property
    def _buffers(self) -> dict[tuple[int, tuple[int, ...], tuple[bool, ...]], Buffer]:
        return {}

    def alike_ranks(self, flat: int, ranks: Ints) -> list[Ints]:
        """Return some ranks in groups that pack the same tensors in the same shapes by one flat."""
        number = np.zeros(len(ranks), dtype=np.int64)
        for axis in self._telling(flat):
            extent = self.mesh.extents[axis]
            number = number * extent + ranks // self.mesh.strides[axis] % extent
        order = np.argsort(number, kind="stable")
        firsts = np.flatnonzero(np.diff(number[order])) + 1
        return [r for r in np.split(ranks[order], firsts) if len(r)]

    def _telling(self, flat: int) -> tuple[str, ...]:
        """Return the rank axes by which what ranks pack by a flat differs."""
        if flat not in self._known_telling:
            rules = range(len(self.rules))
            states = ("", *(s.name for s in self.layout.states))
            packed = (r for r in rules if any(flat in self._candidates(r, s) for s in states))
            axes = {a for r in packed for a in self.rules[r].axes}
            self._known_telling[flat] = tuple(sorted(axes | set(self._deciding)))
        return self._known_telling[flat]

    @cached_property
    def _known_telling(self) -> dict[int, tuple[str, ...]]:
        return {}

    def on_one(self, flat: int, state: str, rank: int) -> RankBuffers:
        """Return how long a rank's buffers are, and what lies before a tensor in them.

        Raises
        ------
        UsageError, MismatchError
            As `buffers`; or a buffer cannot be cut so.
        """
        buffer = self.buffers(flat, state, rank)
        at = self.mesh.coordinates(rank)[self.layout.flats[flat].split[0]]
        # A buffer is kept for all ranks that pack the same.
        key = (id(buffer), at)
        if key in self._on_one:
            return self._on_one[key]
        if self.layout.flats[flat].group.kind != "parts":
            shares = (self._share(flat, n, at) for n in buffer.packed.lengths)
            self._on_one[key] = RankBuffers(tuple(shares), (0,) * len(buffer.tensors))
        else:
            rows, ahead = [0] * len(buffer.groups), []
            for row, slot in zip(buffer.rows, buffer.packed.slots, strict=True):
                ahead.append(rows[row])
                rows[row] += self._share(flat, slot.length, at)
            self._on_one[key] = RankBuffers(tuple(rows), tuple(ahead))
        return self._on_one[key]

    @cached_property
    def _on_one(self) -> dict[tuple[int, int], RankBuffers]:
        return {}

    def _share(self, flat: int, length: int, at: int) -> int:
        starts = self.starts(flat, length)
        return int(starts[at + 1] - starts[at])

    def packed_flats(self, state: str, rank: int) -> list[int]:
        """Return the flats that pack several tensors of a state in one buffer, on a rank."""
        # A list of tensors is kept for all ranks that have the same.
        tensors = self.on_rank(rank)
        key = (id(tensors), self.alike(state))
        if key not in self._packed_flats:
            found = (self.flat_of(*t, state) for t in tensors)
            flats = self.layout.flats
            shared = {f for f in found if f is not None and flats[f].group.kind != "each"}
            self._packed_flats[key] = sorted(shared)
        return self._packed_flats[key]

    @cached_property
    def _packed_flats(self) -> dict[tuple[int, tuple[bool, ...]], list[int]]:
        return {}

    def first_buffer(self, flat: int, state: str, rank: int) -> int:
        """Return the number of a flat's first buffer among all of a state on a rank."""
        before = (f for f in self.packed_flats(state, rank) if f < flat)
        return sum(len(self.buffers(f, state, rank).groups) for f in before)

    def alike(self, state: str) -> tuple[bool, ...]:
        """Return which flats speak of a state: states that are alike in that are packed alike."""
        found = self._states.get(state)
        if found is None:
            found = self._states[state] = tuple(_takes(f, state) for f in self.layout.flats)
        return found

    @cached_property
    def _states(self) -> dict[str, tuple[bool, ...]]:
        return {}

    def _packed(self, number: int, state: str, rank: int) -> Buffer:
        flat = self.layout.flats[number]
        coordinates = self.mesh.coordinates(rank)
        tensors = [t for t in self.on_rank(rank) if self.flat_of(*t, state) == number]
        if flat.order == "reverse":
            tensors.reverse()
        names = {t: self.group(number, *t) or () for t in tensors}
        seen = {g: i for i, g in enumerate(dict.fromkeys(names.values()))}
        tensors.sort(key=lambda t: seen[names[t]])
        groups = [list(g) for _, g in groupby(tensors, names.get)]
        if flat.order == "robin":
            hands = self.scope.extent(flat.split[0])
            groups = [[t for k in range(hands) for t in g[k::hands]] for g in groups]
            tensors = [t for g in groups for t in g]
        bucket = max(1, flat.group.elements)
        limit = {"each": 0, "parts": 0, "bucket": bucket, "group": None}[flat.group.kind]
        start, end = (evaluate(v, self.scope) for v in (flat.start, flat.end))
        packed = [
            pack(tuple(self.numel(t, coordinates) for t in group), limit, start, end)
            for group in groups
        ]
        rows: list[int] = []
        keys: list[tuple[str, ...]] = []
        for group, found in zip(groups, packed, strict=True):
            mine = [s.buffer for s in found.slots]
            if flat.group.kind == "parts":
                mine = self._parts(number, found)
            rows += [len(keys) + n for n in mine]
            count = max(mine) + 1 if flat.group.kind == "parts" and mine else len(found.lengths)
            keys += [names[group[0]] if group else ()] * count
        return Buffer(tuple(tensors), _joined(packed), tuple(rows), tuple(keys))

    def _parts(self, flat: int, packed: Packed) -> list[int]:
        """Return the number of each tensor's buffer, where those are made of ranks' parts.

        A buffer is full for all ranks when it is full for the first, so they have as many.
        """
        limit = self.layout.flats[flat].group.elements
        rows, row, held = [], 0, 0
        for slot in packed.slots:
            rows.append(row)
            held += self._share(flat, slot.length, 0)
            if limit and held >= limit:
                row, held = row + 1, 0
        return rows

    def numel(self, tensor: _Tensor, coordinates: Mapping[str, int]) -> int:
        """Return the number of elements of a rank-local tensor."""
        rule = self.rules[tensor[0]]
        return math.prod(rule.local_shape(rule.who(coordinates)))

    def slot(
        self, flat: int, rule: int, indexes: tuple[int, ...], state: str, rank: int
    ) -> FlatSlot:
        """Return where a tensor lies in the buffers of a rank that holds it."""
        return self.buffers(flat, state, rank).places[(rule, indexes)]


def _takes(flat: Flat, state: str) -> bool:
    return "*" in flat.states or (state or "params") in flat.states


def _beginning(rule: RuleForm, depth: int) -> tuple[tuple[object, ...], NameIndex] | None:
    """Return a rule's name up to the index behind the first `depth`, and that index; or None."""
    parts = rule.equation.name.parts
    found = [(i, p) for i, p in enumerate(parts) if isinstance(p, NameIndex)]
    if depth >= len(found):
        return None
    at, index = found[depth]
    return parts[:at], index


def _joined(packed: list[Packed]) -> Packed:
    """Number the buffers of several groups in one go."""
    slots: list[FlatSlot] = []
    lengths: list[int] = []
    for found in packed:
        slots += [s._replace(buffer=s.buffer + len(lengths)) for s in found.slots]
        lengths += found.lengths
    return Packed(tuple(slots), tuple(lengths))
