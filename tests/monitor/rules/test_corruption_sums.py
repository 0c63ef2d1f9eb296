from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.monitor.report import SUM
from ckptd.monitor.rules.corruption import CHECKSUM, NORM, SumTable
from ckptd.monitor.verdict import Verdict


def sums(values: list[int], step: int = 10, sets: int = 1, what: int = CHECKSUM) -> Any:
    out = np.zeros(len(values), SUM)
    out["row"], out["step"], out["what"] = np.arange(len(values)), step, what
    out["set"] = np.arange(len(values)) // (len(values) // sets)
    out["value"] = values
    return out


def norms(values: list[float], step: int) -> Any:
    return sums(np.array(values).view("<u8").tolist(), step, what=NORM)


def judged(book: SumTable, now: float) -> list[Verdict]:
    return list(book.judge(now))


RANKS = np.arange(8)


def test_a_replica_that_differs_is_named_when_all_have_told() -> None:
    book = SumTable()
    book.add(sums([7, 7]), RANKS[:2], 0.0)
    assert judged(book, 0.1) == []
    book.add(sums([7, 8]), RANKS[2:4], 0.2)
    assert judged(book, 0.3) == []
    (verdict,) = judged(book, 5.0)
    assert verdict.names() == ("3",)
    assert book.mismatches == 1
    assert judged(book, 6.0) == []


def test_replicas_that_agree_are_not_told() -> None:
    book = SumTable()
    book.add(sums([7, 7, 9, 9], sets=2), RANKS[:4], 0.0)
    assert judged(book, 9.0) == []
    assert book.mismatches == 0


def test_a_later_step_lets_an_earlier_one_be_judged() -> None:
    book = SumTable()
    book.add(sums([7, 7, 8]), RANKS, 0.0)
    book.add(sums([7, 7, 7], step=20), RANKS, 1.5)
    (verdict,) = judged(book, 1.6)
    assert verdict.names() == ("2",)
    assert verdict.numbers["step"] == 10


def test_what_comes_after_the_judgement_is_left_alone() -> None:
    book = SumTable()
    book.add(sums([7, 7, 7]), RANKS, 0.0)
    judged(book, 9.0)
    book.add(sums([8]), RANKS[5:], 9.1)
    assert judged(book, 20.0) == []


def test_gradients_out_of_line_in_each_of_three_steps() -> None:
    book = SumTable()
    out = []
    for step in range(6):
        values = [1.0, 1.1, 0.9, 1.05]
        values[3] *= 50 if step >= 3 else 1
        values[0] *= 50 if step == 1 else 1  # one hard batch
        book.add(norms(values, step), RANKS, float(step))
        out += judged(book, step + 0.5)
    out += judged(book, 20.0)
    assert {v.names() for v in out} == {("3",)}


def test_a_norm_that_is_no_number_is_out_of_line() -> None:
    book = SumTable()
    for step in range(3):
        book.add(norms([1.0, float("nan"), 0.9, 1.05], step), RANKS, float(step))
    (verdict,) = judged(book, 20.0)
    assert verdict.names() == ("1",)


def test_norms_of_steps_that_are_made_anew_are_judged_again() -> None:
    book, now = SumTable(), 0.0
    for first in (10_000_000, 10_000_000 - 10, 500):  # a lie perhaps, who is late, the job again
        found = []
        for step in range(first, first + 3):
            book.add(norms([1.0, 1.0, 1.0, 90.0], step), np.arange(4), now)
            found += judged(book, now + 5)
            now += 10
        assert bool(found) is (first != 10_000_000 - 10)


def test_memory_is_bounded() -> None:
    book = SumTable()
    for step in range(1000):
        book.add(sums([7, 7], step), RANKS, 0.0)
        book.add(norms([1.0, 1.0], step), RANKS, 0.0)
    assert len(book._sums) <= 16
    assert len(book._norms) <= 16
    book.forget()
    assert judged(book, 99.0) == []


def test_steps_that_are_made_anew_are_judged_again() -> None:
    """As of a job that was started again from a checkpoint, or after a step that was a lie."""
    for before in ([*range(100, 900, 100)], [1 << 61]):
        book = SumTable()
        for k, step in enumerate(before):
            book.add(sums([7, 7, 7], step), RANKS, 10.0 * k)
            assert judged(book, 10.0 * k + 9) == []
        found = []
        for k, step in enumerate((50, 60, 70, 80)):
            now = 1000.0 + 10 * k
            book.add(sums([7, 7], step), RANKS[:2], now)
            book.add(sums([8], step), RANKS[2:], now + 0.1)
            found += judged(book, now + 9)
        assert [v.numbers["step"] for v in found] == [60, 70, 80]


def test_a_node_that_tells_late_begins_nothing_anew() -> None:
    book = SumTable()
    for k in range(40):
        book.add(sums([7, 7], 10 * k), RANKS[:2], 10.0 * k)
        judged(book, 10.0 * k + 9)
    for k in range(40):
        book.add(sums([8], 10 * k), RANKS[2:], 500.0)
    assert judged(book, 600.0) == []
