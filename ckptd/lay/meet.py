"""Where a part of a target meets a source's rules: copies as lattices, cut by the source's grid.

In stored form a rule has no splits, so each family lies in its tensor as one lattice a dimension.
A part of a target, a box over the same axes, is then a lattice in the source as well: a *meeting*
says so without looking at any cell of either side. What is left is to cut it by the source's grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

from ckptd.base.grids.block import Block
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.lattice import first_from, within
from ckptd.errors import MismatchError
from ckptd.lay.boxes import Run
from ckptd.lay.resolve import Tags
from ckptd.lay.ruleform import RuleForm


class BlockStep(NamedTuple):
    """One dimension of a copy: `size` elements, `source` and `target` apart."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """Elements that a source rule has in common with a part of a target.

    Compared by identity, so that it is a key of the cache of values computed from it.

    Attributes
    ----------
    rule
        The source rule.
    indexes
        For each index of its name the number, or None: that of the target tensor.
    dims
        For each of its dimensions the position of the first element, and the steps, outermost
        first; sources in entries of the dimension, targets in elements of the target buffer.
    target
        Position of the first element in the target buffer.
    """

    rule: RuleForm
    indexes: tuple[int | None, ...]
    dims: tuple[tuple[int, tuple[BlockStep, ...]], ...]
    target: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(s.size for _, steps in self.dims for s in steps)


def meetings(
    ranges: Mapping[str, Run],
    names: Sequence[str],
    start: int,
    holders: Sequence[tuple[RuleForm, Tags]],
    where: str,
) -> Iterator[Meeting]:
    """Yield what source rules hold of a box over axes.

    Parameters
    ----------
    ranges
        First index, number and distance in the target buffer, by axis.
    names
        Axes whose index is in the target's name, and in the source's if it has it there: the
        numbers agree, whatever they are.
    start
        Position of the first element in the target buffer.
    holders
        Source rules of the family and the tags that lead there; the first that holds an element
        gives it.
    where
        The family, for messages.

    Raises
    ------
    MismatchError
        No rule holds some of it.
    """
    left = [(dict(ranges), start)]
    for rule, tags in holders:
        rest: list[tuple[dict[str, Run], int]] = []
        for box, at in left:
            for inside in _narrowed(box, at, rule, rest):
                yield from _meet(*inside, names, rule, tags)
        left = rest
    missing = [box for box, _ in left if all(r.size for r in box.values())]
    if missing:
        shown = " ".join(f"{a}={r.start}..{r.start + r.size - 1}" for a, r in missing[0].items())
        raise MismatchError(
            "the source lacks this tensor, or a part of it",
            kind="lay-cover",
            where=where,
            wanted=shown,
        )


def every_meeting(
    ranges: Mapping[str, Run],
    names: Sequence[str],
    start: int,
    holders: Sequence[tuple[RuleForm, Tags]],
    before: Sequence[tuple[RuleForm, Tags]],
) -> Iterator[Meeting]:
    """Yield what each of some rules holds of a box over axes, whatever the others hold.

    Parameters
    ----------
    ranges, names, start, holders
        As in `meetings`.
    before
        Rules that take their part of the box first; nothing of it is left for `holders`.
    """
    left = [(dict(ranges), start)]
    for rule, _ in before:
        rest: list[tuple[dict[str, Run], int]] = []
        for box, at in left:
            _narrowed(box, at, rule, rest)
        left = rest
    for rule, tags in holders:
        for box, at in left:
            for inside in _narrowed(box, at, rule, []):
                yield from _meet(*inside, names, rule, tags)


_Box = tuple[dict[str, Run], int]
"""First index, number and distance by axis; position of the first element."""


def _narrowed(box: dict[str, Run], at: int, rule: RuleForm, rest: list[_Box]) -> list[_Box]:
    """Narrow a box to what a rule has; put what it leaves into `rest`."""
    inside = _pinned(box, at, rule, rest)
    found = [] if inside is None else [inside]
    for axis, numbers in rule.equation.only.items():
        kept: list[_Box] = []
        for part, start in found:
            run = part.get(axis)
            if run is None:
                kept.append((part, start))
                continue
            which = [numbers.has(run.start + i) for i in range(run.size)]
            for has, group in groupby(range(run.size), which.__getitem__):
                mine = list(group)
                piece = run._replace(start=run.start + mine[0], size=len(mine))
                where = kept if has else rest
                where.append(({**part, axis: piece}, start + mine[0] * run.stride))
        found = kept
    return found


def _pinned(
    box: dict[str, Run], at: int, rule: RuleForm, rest: list[tuple[dict[str, Run], int]]
) -> tuple[dict[str, Run], int] | None:
    """Narrow a box to the indexes that a rule's reference says; put what it leaves into `rest`."""
    for axis, number in rule.equation.pinned.items():
        run = box[axis]
        before, behind = number - run.start, run.start + run.size - number - 1
        if before < 0 or behind < 0:
            rest.append((box, at))
            return None
        if before:
            rest.append(({**box, axis: run._replace(size=before)}, at))
        if behind:
            later = run._replace(start=number + 1, size=behind)
            rest.append(({**box, axis: later}, at + (before + 1) * run.stride))
        box = {**box, axis: run._replace(start=number, size=1)}
        at += before * run.stride
    return box, at


