"""Who of one host reads which blocks, and in how many waves.

Every rank of a host publishes the blocks it needs; from the same sets each computes the same
schedule, so nobody is asked and nobody leads. A block is brought and checked by one rank, chosen
so that bytes are balanced and, where possible, by one that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ckptd.engine.blocks import (
    BlockLine,
    Runs,
    clip,
    coalesce,
    count,
    cut_runs,
    merge,
    no_runs,
    sweep,
)

__all__ = ["Schedule", "Wave", "assign", "make_schedule"]

LEAST_BLOCKS = 4
"""Smallest budget that a read can be cut to, in blocks."""

_MOST_SPAN_BLOCKS = 4
_SMALL_BLOCKS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """A part of a read that fits the budget.

    Attributes
    ----------
    start, end
        Moves whose first block lies in this stretch of the line belong to the wave.
    layout
        Blocks that are in memory during the wave.
    needed
        Those of them that any rank needs.
    mine
        Those that this rank brings and checks.
    """

    start: int
    end: int
    layout: Runs
    needed: Runs
    mine: Runs


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """All waves of one rank. `span_bytes`: what one move may span, so that it fits its wave."""

    waves: list[Wave]
    span_bytes: int
    most_blocks: int

    @property
    def mine(self) -> Runs:
        """Blocks that this rank brings in any wave."""
        return merge(np.concatenate([no_runs(), *(w.mine for w in self.waves)]))


def make_schedule(
    line: BlockLine, needs: Sequence[Runs], me: int, *, budget_blocks: int, gap: int
) -> Schedule:
    """Cut a host's read into waves and say what local rank `me` brings.

    Parameters
    ----------
    needs
        Blocks that each local rank needs.
    budget_blocks
        Blocks that may be in memory at a time; at least `LEAST_BLOCKS` are assumed.
    gap
        Holes of so many blocks may be read along, and get room.
    """
    budget = max(budget_blocks, LEAST_BLOCKS)
    span = min(_MOST_SPAN_BLOCKS, budget // 4)
    everybody = merge(np.concatenate([no_runs(), *needs]))
    room = coalesce(everybody, gap, everybody)
    if not len(room):
        return Schedule([], span << 20, 0)
    if count(room) <= budget:
        cuts = [int(room[0, 0]), int(room[-1, 1])]
    else:
        cuts = cut_runs(room, budget - span - 1)
    waves = []
    for start, end in pairwise(cuts):
        # A move that begins before `end` may reach beyond it, into the next wave's blocks.
        reach = (
            min(end + span + 1, line.first(line.file_at(end - 1) + 1)) if end != cuts[-1] else end
        )
        segments, members = sweep([clip(n, start, reach) for n in needs])
        waves.append(
            Wave(
                start,
                end,
                clip(room, start, reach),
                clip(everybody, start, reach),
                assign(segments, members)[me],
            )
        )
    return Schedule(waves, span << 20, max(count(w.layout) for w in waves))


def assign(segments: Runs, members: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[Runs]:
    """Give each segment to ranks, so that all bring alike much.

    Parameters
    ----------
    segments, members
        As `ckptd.engine.blocks.sweep` returns them.

    Returns
    -------
    list[Runs]
        Each rank's blocks. Segments that few need are given out first, each to those who need
        it and have room left; what remains goes to anybody with room.
    """
    ranks = members.shape[1]
    room = [-(-count(segments) // ranks)] * ranks
    given: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    order = np.argsort(members.sum(axis=1), kind="stable").tolist()
    table = segments.tolist()
    left: list[tuple[int, int]] = []
    for i in order:
        left += _give(tuple(table[i]), np.flatnonzero(members[i]).tolist(), room, given)
    for segment in left:
        _give(segment, list(range(ranks)), room, given)
    return [merge(np.array(g, dtype=np.int64).reshape(-1, 2)) for g in given]


def _give(
    segment: tuple[int, int],
    candidates: list[int],
    room: list[int],
    given: list[list[tuple[int, int]]],
) -> list[tuple[int, int]]:
    """Deal `segment` out to `candidates` by the room they have; return what found none."""
    at, end = segment
    most = max(candidates, key=lambda r: room[r])
    if end - at <= min(_SMALL_BLOCKS, room[most]):
        candidates = [most]  # a few blocks are one request: do not tear them apart
    total = sum(room[r] for r in candidates)
    size, seen = min(end - at, total), 0
    first = at
    for rank in candidates:
        seen += room[rank]
        upto = first + size * seen // total if total else first
        if upto > at:
            given[rank].append((at, upto))
            room[rank] -= upto - at
            at = upto
    return [(at, end)] if at < end else []
