"""Cutting the writing of several files into rounds that fit the budget.

The files grow front to back and in step: a round goes up to the same tensor in all of them (or to
the same part of a large one), so that bytes of the source that several files want are read once.
Rounds end at digest blocks; what is left of a block waits for the next round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.format.digest import BLOCK_BYTES
from ckptd.format.filemap import FileMap

__all__ = ["Stretch", "cut_rounds"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes ``[lo, hi)`` of the data section of file number `file`."""

    file: int
    lo: int
    hi: int


def cut_rounds(filemap: FileMap, files: Sequence[int], limit: int) -> Iterator[list[Stretch]]:
    """Yield what each round writes; empty files never appear.

    Parameters
    ----------
    filemap
        Of the target.
    files
        The files that grow in step.
    limit
        Most bytes of a round; one block a file is allowed in any case.
    """
    sizes = np.array([filemap.data_bytes(f) for f in files], dtype=np.int64)
    at = np.zeros_like(sizes)
    best = at
    for end in _ends(filemap, files, limit // 2):
        there = np.where(end == sizes, end, end // BLOCK_BYTES * BLOCK_BYTES)
        if int((there - at).sum()) > limit and (best > at).any():
            yield _stretches(files, at, best)
            at = best
        best = there
    if (best > at).any():
        yield _stretches(files, at, best)


def _stretches(files: Sequence[int], lo: I64, hi: I64) -> list[Stretch]:
    return [
        Stretch(f, a, b) for f, a, b in zip(files, lo.tolist(), hi.tolist(), strict=True) if b > a
    ]


def _ends(filemap: FileMap, files: Sequence[int], most: int) -> Iterator[I64]:
    """Yield where each file stands after each tensor, or after each part of a large one."""
    starts = np.stack([filemap.starts(f)[:-1][filemap.order] for f in files])
    sizes = np.array([filemap.data_bytes(f) for f in files], dtype=np.int64)
    ends = np.concatenate((starts[:, 1:], sizes[:, None]), axis=1)
    widths = (ends - starts).sum(axis=0)
    for j in np.flatnonzero(widths).tolist():
        count = max(1, -(-int(widths[j]) // max(1, most)))
        for i in range(1, count + 1):
            # Divided first: a product with the length of a part could leave int64.
            whole, rest = np.divmod(ends[:, j] - starts[:, j], count)
            yield starts[:, j] + whole * i + rest * i // count
