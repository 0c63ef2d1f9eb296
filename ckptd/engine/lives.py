"""How often a job fails, from the generations of its root."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from ckptd.engine.clock import seconds_of
from ckptd.engine.index import Index
from ckptd.format.names import generation_key
from ckptd.format.records import Generation

__all__ = ["ENOUGH", "lives_of", "mtbf_s", "recent"]

ENOUGH = 8
"""Lives from which a rate is computed: half too much or too little then costs little, because the
interval goes with the square root and the optimum is flat."""
_READ = 33


def recent(index: Index) -> list[Generation]:
    """Return the records of the newest generations, ascending; at most 33.

    Raises
    ------
    CkptdError
        The store fails, or a record cannot be read.
    """
    return [index.generation(n) for n in index.generations()[-_READ:]]


def lives_of(generations: Sequence[Generation]) -> list[float]:
    """Return the rank-seconds of each earlier life of the job that failed.

    One counts when the next generation is a job that goes on from a checkpoint of it: it had got
    somewhere, and then somebody had to begin again. What ended in a rollback by hand, or before its
    first checkpoint, tells nothing of the machines. A life lasts until the next one begins.
    """
    found = []
    for life, after in pairwise(generations):
        goes_on = after.parent is not None and after.parent.generation == life.generation
        seconds = _created(after) - _created(life)
        if goes_on and life.world_size and after.world_size and seconds > 0.0:
            found.append(seconds * life.world_size)
    return found


def mtbf_s(lives: Sequence[float], world: int) -> float | None:
    """Return the mean time between failures for `world` ranks in seconds; None with few lives.

    It is taken from the median, as for failures at random: one night in which nobody began again
    would spoil a mean.
    """
    if len(lives) < ENOUGH:
        return None
    return statistics.median(lives) / math.log(2.0) / world


def _created(record: Generation) -> float:
    return seconds_of(record.created, generation_key(record.generation))
