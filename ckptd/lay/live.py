"""Live ranks: what a rank takes from and gives to each other one; averages of replicas.

In it: how much of templates is kept.

Each rank computes its own part. Which of several replicas gives is a pure function
(`ckptd.lay.holders.choose`), so both sides come to the same transfers without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from ckptd.base.grids.block import Block, Fill, Templates
from ckptd.base.grids.grid import Axis, strides_of
from ckptd.lay.copies import Composition, Group, gap
from ckptd.lay.flats import flat_axis, shares
from ckptd.lay.holders import HolderSet, choose, holders_of
from ckptd.lay.local import BoundTensor, LocalPiece, local_tensors
from ckptd.lay.meet import BlockStep, Crossing, Meeting, block, crossings, cut_flat
from ckptd.lay.regions import BufferParts, box_parts
from ckptd.lay.resolve import Ints
from ckptd.lay.ruleform import RuleForm, Who
from ckptd.lay.stored import StoredForm, local_cells
from ckptd.lay.syntax.tree import Average
from ckptd.lay.values import Values
from ckptd.types import Box

_KEPT = 1_000_000


class LiveCopy(NamedTuple):
    """Copies from a tensor or buffer of another rank.

    Attributes
    ----------
    rank, name
        The rank and the name of its tensor or buffer.
    blocks
        The copies, in elements of the two buffers.
    values
        What happens to the values on the way; None: nothing.
    of
        How many ranks give their part of the same elements, to be averaged or summed as `values`
        says; mostly 1.
    """

    rank: int
    name: str
    blocks: tuple[Block, ...]
    values: Values | None
    of: int = 1


GiverBlocks = tuple[tuple[int, tuple[Block, ...]], ...]
"""Ranks that give, and what each of them has: copies in elements of the two buffers."""


class LiveShare(NamedTuple):
    """Copies from the tensors or buffers that have one name on all ranks that give.

    Attributes
    ----------
    name
        Of the tensor or buffer.
    values, of
        As of `LiveCopy`.
    givers
        Copies from each rank; alike layers have the very same tuple.
    """

    name: str
    values: Values | None
    of: int
    givers: GiverBlocks


class LivePlan(NamedTuple):
    """How a tensor or buffer of a rank is filled."""

    numel: int
    copies: tuple[LiveCopy, ...]
    fills: tuple[Fill, ...]


class LiveSend(NamedTuple):
    """Copies to a tensor or buffer of another rank.

    Attributes
    ----------
    source
        Name of the own tensor or buffer.
    rank, target
        The other rank, and the name of its tensor or buffer.
    blocks
        The copies, in elements of the two buffers.
    """

    source: str
    rank: int
    target: str
    blocks: tuple[Block, ...]


class HeldCell(NamedTuple):
    """A cell that a meeting touches.

    Attributes
    ----------
    cell
        A crossing for each dimension.
    holders
        The ranks that hold it.
    alone
        Where a single rank does: that rank, and the copy out of its whole tensor.
    """

    cell: tuple[Crossing, ...]
    holders: HolderSet
    alone: tuple[int, Block] | None


@dataclass(frozen=True, eq=False)
class RankTensors:
    """The tensors of the ranks of one layout, as places of cells."""

    form: StoredForm
    _blocks: Templates[object, tuple[Block, ...]] = field(default_factory=lambda: Templates(_KEPT))
    _cells: Templates[Meeting, tuple[tuple[Crossing, ...], ...]] = field(
        default_factory=lambda: Templates(_KEPT)
    )
    _holders: Templates[object, HolderSet] = field(default_factory=lambda: Templates(_KEPT))
    _held: Templates[object, tuple[HeldCell, ...]] = field(default_factory=lambda: Templates(_KEPT))
    _alone: Templates[object, tuple[GiverBlocks | None]] = field(
        default_factory=lambda: Templates(_KEPT)
    )

    def cells(self, meeting: Meeting) -> tuple[tuple[Crossing, ...], ...]:
        """Return the cells that a meeting touches: a crossing for each dimension."""
        found = self._cells.get(meeting)
        if found is None:
            axes = meeting.rule.grid.axes
            pairs = zip(meeting.dims, axes, strict=True)
            found = tuple(product(*(list(crossings(*dim, axis)) for dim, axis in pairs)))
            self._cells.put(meeting, found, weight=1 + len(found))
        return found

    def zero(self, rule: RuleForm, indexes: tuple[int, ...], state: str) -> tuple[str, ...]:
        """Return the axes along which ranks hold different parts, or values, of the same cell."""
        return (*self.flat_axis(rule, indexes, state), *(m.axis for m in averages(rule)))

    def flat_axis(self, rule: RuleForm, indexes: tuple[int, ...], state: str) -> tuple[str, ...]:
        """Return the axis of a tensor's flat, if it has one."""
        flat = self.form.packing.flat_of(rule.number, indexes, state)
        return () if flat is None else (self.form.bound.layout.flats[flat].split[0],)

    def holders(
        self, rule: RuleForm, indexes: tuple[int, ...], cell: tuple[int, ...], zero: Sequence[str]
    ) -> HolderSet:
        """Return the ranks that hold a cell, with coordinate 0 on some axes."""
        key = (rule.number, tuple(rule.fixed(indexes).items()), cell, tuple(zero))
        found = self._holders.get(key)
        if found is None:
            found = holders_of(rule, indexes, cell, zero)
            self._holders.put(key, found, weight=1 + len(found.numbers))
        return found

    def held_cells(
        self, meeting: Meeting, indexes: tuple[int, ...], zero: Sequence[str]
    ) -> tuple[HeldCell, ...]:
        """Return the cells that a meeting touches, with their holders; the same for alike layers.

        Parameters
        ----------
        meeting, indexes
            What is wanted, and the tensor that has it.
        zero
            See `zero`.
        """
        rule = meeting.rule
        key = (meeting, tuple(rule.fixed(indexes).items()), tuple(zero))
        found = self._held.get(key)
        if found is None:
            cells = self.cells(meeting)
            found = tuple(self._held_cell(meeting, indexes, cell, zero) for cell in cells)
            self._held.put(key, found, weight=1 + len(found))
        return found

    def held_alone(self, group: Group, indexes: tuple[int, ...]) -> GiverBlocks | None:
        """Return what each rank has of some meetings, where each cell has a single holder.

        The same tuple for alike layers. None: a cell has several holders, which take turns.

        Parameters
        ----------
        group, indexes
            Meetings with the tensor of these indexes.
        """
        key = (group, tuple(group[0].rule.fixed(indexes).items()))
        found = self._alone.get(key)
        if found is None:
            cells = [c for m in group for c in self.held_cells(m, indexes, ())]
            alone = [(first, (whole,)) for first, whole in (c.alone for c in cells if c.alone)]
            found = (_by_giver(alone) if len(alone) == len(cells) else None,)
            self._alone.put(key, found, weight=1 + len(found[0] or ()))
        return found[0]

    def _held_cell(
        self,
        meeting: Meeting,
        indexes: tuple[int, ...],
        cell: tuple[Crossing, ...],
        zero: Sequence[str],
    ) -> HeldCell:
        rule = meeting.rule
        holders = self.holders(rule, indexes, tuple(c.cell for c in cell), zero)
        if holders.count != 1:
            return HeldCell(cell, holders, None)
        who = rule.who(rule.mesh.coordinates(holders.first))
        return HeldCell(cell, holders, (holders.first, self.block(meeting, cell, who)))

    def block(self, meeting: Meeting, cell: tuple[Crossing, ...], who: Who) -> Block:
        """Return what a meeting has in one cell, as a copy out of a rank's whole tensor."""
        key = (meeting, tuple((c.cell, c.offset) for c in cell), who)
        found = self._blocks.get(key)
        if found is None:
            found = (self._block(meeting, cell, who),)
            self._blocks.put(key, found, weight=1)
        return found[0]

    def _block(self, meeting: Meeting, cell: tuple[Crossing, ...], who: Who) -> Block:
        rule = meeting.rule
        source, target = 0, meeting.target
        steps: list[BlockStep] = []
        strides = strides_of(rule.local_shape(who))
        for d, (c, stride) in enumerate(zip(cell, strides, strict=True)):
            cells, local = rule.held[d].cells_of(who[d])
            at = int(local[np.searchsorted(cells, c.cell)])
            source += (at + c.offset) * stride
            target += c.target
            steps += [BlockStep(n, s * stride, t) for n, s, t in c.steps]
        return block(source, target, steps)

    def buffers(
        self, rule: RuleForm, indexes: tuple[int, ...], state: str, rank: int, whole: Block
    ) -> Iterator[tuple[int, str, Block]]:
        """Yield ``(coordinate, name, block)`` for each buffer that a copy out of a tensor is of.

        Parameters
        ----------
        rule, indexes, state
            The tensor.
        rank
            One that holds it, with coordinate 0 on the axis of its flat.
        whole
            A copy out of the whole rank-local tensor.
        """
        form = self.form
        flat = form.packing.flat_of(rule.number, indexes, state)
        if flat is None:
            yield 0, form.name(rule.local_name(indexes), state), whole
            return
        slot = form.packing.slot(flat, rule.number, indexes, state, rank)
        starts = form.packing.starts(flat, slot.length)
        axis, whose = flat_axis(shares(slot.numel, slot.offset, starts))
        own_name = form.name(rule.local_name(indexes), state)
        stride = self.stride(rule, indexes, state)
        for part, start, found in cut_flat(whole, axis):
            coordinate = int(whose[part])
            name = own_name
            ahead = 0
            if form.bound.layout.flats[flat].group.kind != "each":
                # Ranks that share a buffer may have others before it.
                holder = rank + coordinate * stride
                buffer = form.packing.buffers(flat, state, rank)
                number = buffer.numbers[rule.number, indexes]
                row = buffer.rows[number]
                ahead = form.packing.on_one(flat, state, holder).ahead[number]
                first = form.packing.first_buffer(flat, state, holder)
                name = form.buffer_name(flat, first + row, state, buffer.groups[row])
            # The range's place in the part of the buffer that its rank holds.
            at = ahead + slot.offset + start - int(starts[coordinate])
            yield coordinate, name, found.moved(at - start)

    def stride(self, rule: RuleForm, indexes: tuple[int, ...], state: str) -> int:
        """Return how far apart the ranks are that share a tensor's buffer."""
        return sum(self.form.mesh.strides[a] for a in self.flat_axis(rule, indexes, state))

    def alike(
        self, rule: RuleForm, indexes: tuple[int, ...], state: str, holders: HolderSet
    ) -> Iterator[tuple[Who, Ints]]:
        """Yield holders of a cell by where it lies in what they hold."""
        for number in holders.numbers.tolist():
            who = rule.who(rule.mesh.coordinates(number))
            ranks = HolderSet(np.array([number]), holders.free).all()
            if not self.flat_axis(rule, indexes, state):
                yield who, ranks
            else:
                # What else a rank packs before a tensor may differ from rank to rank.
                for r in ranks.tolist():
                    yield who, np.array([r])


