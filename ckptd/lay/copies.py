"""`Composition`: what to copy between two layouts, for a chunk or a rank; cached templates.

In it: how much of templates is kept.

A target buffer falls into parts over the axes of families (`ckptd.lay.regions`), each part
meets the source's rules (`ckptd.lay.meet`), and each meeting is cut by the grid of the
source tensor. All three steps are kept as templates: layers differ in the numbers in names only,
and states in nothing but what flats make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptd.base.grids.block import Block, Fill, Region, Templates
from ckptd.base.grids.grid import Grid
from ckptd.base.grouping import by_key
from ckptd.errors import MismatchError
from ckptd.lay.agree import agreed
from ckptd.lay.boxes import Run
from ckptd.lay.local import BoundTensor, LocalPiece, local_tensors
from ckptd.lay.meet import Meeting, every_meeting, meetings, piece_blocks
from ckptd.lay.regions import BoxPart, BufferParts, box_parts, flat_parts
from ckptd.lay.resolve import ALL, Bound, Tags
from ckptd.lay.ruleform import RuleForm, Who
from ckptd.lay.stored import StoredForm, StoredTensor, TensorKey
from ckptd.lay.values import Values, state_power, values
from ckptd.types import Box

Group = tuple[Meeting, ...]
"""Meetings with one source tensor."""


Pieces = tuple[tuple[int, tuple[Block, ...]], ...]
"""Pieces of a source tensor and what to copy out of each."""


class Copy(NamedTuple):
    """Copies out of one piece of a source tensor.

    Attributes
    ----------
    source
        The stored source tensor.
    piece
        Number of the piece; block sources are relative to its first element.
    blocks
        The copies, in elements; targets in the target buffer.
    values
        What happens to the values on the way; None: nothing.
    """

    source: StoredTensor
    piece: int
    blocks: tuple[Block, ...]
    values: Values | None

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return sum(b.numel for b in self.blocks)


class SourceCopies(NamedTuple):
    """Copies out of one source tensor.

    Attributes
    ----------
    source
        The stored source tensor.
    pieces
        ``(piece, blocks)`` in rising order; layers and states share them.
    values
        What happens to the values on the way; None: nothing.
    """

    source: StoredTensor
    pieces: Pieces
    values: Values | None


class TargetPlan(NamedTuple):
    """How one target buffer is filled.

    Attributes
    ----------
    numel
        Its number of elements.
    sources
        In the order of the source: rule by rule, index by index.
    fills
        What no logical element represents, and what to write there.
    """

    numel: int
    sources: tuple[SourceCopies, ...]
    fills: tuple[Fill, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All copies, one for each source piece, in the order of the source."""
        return tuple(
            Copy(s.source, piece, blocks, s.values)
            for s in self.sources
            for piece, blocks in s.pieces
        )


