"""What becomes of a mistake in the program of a reader.

Ranks hold random values as the true layout says. The reader believes the mutant: it looks it up,
checks it, fits it to the names and shapes that it finds, plans, and copies into a checkpoint of
another layout. That one has a witness, from who wrote the true values. So a mistake ends in an
error, or in a witness that does not agree, or it was none: the brute force says whether the mutant
means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.format.witness import Witness, WitnessPlan, compare, gather
from ckptd.errors import CkptdError
from ckptd.lay.bind import bind_ranks, bind_sizes, bind_stored
from ckptd.lay.check import check, check_bound
from ckptd.lay.copies import compose
from ckptd.lay.live import Transfers
from ckptd.lay.local import local_tensors
from ckptd.lay.resolve import Bound, Resolved, raise_first, resolve
from ckptd.lay.syntax.tree import File
from tests.lay.agreement.brute import Brute, Numbering, filled
from tests.lay.agreement.brute_judge import apply

__all__ = ["Outcome", "Reader"]

Outcome: TypeAlias = Literal["check", "fit", "plan", "witness", "equal", "survivor"]
Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Reader:
    """A true layout, whose tensors are read as a mutant says, into another layout.

    Attributes
    ----------
    file
        The true program.
    layout, target
        Names of the layout that is read, and of the one that is written.
    sizes
        Sizes of all axes; the reader knows them.
    """

    file: File
    layout: str
    target: str
    sizes: Mapping[str, int]
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    # --- the truth ------------------------------------------------------------------------------

    @cached_property
    def _bounds(self) -> tuple[Bound, Bound]:
        here, there = (
            bind_sizes(resolve([self.file], name), self.sizes)
            for name in (self.layout, self.target)
        )
        return here, there

    @cached_property
    def true(self) -> Brute:
        """What the layout that is read means."""
        return Brute(self._bounds[0], Numbering.of(*self._bounds))

    @cached_property
    def written(self) -> Brute:
        """What the layout that is written means."""
        return Brute(self._bounds[1], Numbering.of(*self._bounds))

    @cached_property
    def values(self) -> dict[str, Values]:
        """Random values by state, one for each cell."""
        n = self.true.numbering.total
        states = sorted({*self.true.states, *self.written.states})
        return {s: self._rng.integers(1, 2**32, n, np.uint32) for s in states}

    @cached_property
    def held(self) -> dict[tuple[int, str], Values]:
        """What lies on the ranks, by rank and name."""
        return {
            (rank, name): filled(self.true, cells, self.values[state]).astype(np.uint32)
            for rank in range(self.true.mesh.world)
            for name, (state, cells) in self.true.local(rank).items()
        }

    @cached_property
    def _flat(self) -> dict[tuple[int, str], Values]:
        return {key: array.reshape(-1) for key, array in self.held.items()}

    @cached_property
    def shapes(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Shapes of what lies on the ranks."""
        out: dict[int, dict[str, tuple[int, ...]]] = {}
        for (rank, name), array in self.held.items():
            out.setdefault(rank, {})[name] = array.shape
        return {r: out.get(r, {}) for r in range(self.true.mesh.world)}

    @cached_property
    def plan(self) -> WitnessPlan:
        """Positions that the witness looks at."""
        stored = self.written.stored()
        return WitnessPlan([(n, c.shape, 4, True) for n, (_, c) in stored.items()])

    @cached_property
    def witness(self) -> Witness:
        """The witness of who wrote the values."""
        return self._witness(self.values)

    def _witness(self, values: Mapping[str, Values]) -> Witness:
        out = Witness.empty(self.plan)
        stored = self.written.stored()
        for i, name in enumerate(self.plan.names):
            state, cells = stored[name]
            tensor = filled(self.written, cells, values[state]).astype(np.uint32)
            slots = np.arange(self.plan.starts[i], self.plan.starts[i + 1])
            found = gather(tensor.reshape(-1).view(np.uint8), 4, self.plan.positions(i))
            out.put(slots, found)
        return out

    # --- a mutant -------------------------------------------------------------------------------

    def outcome(self, file: File) -> tuple[Outcome, str]:
        """Return what becomes of a mutant, and in which words."""
        stage: Outcome = "check"
        try:
            resolved = resolve([file], self.layout)
            raise_first(check(resolved))
            stage = "fit"
            bound = self._bound(resolved)
            stage = "plan"
            values = self._read(bound)
        except CkptdError as error:
            return stage, str(error)
        wrong = compare(self.plan, self.witness, self._witness(values))
        if wrong:
            return "witness", f"{wrong[0].tensor}: {wrong[0].wrong} of {wrong[0].checked}"
        return ("equal" if self._is_same(bound) else "survivor"), ""

    def _bound(self, resolved: Resolved) -> Bound:
        """Bind the mutant to what lies on the ranks."""
        if resolved.mesh is None:
            bound = bind_stored(resolved, self.shapes[0], self.sizes)
            raise_first(check_bound(bound, self.shapes[0]))
        elif resolved.flats:
            # What is in buffers has no name on the ranks.
            bound = bind_sizes(resolved, self.sizes)
            raise_first(check_bound(bound))
        else:
            bound = bind_ranks(resolved, self.shapes, self.sizes)
            raise_first(check_bound(bound, self.shapes))
        # Buffers of flats are no tensors of rules; whoever fills or reads them knows their names
        # and lengths.
        form = compose(bound, bound).source
        for rank, found in self.shapes.items():
            wanted = {t.name: t.shape for t in local_tensors(form, rank)}
            if wanted != found:
                name = next(n for n in (*wanted, *found) if wanted.get(n) != found.get(n))
                raise CkptdError(
                    "a tensor of a rank is another one than the layout says",
                    kind="lay-fit",
                    where=f"{name} of rank {rank}",
                    wanted=wanted.get(name),
                    found=found.get(name),
                )
        return bound

    def _read(self, bound: Bound) -> dict[str, Values]:
        """Return the values that the mutant reads, by state and cell."""
        out = {s: np.zeros_like(v) for s, v in self.values.items()}
        transfers = Transfers(compose(bound, self._bounds[1]))
        # The lowest rank counts, as in a checkpoint.
        for rank in reversed(range(self.written.mesh.world)):
            cells = self.written.local(rank)
            for tensor, plan in transfers.local(rank):
                found = apply(plan, self._flat, float, np.float64).astype(np.uint32)
                state, numbers = cells[tensor.name]
                flat = numbers.reshape(-1)
                out[state][flat[flat >= 0]] = found[flat >= 0]
        return out

    def _is_same(self, bound: Bound) -> bool:
        """Whether a mutant means the same as the true layout, cell by cell, on all ranks."""
        other = Brute(bound, self.true.numbering)
        for rank in range(self.true.mesh.world):
            mine, its = self.true.local(rank), other.local(rank)
            if mine.keys() != its.keys():
                return False
            for name, (_, cells) in mine.items():
                found = its[name][1]
                if cells.shape != found.shape or not np.array_equal(
                    _with_fills(self.true, cells), _with_fills(other, found)
                ):
                    return False
        return True


def _with_fills(meaning: Brute, cells: NDArray[np.int64]) -> NDArray[np.floating[Any]]:
    """Return cells as numbers, with the values of fills as fractions below zero."""
    fills = np.array(meaning.fills)
    number = np.minimum(np.maximum(-1 - cells, 0), len(fills) - 1)
    return np.where(cells >= 0, cells, -0.5 - np.arctan(fills[number]) / 8)