@dataclass(frozen=True, eq=False)
class Transfers:
    """Two layouts over the same space, on live ranks.

    Attributes
    ----------
    composition
        The two layouts; see `ckptd.lay.copies.compose`. A rank takes what it holds itself, and
        else from a holder that all ranks compute alike.
    """

    composition: Composition

    @cached_property
    def source(self) -> RankTensors:
        """Ranks that give."""
        return RankTensors(self.composition.source)

    @cached_property
    def target(self) -> RankTensors:
        """Ranks that get."""
        return RankTensors(self.composition.target)

    @cached_property
    def _backwards(self) -> Composition:
        c = self.composition
        return Composition(c.target, c.source, receivers=True)

    # --- taking ---------------------------------------------------------------------------------

    def local(self, rank: int) -> Iterator[tuple[BoundTensor, LivePlan]]:
        """Yield everything that a rank of the target holds, and how it is filled.

        Raises
        ------
        MismatchError
            The source does not hold all of it.
        """
        for tensor in local_tensors(self.composition.target, rank):
            yield tensor, self.local_tensor(rank, tensor)

    def local_tensor(self, rank: int, tensor: BoundTensor) -> LivePlan:
        """Plan one tensor or buffer of a rank of the target.

        Raises
        ------
        MismatchError
            As `local`.
        """
        shares, fills = self.shares(rank, tensor)
        copies = (
            LiveCopy(giver, s.name, blocks, s.values, s.of)
            for s in shares
            for giver, blocks in s.givers
        )
        ordered = sorted(copies, key=lambda c: (c.rank != rank, c.rank, c.name))
        return LivePlan(tensor.numel, tuple(ordered), fills)

    def shares(
        self, rank: int, tensor: BoundTensor
    ) -> tuple[tuple[LiveShare, ...], tuple[Fill, ...]]:
        """Return what a tensor or buffer of a rank is filled with, and where nothing arrives.

        Raises
        ------
        MismatchError
            As `local`.
        """
        coordinates = self.composition.target.mesh.coordinates(rank)
        merged: dict[tuple[str, Values | None, int], list[GiverBlocks]] = {}
        fills: list[Fill] = []
        end = 0
        for p in tensor.pieces:
            rule = self.composition.target.rules[p.rule]
            name, parts = self.composition.local_parts(rule, rule.who(coordinates), p)
            for group in self.composition.meetings(rule, p.indexes, name, parts):
                self._take(rank, rule, p, tensor.state, group, merged)
            fills += [*gap(end, p.at), *parts.fills]
            end = p.at + p.hi - p.lo
        fills += gap(end, tensor.numel)
        shares = (
            LiveShare(*key, found[0] if len(found) == 1 else _by_giver(chain(*found)))
            for key, found in merged.items()
        )
        return tuple(shares), tuple(fills)

    def _take(
        self,
        rank: int,
        rule: RuleForm,
        piece: LocalPiece,
        state: str,
        group: Group,
        merged: dict[tuple[str, Values | None, int], list[GiverBlocks]],
    ) -> None:
        """Add what the meetings with one tensor give to a rank."""
        giver = group[0].rule
        indexes = _indexes(rule, piece.indexes, group[0])
        values = self.composition.values(giver, rule, state, live=True)
        zero = self.source.zero(giver, indexes, state)
        copies = _averaged(giver)
        key = self.source.form.name(giver.local_name(indexes), state), values, len(copies)
        if not zero:
            # Where each cell has one holder, layers and states differ in names alone.
            alike = self.source.held_alone(group, indexes)
            if alike is not None:
                merged.setdefault(key, []).append(alike)
                return
        flat = self.source.flat_axis(giver, indexes, state)
        stride = self.source.stride(giver, indexes, state)
        found: dict[tuple[str, Values | None, int], list[tuple[int, Iterable[Block]]]] = {}
        for meeting in group:
            for cell, holders, alone in self.source.held_cells(meeting, indexes, zero):
                if alone is not None:
                    first, whole = alone
                else:
                    number = tuple(c.cell for c in cell)
                    chosen = self._choose(holders, np.array([rank]), giver, indexes, state, number)
                    first = int(chosen[0])
                    who = giver.who(giver.mesh.coordinates(first))
                    whole = self.source.block(meeting, cell, who)
                if not flat and copies == [0]:
                    found.setdefault(key, []).append((first, (whole,)))
                    continue
                for at, name, part in self.source.buffers(giver, indexes, state, first, whole):
                    for shift in copies:
                        more = found.setdefault((name, values, len(copies)), [])
                        more.append((first + at * stride + shift, (part,)))
        for key, blocks in found.items():
            merged.setdefault(key, []).append(_by_giver(blocks))

    def _choose(
        self,
        holders: HolderSet,
        ranks: Ints,
        rule: RuleForm,
        indexes: tuple[int, ...],
        state: str,
        cell: tuple[int, ...],
    ) -> Ints:
        """Return for each of some ranks of the target which holder it takes a cell from."""
        nearest = ranks
        for axis in self.source.zero(rule, indexes, state):
            stride, extent = rule.mesh.strides[axis], rule.mesh.extents[axis]
            nearest = nearest - nearest // stride % extent * stride
        number = list(self.composition.source.states).index(state)
        return choose(holders, ranks, nearest, (rule.number, *indexes, number, *cell))

    # --- giving ---------------------------------------------------------------------------------

    def sent(self, rank: int) -> Iterator[LiveSend]:
        """Yield what a rank of the source gives, tensor by tensor.

        Together with what all others give this is what all ranks of the target take; work and
        memory are in what is given.
        """
        kept = self.composition.source.stored_numbers
        for tensor in local_tensors(self.composition.source, rank):
            merged: dict[tuple[int, str], list[Block]] = {}
            for p in tensor.pieces:
                if p.rule in kept and tensor.state in self.composition.target.states:
                    self._give(rank, p, tensor.state, merged)
            for (to, name), blocks in sorted(merged.items()):
                yield LiveSend(tensor.name, to, name, tuple(blocks))

    def _give(
        self, rank: int, piece: LocalPiece, state: str, merged: dict[tuple[int, str], list[Block]]
    ) -> None:
        """Add what others take of one tensor, by taker."""
        rule = self.composition.source.rules[piece.rule]
        zero = self.source.zero(rule, piece.indexes, state)
        mine = rank
        for axis in zero:
            mine -= rule.mesh.coordinates(rank)[axis] * rule.mesh.strides[axis]
        who = rule.who(rule.mesh.coordinates(rank))
        shape = rule.local_shape(who)
        cut = _slice(piece, shape)
        for cell, box in local_cells(rule, who):
            name = (rule.number, who, cell)
            number = _unravelled(cell, rule.grid.cell_shape)
            holders = self.source.holders(rule, piece.indexes, number, zero)
            parts = self._cell_parts(name, rule, who, box)
            for meeting in chain(*self._backwards.meetings(rule, piece.indexes, name, parts)):
                for to, target, found in self._takers(meeting, rule, piece.indexes, state):
                    giver = self._choose(holders, to, rule, piece.indexes, state, number)
                    for r in to[giver == mine].tolist():
                        for blocks in _own(found, cut, piece):
                            merged.setdefault((r, target), []).append(blocks)

    def _cell_parts(self, name: object, rule: RuleForm, who: Who, box: Box) -> BufferParts:
        """Return what a rank's tensor holds of one cell, in places of that tensor."""
        found = self._parts.get(name)
        if found is None:
            strides = strides_of(rule.local_shape(who))
            start = sum(o * s for o, s in zip(box.offset, strides, strict=True))
            found = box_parts(rule.local_dims(who), box, strides, start)
            self._parts[name] = found
        return found

    @cached_property
    def _parts(self) -> dict[object, BufferParts]:
        return {}

    def _takers(
        self, meeting: Meeting, giver: RuleForm, indexes: tuple[int, ...], state: str
    ) -> Iterator[tuple[Ints, str, Block]]:
        """Yield the ranks that want something of a meeting, where they put it, and the copy.

        The copies run backwards: out of the target's buffer, into the giver's whole tensor.
        """
        rule = meeting.rule
        at = _indexes(giver, indexes, meeting)
        zero = self.target.flat_axis(rule, at, state)
        stride = self.target.stride(rule, at, state)
        for cell in self.target.cells(meeting):
            holders = self.target.holders(rule, at, tuple(c.cell for c in cell), zero)
            for who, ranks in self.target.alike(rule, at, state, holders):
                whole = self.target.block(meeting, cell, who)
                lead = int(ranks[0])
                for part, name, found in self.target.buffers(rule, at, state, lead, whole):
                    yield ranks + part * stride, name, found


