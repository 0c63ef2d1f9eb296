"""What saving at every step costs a step: blocks of steps with saves and without, by turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from ckptd.errors import CkptdError
from ckptd.train.demo.launch import read_rows
from ckptd.train.demo.report import Pace
from ckptd.train.demo.spec import RunSpec, SnapshotRow, StepRow

__all__ = ["pace_of", "step_seconds"]


def step_seconds(rows: Sequence[StepRow], pace: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without and with saves.

    The first block warms up. The first step of each block is left out: it still has to do with the
    block before.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for before, row in pairwise(rows):
        # What follows a step (its save) counts for the next one.
        block, place = divmod(before.step, pace)
        if block > 0 and place > 0:
            found[block % 2].append(row.seconds - before.seconds)
    return found


def pace_of(spec: RunSpec) -> Pace:
    """Return what a run that has ended shows.

    Raises
    ------
    CkptdError
        Its reports are not whole.
    """
    plain, saving = step_seconds(read_rows(spec.files.steps, StepRow), spec.pace)
    ended = read_rows(spec.files.snapshots, SnapshotRow)
    if not (plain and saving and ended):
        raise CkptdError("the run has not reported", kind="demo-run", where=spec.folder)
    return Pace(
        ranks=spec.cut.ranks,
        layout=str(spec.cut),
        saves=ended[-1].saves,
        complete=ended[-1].complete,
        step_s=statistics.median(plain),
        saving_step_s=statistics.median(saving),
    )
