from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.monitor.job import Phase
from ckptd.monitor.report import STEP
from ckptd.monitor.rules.slow import AHEAD, MOST_CELLS, StepTable


def rows(steps: Any, seconds: Any, phase: Phase = Phase.TRAIN, ranks: int = 2) -> Any:
    """Each step of `ranks` ranks."""
    out = np.zeros(len(steps) * ranks, STEP)
    out["row"], out["phase"] = np.tile(np.arange(ranks), len(steps)), phase
    out["step"], out["self_s"] = np.repeat(steps, ranks), np.repeat(seconds, ranks)
    out["wall_s"] = 2 * out["self_s"]
    return out


def book(depth: int = 10) -> StepTable:
    out = StepTable(depth)
    out.follow(np.array([0, 0]), 2)
    return out


RANKS = np.arange(2)


def test_the_last_steps_are_kept() -> None:
    b = book()
    b.add(rows(range(25), np.arange(25.0)), RANKS)
    steps, own, wall = b.last(4, RANKS)
    assert steps.tolist() == [21, 22, 23, 24]
    assert own.tolist() == [[21, 21], [22, 22], [23, 23], [24, 24]]
    assert (wall == 2 * own).all()
    assert b.last(100, RANKS)[0].tolist() == list(range(15, 25))
    assert b.newest == 24


def test_in_any_order_and_from_any_sheet() -> None:
    b = book()
    b.add(rows([3, 1], [3.0, 1.0], ranks=1), RANKS[1:])
    b.add(rows([2, 1, 3], [2.5, 1.5, 3.5], ranks=1), RANKS[:1])
    b.add(rows([2], [2.0], ranks=1), RANKS[1:])
    steps, own, _ = b.last(9, RANKS)
    assert steps.tolist() == [1, 2, 3]
    assert own.tolist() == [[1.5, 1.0], [2.5, 2.0], [3.5, 3.0]]


def test_steps_that_most_ranks_have_not_told_are_left_out() -> None:
    b = book()
    b.add(rows([1, 2], [1.0, 2.0]), RANKS)
    b.add(rows([3], [3.0], ranks=1), RANKS)
    assert b.last(9, RANKS)[0].tolist() == [1, 2]


def test_other_phases_are_left_out() -> None:
    b = book()
    b.add(rows([1], [1.0], Phase.CKPT), RANKS)
    assert len(b.last(9, RANKS)[0]) == 0


def test_a_step_far_ahead_is_not_believed() -> None:
    b = book()
    b.add(rows([1, 1 << 60, AHEAD + 1], [1.0, 2.0, 3.0]), RANKS)
    assert b.last(9, RANKS)[0].tolist() == [1]


def test_after_a_step_back_all_begins_anew() -> None:
    b = book()
    b.follow(np.array([500, 500]), 2)
    b.add(rows(range(490, 500), np.ones(10)), RANKS)
    b.follow(np.array([100, 100]), 2)
    b.add(rows([99], [7.0]), RANKS)
    assert b.last(9, RANKS)[0].tolist() == [99]


def test_after_a_change_of_size_all_begins_anew() -> None:
    b = book()
    b.add(rows([1], [1.0]), RANKS)
    b.follow(np.array([1, 1, 1]), 3)
    assert len(b.last(9, RANKS)[0]) == 0
    b.add(rows([2], [1.0], ranks=3), np.arange(3))
    assert b.last(9, np.arange(3))[1].shape == (1, 3)


def test_a_world_that_no_memory_holds_is_not_kept() -> None:
    b = StepTable()
    b.follow(np.array([0]), MOST_CELLS)
    b.add(rows([1], [1.0]), RANKS)
    steps, own, _ = b.last(9, RANKS)
    assert len(steps) == 0
    assert own.shape == (0, 2)


def test_ranks_that_nobody_knows_are_left_out() -> None:
    b = book()
    b.add(rows([1], [1.0]), np.array([0, 9]))
    assert np.isnan(b.last(9, RANKS, share=0.5)[1]).tolist() == [[False, True]]
