"""Which target files grow in step.

Files that want the same blocks of the source are written together, so that those are read once.
Files that do not are written one after the other: what a killed process had finished stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptd.engine.blocks import Runs, count, merge, no_runs
from ckptd.engine.reshard.moves import Planner
from ckptd.engine.reshard.rounds import Stretch

__all__ = ["group_files"]

_SHARED = 0.125
_SAMPLE = 512
"""Chunks of a file that are looked at."""
_MOST_FILES = 64


def group_files(planner: Planner, files: Sequence[int], most: int) -> list[list[int]]:
    """Return the files in groups of neighbours.

    Parameters
    ----------
    planner
        Tells what a chunk needs.
    files
        The files of this process, in order; none is empty.
    most
        Most files of a group.
    """
    groups: list[list[int]] = []
    union = no_runs()
    for file in files:
        runs = _wanted(planner, file)
        both = merge(np.concatenate((union, runs)))
        shared = count(union) + count(runs) - count(both)
        full = groups and len(groups[-1]) >= min(most, _MOST_FILES)
        if groups and not full and shared > _SHARED * count(runs):
            groups[-1].append(file)
            union = both
        else:
            groups.append([file])
            union = runs
    return groups


def _wanted(planner: Planner, file: int) -> Runs:
    """Return source blocks that a file wants: all of them, or those of a sample."""
    chunks = [c for c in planner.chunks(file) if c.end > c.start]
    step = max(1, len(chunks) // _SAMPLE)
    plan = planner.plan([Stretch(file, c.start, c.end) for c in chunks[::step]])
    runs = [r for _, r in plan.turns]
    return merge(np.concatenate(runs)) if runs else no_runs()