def _meet(
    box: Mapping[str, Run], at: int, names: Sequence[str], rule: RuleForm, tags: Tags
) -> Iterator[Meeting]:
    """Yield a meeting for each tensor of a rule that has something of a box."""
    choices: list[list[tuple[int | None, int]]] = []
    for axis in rule.indexes:
        if axis in names:
            choices.append([(None, 0)])
        elif axis not in box:
            # Copies (alias) under several numbers of what has none: each gets all of it.
            choices.append([(n, 0) for n in rule.numbers(axis)])
        else:
            run = box[axis]
            choices.append([(run.start + i, i * run.stride) for i in range(run.size)])
    found = rule.whole.get(tags)
    if found is None:
        return
    dims = []
    for dim in found:
        first = dim.start
        steps = []
        for run in dim.runs:
            wanted = box[run.axis]
            first += wanted.start * run.stride
            steps.append(BlockStep(wanted.size, run.stride, wanted.stride))
        dims.append((first, tuple(steps)))
    for choice in product(*choices):
        yield Meeting(
            rule, tuple(n for n, _ in choice), tuple(dims), at + sum(shift for _, shift in choice)
        )


class Crossing(NamedTuple):
    """Part of a meeting that lies in one cell of one dimension.

    Attributes
    ----------
    cell, size
        Number of the cell and its length.
    offset
        Position of the first element in the cell.
    steps
        As in the meeting.
    target
        Added to the position in the target buffer.
    """

    cell: int
    size: int
    offset: int
    steps: tuple[BlockStep, ...]
    target: int


def crossings(first: int, steps: tuple[BlockStep, ...], axis: Axis) -> Iterator[Crossing]:
    """Yield what one dimension of a meeting has in each cell that it touches.

    Parameters
    ----------
    first, steps
        One of `Meeting.dims`.
    axis
        The cells.
    """
    steps = _joined(steps)
    if len(steps) < 2 and all(s.source == 1 for s in steps):
        yield from _interval(first, steps[0] if steps else BlockStep(1, 1, 0), axis)
        return
    lattice = [(s.size, s.source) for s in steps]
    at = first_from(lattice, 0) if all(s.size for s in steps) else None
    while at is not None:
        cell = axis.cell_at(first + at)
        start, size = axis.cell(cell)
        for position, ranges in within(lattice, start - first, start + size - first):
            shift = sum(i * s.target for (i, _), s in zip(ranges, steps, strict=True))
            found = tuple(
                BlockStep(n, s.source, s.target) for (_, n), s in zip(ranges, steps, strict=True)
            )
            yield Crossing(cell, size, first + position - start, found, shift)
        at = first_from(lattice, start + size - first)


def _interval(first: int, step: BlockStep, axis: Axis) -> Iterator[Crossing]:
    """Yield the crossings of neighbours: what is left of most dimensions, and long for some."""
    end = first + step.size
    at, width, steps = first, -1, (step,)
    while at < end:
        cell = axis.cell_at(at)
        start, size = axis.cell(cell)
        n = min(end, start + size) - at
        if n != width:
            width, steps = n, (BlockStep(n, 1, step.target),)
        yield Crossing(cell, size, at - start, steps, (at - first) * step.target)
        at += n


