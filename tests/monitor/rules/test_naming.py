"""Nodes stand before their ranks where they are the shorter answer."""

from __future__ import annotations

import numpy as np

from ckptd.monitor.rules.naming import nodes_behind, rank_suspects
from tests.monitor import jobs

JOB = jobs.job(*(jobs.view(r, 8) for r in range(8)))


def test_half_of_a_nodes_ranks() -> None:
    assert nodes_behind(JOB, np.array([4, 5])) == [1]
    assert nodes_behind(JOB, np.array([0, 4])) == []
    assert nodes_behind(JOB, np.array([], np.int64)) == []


def test_one_rank_of_a_node_with_one_rank_is_no_node() -> None:
    job = jobs.job(jobs.view(0, 2), jobs.view(1, 2))
    assert [s.name for s in rank_suspects(job, np.array([1]), 0.5)] == ["1"]


def test_suspects_keep_their_order_and_details() -> None:
    got = rank_suspects(JOB, np.array([6, 5]), 0.5, ["late", "later"])
    assert [(s.name, s.detail) for s in got][1:] == [("6", "late"), ("5", "later")]
    assert got[0].name == "n1"