def _by_giver(found: Iterable[tuple[int, Iterable[Block]]]) -> GiverBlocks:
    out: dict[int, list[Block]] = {}
    for giver, blocks in found:
        out.setdefault(giver, []).extend(blocks)
    return tuple([(giver, tuple(blocks)) for giver, blocks in out.items()])


def averages(rule: RuleForm) -> tuple[Average, ...]:
    """Return what says that replicas of a rule are combined, and not one of them taken."""
    found = (m for m in rule.equation.modifiers if isinstance(m, Average))
    return tuple(m for m in found if rule.mesh.strides.get(m.axis))


def _averaged(rule: RuleForm) -> list[int]:
    """Return how far from the first the ranks are whose values are combined."""
    out = [0]
    for m in averages(rule):
        stride = rule.mesh.strides[m.axis]
        out = [a + i * stride for a in out for i in range(rule.mesh.extents[m.axis])]
    return out


def _indexes(rule: RuleForm, indexes: tuple[int, ...], meeting: Meeting) -> tuple[int, ...]:
    """Return the indexes of the tensor that a meeting leads to."""
    numbers = dict(zip(rule.indexes, indexes, strict=True))
    pairs = zip(meeting.rule.indexes, meeting.indexes, strict=True)
    return tuple(numbers[a] if n is None else n for a, n in pairs)


def _unravelled(cell: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(cell, shape))


def _slice(piece: LocalPiece, shape: tuple[int, ...]) -> Axis:
    """Return the cut of a whole tensor at the ends of what a rank's buffer has of it."""
    return Axis.from_sizes([piece.lo, piece.hi - piece.lo, math.prod(shape) - piece.hi])


def _own(found: Block, cut: Axis, piece: LocalPiece) -> Iterator[Block]:
    """Turn a copy around, and keep what is in the giver's buffer."""
    turned = found.turned()
    if len(cut.runs) == 1 and cut.ncells == 1:
        yield turned.moved(piece.at)
        return
    for _, start, part in cut_flat(turned, cut):
        if start == piece.lo:
            yield part.moved(piece.at - piece.lo)
