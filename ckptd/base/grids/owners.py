"""`Owners`: which file holds which piece of a grid, as arithmetic runs.

A map is a sequence of arithmetic runs ``(first file, step, count)`` over pieces in piece order,
plus a base that is added to every file number. Sharded layouts are regular, so a map of 16,384
owners is usually one run, and layers that differ only in their pipeline stage share one map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

ABSENT = -1
"""File number of a piece that no file holds on purpose."""

_MAX = 2**63 - 1
_MAX_ARRAY = 2**27


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values that there are, rising."""
    # Counts, since without them numpy asks for masks: 10 ms of imports in each new process.
    return np.unique(values, return_counts=True)[0]


class Owners(msgspec.Struct, frozen=True, dict=True):
    """File number of each piece.

    Attributes
    ----------
    runs
        ``(first, step, count)``: pieces get ``first, first + step, ...``. ``(-1, 0, count)``
        marks absent pieces.

    Raises
    ------
    ValueError
        A run is empty or not of ints, goes below zero or beyond int64, or an absent run has a
        step.
    """

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        pieces = 0
        for run in self.runs:
            if not _is_run(*run):
                raise ValueError(f"bad owner run {run}")
            pieces += run[2]
        if pieces > _MAX:
            raise ValueError(f"owners of {pieces} pieces")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.runs)

    @staticmethod
    def from_array(files: Sequence[int] | NDArray[np.int64]) -> Owners:
        """Return the map of these file numbers, coded greedily into runs.

        Raises
        ------
        ValueError
            A number is below `ABSENT`.
        """
        values = np.asarray(files, dtype=np.int64)
        n = len(values)
        if n and int(values.min()) < ABSENT:
            raise ValueError(f"file number {int(values.min())}")
        # Where a run that starts at i must end at the latest: where the step changes, and where
        # absence starts or ends. Absence is a mark and not a number: no step leads to it.
        steps = np.diff(values)
        absent = np.diff((values == ABSENT).astype(np.int8))
        bends = np.flatnonzero(np.diff(steps)) + 1
        walls = np.flatnonzero(absent) + 1
        runs: list[tuple[int, int, int]] = []
        i = 0
        while i < n:
            wall = _first_after(walls, i, n)
            end = min(_first_after(bends, i, n - 1) + 1, wall)
            step = int(steps[i]) if end - i > 1 else 0
            runs.append((int(values[i]), step, end - i))
            i = end
        return Owners(tuple(runs))

    @cached_property
    def npieces(self) -> int:
        """Number of pieces the map speaks of."""
        return sum(count for _, _, count in self.runs)

    @cached_property
    def has_absent(self) -> bool:
        """Whether any piece is absent."""
        return any(first == ABSENT for first, _, _ in self.runs)

    @cached_property
    def _first_pieces(self) -> NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum([c for _, _, c in self.runs]))).astype(np.int64)

    def owner(self, piece: int, base: int = 0) -> int:
        """Return the file number of `piece`, or `ABSENT`.

        Raises
        ------
        IndexError
            The map does not speak of that piece.
        """
        if not 0 <= piece < self.npieces:
            raise IndexError(f"piece {piece} of {self.npieces}")
        run = 0
        if len(self.runs) > 1:
            run = int(np.searchsorted(self._first_pieces, piece, side="right")) - 1
        first, step, _ = self.runs[run]
        if first == ABSENT:
            return ABSENT
        return first + step * (piece - int(self._first_pieces[run])) + base

    def pieces_of(self, file: int, base: int = 0) -> Iterator[int]:
        """Yield the pieces that `file` holds, in piece order: work grows with the runs."""
        wanted = file - base
        start = 0
        for first, step, count in self.runs:
            if first != ABSENT and wanted >= 0:
                if step == 0:
                    if first == wanted:
                        yield from range(start, start + count)
                elif (wanted - first) % step == 0 and 0 <= (wanted - first) // step < count:
                    yield start + (wanted - first) // step
            start += count

    def highest(self, base: int = 0) -> int:
        """Return the highest file number in use, or `ABSENT`."""
        ends = [max(f, f + s * (c - 1)) for f, s, c in self.runs if f != ABSENT]
        return max(ends) + base if ends else ABSENT

    def array(self, base: int = 0) -> NDArray[np.int64]:
        """Return the file number of every piece: as many values as there are pieces.

        Raises
        ------
        ValueError
            There are more pieces than anybody wants in memory; ask `owner` instead.
        """
        if self.npieces > _MAX_ARRAY:
            raise ValueError(f"an array of {self.npieces} owners")
        parts = [
            np.full(c, ABSENT, dtype=np.int64) if f == ABSENT else f + base + s * np.arange(c)
            for f, s, c in self.runs
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _is_run(first: int, step: int, count: int) -> bool:
    if any(type(v) is not int for v in (first, step, count)) or count < 1:
        return False
    if first == ABSENT:
        return step == 0
    last = first + step * (count - 1)
    return first >= 0 and last >= 0 and max(first, last, abs(step)) <= _MAX


def _first_after(positions: NDArray[np.int64], i: int, default: int) -> int:
    """Return the first of the sorted `positions` beyond `i`, or `default`."""
    at = int(np.searchsorted(positions, i, side="right"))
    return int(positions[at]) if at < len(positions) else default


def single_owner(file: int) -> Owners:
    """Return the map of a one-piece grid."""
    return Owners(((file, 0, 1),))
