"""Calls that ranks of a node make differently."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.monitor.agent.totals import _KEPT, Differing
from ckptd.monitor.job import CALL, CallFlag


def calls(*seqs: int, group: int = 7, **other: Any) -> Any:
    rows = np.zeros(len(seqs), CALL)
    rows["group"], rows["seq"], rows["op"], rows["bytes"], rows["root"] = group, seqs, 5, 64, -1
    for name, value in other.items():
        rows[name] = value
    return rows


def test_equal_calls_are_nothing() -> None:
    differing = Differing()
    for rank in range(3):
        differing.add(rank, calls(1, 2, 3))
    differing.add(0, calls(4))
    assert not differing.some()


def test_each_word_about_a_call_is_news_once() -> None:
    differing = Differing()
    differing.add(0, calls(1, 2))
    differing.add(1, calls(1))
    assert not differing.some()
    differing.add(1, calls(2, op=9))
    differing.add(2, calls(1, 2, group=8))
    assert differing.some()
    assert not differing.some()
    differing.add(2, calls(2))  # and what the third says about it
    assert differing.some()
    differing.add(0, calls(3))
    assert not differing.some()
    differing.add(1, calls(3, root=1))
    assert differing.some()


def test_sizes_may_differ_where_they_are_variable() -> None:
    differing = Differing()
    for rank, size in enumerate((64, 32)):
        differing.add(rank, calls(1, bytes=size, flags=CallFlag.VARIABLE))
    assert not differing.some()
    differing.add(0, calls(2, flags=CallFlag.VARIABLE))
    differing.add(1, calls(2, op=9, flags=CallFlag.VARIABLE))
    assert differing.some()


def test_it_remembers_so_much() -> None:
    differing = Differing()
    differing.add(0, calls(*range(1, 2 * _KEPT + 1)))
    differing.add(1, calls(1, op=9))  # so late that the other's is forgotten
    assert not differing.some()
    differing.forget(0)
    differing.add(1, calls(2 * _KEPT, op=9))
    assert not differing.some()
