"""Compares what is computed with intervals with what the brute force says, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.grid import Piece
from ckptd.lay.copies import Composition, Copy, TargetPlan, compose
from ckptd.lay.live import LiveCopy, LivePlan, Transfers
from ckptd.lay.resolve import Bound
from ckptd.lay.syntax.tree import Alias
from tests.lay.agreement.brute import Brute, Cells, Numbering

__all__ = ["Judge", "apply", "piece_of", "positions"]

_Way: TypeAlias = tuple[int, str, int, str]
"""Rank and name in the source, rank and name in the target."""


def positions(start: int, steps: Iterable[tuple[int, int]]) -> Cells:
    """Return the positions of a strided box in a buffer, in order of its dimensions."""
    each = [np.arange(n, dtype=np.int64) * stride for n, stride in steps]
    return reduce(np.add.outer, each, np.array(start, dtype=np.int64)).reshape(-1)


def piece_of(tensor: NDArray[Any], piece: Piece) -> NDArray[Any]:
    """Return what a piece of a stored tensor holds, as its chunk has it."""
    box = piece.box
    where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    found = tensor[where].reshape(-1)
    return found if piece.flat is None else found[slice(*piece.flat)]


def apply(
    plan: TargetPlan | LivePlan,
    sources: Mapping[Any, NDArray[Any]],
    fill: Callable[[float], Any],
    dtype: Any,
    change: Callable[[Any, NDArray[Any]], NDArray[Any]] = lambda copy, x: x,
    whole: bool = True,
) -> NDArray[Any]:
    """Carry a plan out.

    Parameters
    ----------
    plan
        How a buffer is filled.
    sources
        Contents of the pieces of stored source tensors, by name and number; for a plan of live
        ranks those of their tensors, by rank and name.
    fill
        Returns what to write for a fill.
    dtype
        Of the buffer.
    change
        What happens to the values of a copy.
    whole
        Whether the plan has to write everything.

    Raises
    ------
    AssertionError
        An element is written twice, or never.
    """
    out = np.zeros(plan.numel, dtype=dtype)
    # An element that several ranks give a part of is written once by each of them.
    times = np.zeros(plan.numel)
    for copy in plan.copies:
        source = sources[_key(copy)]
        for b in copy.blocks:
            read, written = _both(b)
            assert written.size == 0 or (written.min() >= 0 and read.min() >= 0)
            out[written] = change(copy, source[read])
            np.add.at(times, written, 1 / copy.of if isinstance(copy, LiveCopy) else 1)
    for f in plan.fills:
        written = _fill_positions(f)
        out[written] = fill(f.value)
        np.add.at(times, written, 1)
    assert not whole or (np.abs(times - 1) < 1e-6).all(), f"written {times.tolist()} times"
    return out


def _key(copy: Copy | LiveCopy) -> object:
    if isinstance(copy, LiveCopy):
        return copy.rank, copy.name
    return copy.source.name, copy.piece


def _pairs(block: Block) -> Cells:
    """Return what a block reads and writes, as one number for each element."""
    read, written = _both(block)
    return read * 2**31 + written


def _sorted(ways: Mapping[_Way, list[Cells]]) -> dict[_Way, list[int]]:
    found = {way: np.sort(np.concatenate(pairs)).tolist() for way, pairs in ways.items()}
    return {way: pairs for way, pairs in found.items() if pairs}


def _both(block: Block) -> tuple[Cells, Cells]:
    read = positions(block.source_start, zip(block.shape, block.source_strides, strict=True))
    return read, positions(block.target_start, zip(block.shape, block.target_strides, strict=True))


def _fill_positions(fill: Fill) -> Cells:
    return positions(fill.start, fill.steps)


class Judge:
    """The brute force on both sides of a composition."""

    def __init__(self, source: Bound, target: Bound) -> None:
        numbering = Numbering.of(source, target)
        self.source = Brute(source, numbering)
        self.target = Brute(target, numbering)
        self.composition: Composition = compose(source, target)
        self.pieces: dict[tuple[str, int], Cells] = {}
        """Cells of each piece of each stored source tensor."""

    def check(self, live: bool = True) -> None:
        """Compare everything.

        Parameters
        ----------
        live
            Whether to compare transfers between live ranks too; they take most of the time.

        Raises
        ------
        AssertionError
            The first difference, in words.
        """
        self.check_stored()
        self.check_owners()
        self.check_ranks()
        self.check_pieces()
        if live:
            self.check_live()

    def check_stored(self) -> None:
        """Names and shapes of stored tensors are what they should be."""
        for side, form in (
            (self.source, self.composition.source),
            (self.target, self.composition.target),
        ):
            wanted = {n: c.shape for n, (_, c) in side.stored().items()}
            assert {t.name: t.shape for t in form.tensors()} == wanted
        stored = self.source.stored()
        for tensor in self.composition.source.tensors():
            cells = stored[tensor.name][1]
            for i in range(tensor.grid.npieces):
                self.pieces[tensor.name, i] = piece_of(cells, tensor.grid.piece(i))

    def check_owners(self) -> None:
        """The rank that a piece belongs to holds all of it, and no lower one has any of it."""
        held = [
            {
                state: np.unique(np.concatenate([c.reshape(-1) for s, c in found if s == state]))
                for state in {s for s, _ in found}
            }
            for r in range(self.source.mesh.world)
            for found in [list(self.source.local(r).values())]
        ]
        for tensor in self.composition.source.tensors():
            flat = self.composition.source.packing.flat_of(
                tensor.rule, tensor.indexes, tensor.state
            )
            for i in range(tensor.grid.npieces):
                cells = self.pieces[tensor.name, i]
                real = cells[cells >= 0]
                owner = tensor.owners.owner(i, tensor.base)
                assert 0 <= owner < self.source.mesh.world
                if not real.size:
                    continue
                mine = held[owner][tensor.state]
                assert np.isin(real, mine).all(), f"rank {owner} lacks {tensor.name} piece {i}"
                if flat is None and not self._has_alias():
                    lower = [
                        r
                        for r in range(owner)
                        if np.isin(real, held[r].get(tensor.state, ())).any()
                    ]
                    assert not lower, f"rank {lower} holds {tensor.name} piece {i} before {owner}"

    def _has_alias(self) -> bool:
        return any(isinstance(m, Alias) for e in self.source.layout.equations for m in e.modifiers)

    def check_ranks(self) -> None:
        """Each tensor of each rank of the target gets the cells that it should hold."""
        for rank in range(self.target.mesh.world):
            wanted = self.target.local(rank)
            seen = set()
            for tensor, plan in self.composition.local(rank):
                assert tensor.name in wanted, f"rank {rank} has no {tensor.name}: {list(wanted)}"
                state, cells = wanted[tensor.name]
                assert (tensor.state, tensor.shape) == (state, cells.shape), tensor.name
                self._same(plan, cells, f"{tensor.name} of rank {rank}")
                seen.add(tensor.name)
            assert seen == set(wanted), f"rank {rank} lacks {set(wanted) - seen}"

    def check_pieces(self) -> None:
        """Each piece of each stored tensor of the target gets the cells that it should hold."""
        stored = self.target.stored()
        form = self.composition.target
        for name, key in form.by_name.items():
            tensor = form.tensor(*key)
            for i in range(tensor.grid.npieces):
                wanted = piece_of(stored[name][1], tensor.grid.piece(i))
                self._same(self.composition.piece(key, i), wanted, f"piece {i} of {name}")

    def check_live(self) -> None:
        """Each rank of the target takes the cells that it should hold from ranks of the source.

        And what each rank of the source gives, which it plans by itself, is what is taken.
        """
        transfers = Transfers(self.composition)
        held = {
            (rank, name): cells.reshape(-1)
            for rank in range(self.source.mesh.world)
            for name, (_, cells) in self.source.local(rank).items()
        }
        taken: dict[_Way, list[Cells]] = {}
        for rank in range(self.target.mesh.world):
            wanted = self.target.local(rank)
            for tensor, plan in transfers.local(rank):
                cells = wanted[tensor.name][1]
                what = f"{tensor.name} of live rank {rank}"
                found = apply(plan, held, self._fill, np.int64)
                assert np.array_equal(found, cells.reshape(-1)), self._difference(
                    found, cells, what
                )
                for copy in plan.copies:
                    way = (copy.rank, copy.name, rank, tensor.name)
                    taken.setdefault(way, []).extend(map(_pairs, copy.blocks))
        given: dict[_Way, list[Cells]] = {}
        for rank in range(self.source.mesh.world):
            for sent in transfers.sent(rank):
                way = (rank, sent.source, sent.rank, sent.target)
                given.setdefault(way, []).extend(map(_pairs, sent.blocks))
        assert _sorted(given) == _sorted(taken), "what is given is not what is taken"

    def _same(self, plan: TargetPlan, cells: Cells, what: str) -> None:
        assert plan.numel == cells.size, what
        found = apply(plan, self.pieces, self._fill, np.int64)
        assert np.array_equal(found, cells.reshape(-1)), self._difference(found, cells, what)

    def _fill(self, value: float) -> int:
        assert value in self.target.fills
        return -1 - self.target.fills.index(value)

    def _difference(self, found: Cells, cells: Cells, what: str) -> str:
        at = int(np.flatnonzero(found != cells.reshape(-1))[0])
        numbering = self.target.numbering
        return (
            f"element {at} of {what} {cells.shape} is {numbering.name(int(found[at]))} "
            f"and should be {numbering.name(int(cells.reshape(-1)[at]))}"
        )
