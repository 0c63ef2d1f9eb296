from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.report import SUM
from ckptd.monitor.rules.notfinite import NOT_FINITE, FirstBad
from ckptd.monitor.verdict import Verdict, VerdictKind
from tests.monitor.jobs import job, view

DP, TP, OTHER_TP = 7, 8, 9
TEXT = 5


def jobs() -> JobView:
    made = job(*(view(rank) for rank in range(4)))
    return replace(made, texts={TEXT: "layers.1.weight"}, group_names={DP: "data"})


def bad(*rows: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """Rows of `SUM` from (rank, step, group, call), and the ranks of a report's rows."""
    out = np.zeros(len(rows), SUM)
    for row, (rank, step, group, call) in zip(out, rows, strict=True):
        row["row"], row["step"], row["what"], row["set"] = rank, step, NOT_FINITE, group
        row["value"] = call << 32 | TEXT
    return out, np.arange(4)


def judged(*rows: tuple[int, int, int, int], now: float = 10.0) -> list[Verdict]:
    book = FirstBad()
    book.add(*bad(*rows), 0.0)
    return list(book.judge(jobs(), now))


def test_the_rank_that_had_it_a_step_before_the_others_is_named() -> None:
    (verdict,) = judged((0, 31, DP, 61), (2, 30, DP, 60), (1, 31, DP, 61), (3, 31, DP, 61))
    assert verdict.kind is VerdictKind.NOT_FINITE
    assert verdict.names() == ("2",)
    assert "step 30: layers.1.weight, in call 60 of data" in verdict.evidence[0]
    assert verdict.evidence[1] == "4 of 4 ranks have spoiled their parameters with it"


def test_a_partner_that_was_given_it_in_the_same_step_is_not_named() -> None:
    # Rank 3 has it in the forward pass from rank 2, and gives it to its own data-parallel group.
    rows = ((2, 30, TP, 4), (3, 30, TP, 5), (0, 31, OTHER_TP, 9), (1, 31, OTHER_TP, 9))
    (verdict,) = judged(*rows)
    assert verdict.names() == ("2",)


def test_where_most_have_it_at_once_no_rank_is_named() -> None:
    (verdict,) = judged(*((rank, 30, DP, 60) for rank in range(4)))
    assert verdict.suspects == ()
    assert "on 4 ranks at once" in verdict.evidence[0]
    assert "step size" in verdict.action


def test_ranks_that_are_late_are_waited_for() -> None:
    assert judged((0, 31, DP, 61), now=1.0) == []


def test_it_is_told_until_an_earlier_state_is_loaded() -> None:
    book = FirstBad()
    book.add(*bad((2, 30, DP, 60)), 0.0)
    assert len(list(book.judge(jobs(), 5.0))) == len(list(book.judge(jobs(), 50.0))) == 1
    rows, ranks = bad((2, 20, DP, 0))
    rows["value"] = 0
    book.add(rows, ranks, 60.0)
    assert list(book.judge(jobs(), 70.0)) == []


def test_checksums_and_norms_are_others() -> None:
    rows, ranks = bad((2, 30, DP, 60))
    rows["what"] = 0
    book = FirstBad()
    book.add(rows, ranks, 0.0)
    assert list(book.judge(jobs(), 5.0)) == []
    assert msgspec.json.encode(judged((2, 30, DP, 60))[0])