@dataclass(frozen=True, eq=False)
class Composition:
    """Two layouts over the same space.

    Attributes
    ----------
    source, target
        Their stored forms, with each other's refinements: see `compose`.
    grids
        The pieces of a stored source tensor by its name, where they are other ones than those
        of the source's own stored form.
    receivers
        Read backwards: `target` gives, and all rules of `source` that want something get it.
    """

    source: StoredForm
    target: StoredForm
    grids: Callable[[str], Grid] | None = None
    receivers: bool = False
    _parts: Templates[object, BufferParts] = field(default_factory=lambda: Templates(_KEPT))
    _meetings: Templates[object, tuple[Group, ...]] = field(
        default_factory=lambda: Templates(_KEPT)
    )
    _pieces: Templates[tuple[Group, Grid], Pieces] = field(default_factory=lambda: Templates(_KEPT))

    # --- what is asked for ----------------------------------------------------------------------

    def piece(self, key: TensorKey, piece: int) -> TargetPlan:
        """Plan one piece of a stored target tensor.

        Parameters
        ----------
        key
            The tensor; `StoredForm.by_name` knows them.
        piece
            Number of the piece.

        Raises
        ------
        MismatchError
            The source does not hold all of it, or its grid is one of another shape.
        IndexError
            There is no such piece.
        """
        tensor = self.target.tensor(*key)
        rule = self.target.rules[tensor.rule]
        found = tensor.grid.piece(piece)
        name = (rule.number, found.box, found.flat)
        parts = self._parts.get(name)
        if parts is None:
            if found.flat is None:
                parts = box_parts(rule.dims, found.box)
            else:
                parts = flat_parts(rule.dims, found.box, *found.flat)
            self._parts.put(name, parts, weight=1 + len(parts.parts))
        copies = self._copies(rule, tensor.indexes, tensor.state, name, parts)
        return TargetPlan(found.numel, _ordered(copies), parts.fills)

    def regions(self, key: TensorKey, regions: Iterable[Region]) -> TargetPlan:
        """Plan a buffer that holds boxes of a stored target tensor.

        Parameters
        ----------
        key
            The tensor.
        regions
            What the buffer holds, in coordinates of the stored tensor; no two overlap.

        Raises
        ------
        MismatchError
            As `piece`.
        """
        number, indexes, state = key
        rule = self.target.rules[number]
        copies: list[tuple[TensorKey, SourceCopies]] = []
        fills: list[Fill] = []
        numel = 0
        for region in regions:
            name = (number, region)
            parts = self._parts.get(name)
            if parts is None:
                parts = box_parts(rule.dims, region.box, region.strides, region.start)
                self._parts.put(name, parts, weight=1 + len(parts.parts))
            copies += self._copies(rule, indexes, state, name, parts)
            fills += parts.fills
            numel += region.numel
        return TargetPlan(numel, _ordered(copies), tuple(fills))

    def local(self, rank: int) -> Iterator[tuple[BoundTensor, TargetPlan]]:
        """Yield everything that a rank of the target holds, and how it is filled.

        Raises
        ------
        MismatchError
            As `piece`.
        """
        for tensor in local_tensors(self.target, rank):
            yield tensor, self.local_tensor(rank, tensor)

    def local_tensor(self, rank: int, tensor: BoundTensor) -> TargetPlan:
        """Plan one tensor or buffer of a rank.

        Raises
        ------
        MismatchError
            As `piece`.
        """
        coordinates = self.target.mesh.coordinates(rank)
        copies: list[tuple[TensorKey, SourceCopies]] = []
        fills: list[Fill] = []
        end = 0
        for p in tensor.pieces:
            rule = self.target.rules[p.rule]
            name, parts = self.local_parts(rule, rule.who(coordinates), p)
            copies += self._copies(rule, p.indexes, tensor.state, name, parts)
            fills += gap(end, p.at)
            fills += parts.fills
            end = p.at + p.hi - p.lo
        fills += gap(end, tensor.numel)
        return TargetPlan(tensor.numel, _ordered(copies), tuple(fills))

    # --- targets --------------------------------------------------------------------------------

    def local_parts(
        self, rule: RuleForm, who: Who, piece: LocalPiece
    ) -> tuple[object, BufferParts]:
        """Return what a range of a rank-local tensor holds, and a name for it."""
        name = (rule.number, who, piece.lo, piece.hi, piece.at)
        parts = self._parts.get(name)
        if parts is None:
            shape = rule.local_shape(who)
            whole = Box((0,) * len(shape), shape)
            parts = flat_parts(rule.local_dims(who), whole, piece.lo, piece.hi, piece.at)
            self._parts.put(name, parts, weight=1 + len(parts.parts))
        return name, parts

    # --- sources --------------------------------------------------------------------------------

    @cached_property
    def holders(self) -> Mapping[str, tuple[tuple[RuleForm, Tags], ...]]:
        """The source's rules by the families that they hold."""
        return _by_family(self.source.rules if self.receivers else self.source.stored_rules)

    @cached_property
    def givers(self) -> Mapping[str, tuple[tuple[RuleForm, Tags], ...]]:
        """The target's rules by the families that they hold, for reading backwards."""
        return _by_family(self.target.stored_rules)

    @cached_property
    def takers(self) -> Mapping[str, tuple[tuple[RuleForm, Tags], ...]]:
        """All of the target's rules by the families that they hold, what ranks keep among them."""
        return _by_family(self.target.rules)

    @cached_property
    def _free(self) -> dict[int, tuple[bool, ...]]:
        return {}

    def free(self, rule: RuleForm) -> tuple[bool, ...]:
        """For each index in a target's name: whether no source rule asks for its number.

        A source with the same index in its names has other tensors for other numbers and no
        other copies, so one template serves all layers.
        """
        if rule.number not in self._free:
            asked: set[str] = set()
            for family in rule.equation.families.values():
                for source, tags in self.holders.get(family.name, ()):
                    asked |= _asked(source, rule)
                    asked |= {r.axis for d in source.whole.get(tags, ()) for r in d.runs}
                for giver, _ in self.givers[family.name] if self.receivers else ():
                    asked |= _asked(giver, rule)
            self._free[rule.number] = tuple(a not in asked for a in rule.indexes)
        return self._free[rule.number]

    def meetings(
        self, rule: RuleForm, indexes: tuple[int, ...], name: object, parts: BufferParts
    ) -> tuple[Group, ...]:
        """Return where the parts of a target meet the source, by source tensor.

        Parameters
        ----------
        rule, indexes
            The target tensor.
        name
            What tells these parts from others.
        parts
            What the target buffer holds.

        Raises
        ------
        MismatchError
            The source does not hold all of it.
        """
        free = self.free(rule)
        asked = tuple(None if f else n for f, n in zip(free, indexes, strict=True))
        key = (name, asked)
        found = self._meetings.get(key)
        if found is None:
            groups: dict[object, list[Meeting]] = {}
            for part in parts.parts:
                for m in self._meet(rule, asked, indexes, part):
                    groups.setdefault((m.rule.number, m.indexes), []).append(m)
            found = tuple(tuple(g) for g in groups.values())
            self._meetings.put(key, found, weight=1 + sum(len(g) for g in found))
        return found

    def _meet(
        self,
        rule: RuleForm,
        asked: tuple[int | None, ...],
        indexes: tuple[int, ...],
        part: BoxPart,
    ) -> Iterator[Meeting]:
        family = rule.equation.families[part.tags]
        ranges = {a: Run(a, n, 1, 0) for a, n in zip(rule.indexes, indexes, strict=True)}
        ranges |= {a: Run(a, n, 1, 0) for a, n in rule.equation.pinned.items()}
        ranges |= {r.axis: r for r in part.runs}
        names = [a for a, n in zip(rule.indexes, asked, strict=True) if n is None]
        holders = self.holders.get(family.name, ())
        if self.receivers:
            givers = self.givers[family.name]
            before = givers[: givers.index((rule, part.tags))]
            yield from every_meeting(ranges, names, part.start, holders, before)
        else:
            yield from meetings(ranges, names, part.start, holders, family.name)

    def _copies(
        self, rule: RuleForm, indexes: tuple[int, ...], state: str, name: object, parts: BufferParts
    ) -> list[tuple[TensorKey, SourceCopies]]:
        """Return the copies of one target tensor's parts, with where their sources stand."""
        out = []
        numbers = dict(zip(rule.indexes, indexes, strict=True))
        for group in self.meetings(rule, indexes, name, parts):
            giver = group[0].rule
            at = tuple(
                numbers[a] if n is None else n
                for a, n in zip(giver.indexes, group[0].indexes, strict=True)
            )
            key = (giver.number, at, state)
            tensor = self._source(key)
            change = self.values(giver, rule, state)
            out.append((key, SourceCopies(tensor, self._cut(group, tensor.grid), change)))
        return out

    def _cut(self, group: Group, grid: Grid) -> Pieces:
        key = (group, grid)
        found = self._pieces.get(key)
        if found is None:
            blocks: dict[int, list[Block]] = {}
            for meeting in group:
                for piece, block in piece_blocks(meeting, grid):
                    blocks.setdefault(piece, []).append(block)
            found = tuple((p, tuple(blocks[p])) for p in sorted(blocks))
            self._pieces.put(key, found, weight=1 + sum(len(b) for _, b in found))
        return found

    def _source(self, key: TensorKey) -> StoredTensor:
        """Return a source tensor, with the grid that it has where it is stored."""
        found = self._sources.get(key)
        if found is not None:
            return found
        if key[2] not in self.source.states:
            raise MismatchError(
                f"the source has no state {key[2]}",
                kind="lay-cover",
                wanted=key[2],
                found=", ".join(s for s in self.source.states if s) or "none",
            )
        found = self.source.tensor(*key)
        if self.grids is not None:
            grid = self.grids(found.name)
            if grid.shape != found.grid.shape:
                raise MismatchError(
                    "a stored tensor has another shape than the layout says",
                    kind="lay-fit",
                    where=found.name,
                    wanted=found.grid.shape,
                    found=grid.shape,
                )
            found = StoredTensor(found.name, *key, grid=grid, owners=found.owners, base=found.base)
        self._sources[key] = found
        return found

    @cached_property
    def _sources(self) -> dict[TensorKey, StoredTensor]:
        return {}

    @cached_property
    def _values(self) -> dict[tuple[int, int, str, bool], Values | None]:
        return {}

    def values(
        self, source: RuleForm, target: RuleForm, state: str, *, live: bool = False
    ) -> Values | None:
        """Return what happens to values between two rules; None: nothing.

        Parameters
        ----------
        source, target
            The rules.
        state
            Short name of the state, or empty.
        live
            Whether the source is ranks: a stored tensor's replicas are combined already.
        """
        key = (source.number, target.number, state, live)
        if key not in self._values:
            names = [form.states[state] for form in (self.source, self.target)]
            power = state_power(state, names) if state else 1
            self._values[key] = values(
                source.equation, target.equation, state, power=power, live=live
            )
        return self._values[key]


