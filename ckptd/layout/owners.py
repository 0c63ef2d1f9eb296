"""Owner maps: which file holds which piece of a grid.

A map is a sequence of arithmetic runs ``(first file, step, count)`` over pieces in piece order,
plus a base that is added to every file number. Sharded layouts are regular, so a map of 16,384
owners is usually one run, and layers that differ only in their pipeline stage share one map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["ABSENT", "Owners", "single_owner"]

ABSENT = -1
"""File number of a piece that no file holds on purpose."""


@dataclass(frozen=True)
class Owners:
    """File number of each piece.

    Attributes
    ----------
    runs
        ``(first, step, count)``: pieces get ``first, first + step, ...``. ``(-1, 0, count)``
        marks absent pieces.

    Raises
    ------
    ValueError
        A run is empty, or goes below zero, or an absent run has a step.
    """

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        for first, step, count in self.runs:
            last = first + step * (count - 1)
            if count < 1 or first < ABSENT or (first == ABSENT and step != 0) or last < ABSENT:
                raise ValueError(f"bad owner run ({first}, {step}, {count})")
            if first != ABSENT and last < 0:
                raise ValueError(f"bad owner run ({first}, {step}, {count})")

    @staticmethod
    def from_array(files: Sequence[int] | NDArray[np.int64]) -> Owners:
        """Return the map of these file numbers, coded greedily into runs."""
        values = np.asarray(files, dtype=np.int64)
        runs: list[tuple[int, int, int]] = []
        i, n = 0, len(values)
        steps = np.diff(values)
        while i < n:
            if i + 1 == n or values[i] == ABSENT != values[i + 1] or values[i + 1] == ABSENT != values[i]:
                runs.append((int(values[i]), 0, 1))
                i += 1
                continue
            step = int(steps[i])
            breaks = np.flatnonzero(steps[i:] != step)
            count = (int(breaks[0]) if len(breaks) else n - 1 - i) + 1
            # A falling run must not slide into ABSENT, which is a mark and not a number.
            while step != 0 and count > 1 and values[i + count - 1] == ABSENT:
                count -= 1
            runs.append((int(values[i]), step if count > 1 else 0, count))
            i += count
        return Owners(tuple(runs))

    @cached_property
    def npieces(self) -> int:
        """Number of pieces the map speaks of."""
        return sum(count for _, _, count in self.runs)

    @cached_property
    def _first_pieces(self) -> NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum([c for _, _, c in self.runs]))).astype(np.int64)

    def owner(self, piece: int, base: int = 0) -> int:
        """Return the file number of `piece`, or `ABSENT`."""
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
        """Return the file number of every piece: as many values as there are pieces."""
        parts = [
            np.full(c, ABSENT, dtype=np.int64) if f == ABSENT else f + base + s * np.arange(c)
            for f, s, c in self.runs
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def single_owner(file: int) -> Owners:
    """Return the map of a one-piece grid."""
    return Owners(((file, 0, 1),))