def _joined(steps: Sequence[BlockStep]) -> tuple[BlockStep, ...]:
    """Leave out dimensions of one, and join neighbours that step on alike on both sides."""
    out: list[BlockStep] = []
    for size, source, target in steps:
        if size == 1:
            continue
        last = out[-1] if out else None
        if last is not None and (last.source, last.target) == (source * size, target * size):
            out[-1] = BlockStep(last.size * size, source, target)
        else:
            out.append(BlockStep(size, source, target))
    return tuple(out)


def piece_blocks(meeting: Meeting, grid: Grid) -> Iterator[tuple[int, Block]]:
    """Yield ``(piece, block)`` for each piece of the source tensor that a meeting touches.

    Parameters
    ----------
    meeting
        The meeting.
    grid
        The source tensor's pieces; blocks are relative to a piece's first element.
    """
    partials: list[_Partial] = [(0, 1, 0, meeting.target, ())]
    cells = 1
    # Cells repeat a few shapes; each is worked out once.
    made: dict[tuple[object, ...], tuple[BlockStep, ...]] = {}
    lowest: dict[tuple[BlockStep, ...], _Lowest] = {}
    for (first, steps), axis in zip(reversed(meeting.dims), reversed(grid.axes), strict=True):
        found = list(crossings(first, steps, axis))
        partials = [_extended(p, c, cells, made) for c in found for p in partials]
        cells *= axis.ncells
    for cell, _, source, target, all_steps in partials:
        shape = lowest.get(all_steps)
        if shape is None:
            shape = lowest[all_steps] = _lowest(all_steps)
        whole = Block(shape[0], source, shape[1], target, shape[2])
        flat = grid.flat_axis(cell)
        if flat is None:
            yield cell, whole
        else:
            piece = grid.first_piece(cell)
            for part, start, block_in_flat in cut_flat(whole, flat):
                yield piece + part, block_in_flat.moved(-start)


_Partial = tuple[int, int, int, int, tuple[BlockStep, ...]]
"""Cell number, cell elements, source start, target start and steps of the dimensions done."""

_Lowest = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shape, source strides and target strides of a block."""


def _extended(
    partial: _Partial,
    c: Crossing,
    cells: int,
    made: dict[tuple[object, ...], tuple[BlockStep, ...]],
) -> _Partial:
    """Add one dimension's crossing to those inside of it."""
    cell, numel, source, target, inner = partial
    key = (c.steps, numel, inner)
    steps = made.get(key)
    if steps is None:
        steps = made[key] = (*(BlockStep(n, s * numel, t) for n, s, t in c.steps), *inner)
    cell += c.cell * cells
    return cell, numel * c.size, source + c.offset * numel, target + c.target, steps


def block(source: int, target: int, steps: Sequence[BlockStep]) -> Block:
    """Return a copy in lowest terms: in the order of the target, neighbours joined."""
    shape, sources, targets = _lowest(steps)
    return Block(shape, source, sources, target, targets)


def _lowest(steps: Sequence[BlockStep]) -> _Lowest:
    kept = _joined(sorted(steps, key=lambda s: (-s.target, -s.source)))
    return (
        tuple(s.size for s in kept),
        tuple(s.source for s in kept),
        tuple(s.target for s in kept),
    )


def cut_flat(whole: Block, flat: Axis) -> Iterator[tuple[int, int, Block]]:
    """Yield ``(range, its start, block)`` for each range of a buffer that a block reads.

    Parameters
    ----------
    whole
        A copy out of a row-major buffer.
    flat
        How the buffer is cut.
    """
    order = sorted(range(len(whole.shape)), key=lambda d: -whole.source_strides[d])
    steps = [
        BlockStep(whole.shape[d], whole.source_strides[d], whole.target_strides[d]) for d in order
    ]
    for c in crossings(whole.source_start, tuple(steps), flat):
        start = flat.cell(c.cell)[0]
        yield c.cell, start, block(start + c.offset, whole.target_start + c.target, c.steps)