_KEPT = 1_000_000
"""Number of blocks that are kept in templates."""


def compose(
    source: Bound, target: Bound, grids: Callable[[str], Grid] | None = None
) -> Composition:
    """Combine two layouts over the same space.

    Parameters
    ----------
    source, target
        The layouts.
    grids
        The pieces of stored source tensors, by name; those of the source's own stored form when
        left out.

    Raises
    ------
    MismatchError
        ``lay-fit``: they have different axes for a family, or different lengths for an axis.
    """
    return Composition(*agreed(source, target), grids)


def _asked(source: RuleForm, target: RuleForm) -> set[str]:
    """Return the axes whose number decides whether a source rule has something of a target."""
    wanted = target.equation.only
    some = {
        axis
        for axis, numbers in source.equation.only.items()
        if wanted.get(axis, ALL) & numbers and not numbers.covers(wanted.get(axis, ALL))
    }
    return some | set(source.equation.pinned)


def _by_family(
    rules: Iterable[RuleForm],
) -> Mapping[str, tuple[tuple[RuleForm, Tags], ...]]:
    out: dict[str, tuple[tuple[RuleForm, Tags], ...]] = {}
    for rule in rules:
        for tags, family in rule.equation.families.items():
            out[family.name] = (*out.get(family.name, ()), (rule, tags))
    return out


def _ordered(copies: list[tuple[TensorKey, SourceCopies]]) -> tuple[SourceCopies, ...]:
    """Bring copies in the order of the source, together for each of its tensors."""
    found = by_key(((key, copy.values), copy) for key, copy in copies)
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return tuple(c[0] if len(c) == 1 else _together(c) for _, c in ordered)


def _together(copies: list[SourceCopies]) -> SourceCopies:
    """Merge what several parts of a buffer take from one source tensor."""
    blocks: dict[int, tuple[Block, ...]] = {}
    for copy in copies:
        for piece, found in copy.pieces:
            blocks[piece] = blocks.get(piece, ()) + found
    return copies[0]._replace(pieces=tuple(sorted(blocks.items())))


def gap(lo: int, hi: int) -> list[Fill]:
    """Return the fill between two tensors of a buffer."""
    return [Fill(((hi - lo, 1),), lo, 0.0)] if lo < hi else []
