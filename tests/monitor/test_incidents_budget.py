from __future__ import annotations

from ckptd.monitor.incidents import HOUR_S, IsolationLedger
from ckptd.monitor.settings import IsolationBudget


def test_two_an_hour() -> None:
    ledger = IsolationLedger(IsolationBudget(per_hour=2, share=1.0))
    assert ledger.take(["a"], 100, 0.0)
    assert ledger.take(["b"], 100, 10.0)
    assert not ledger.take(["c"], 100, 20.0)
    assert not ledger.take(["c"], 100, HOUR_S - 1)
    assert ledger.take(["c"], 100, HOUR_S + 1)
    assert not ledger.take(["d"], 100, HOUR_S + 2)
    assert ledger.nodes == {"a", "b", "c"}


def test_a_share_of_the_nodes_for_ever() -> None:
    ledger = IsolationLedger(IsolationBudget(per_hour=100, share=0.02))
    assert ledger.take(["a", "b"], 100, 0.0)
    assert not ledger.take(["c"], 100, 1e9)
    assert ledger.take(["c"], 150, 1e9)


def test_one_node_is_always_allowed() -> None:
    ledger = IsolationLedger(IsolationBudget(per_hour=2, share=0.02))
    assert ledger.take(["a"], 4, 0.0)
    assert not ledger.take(["b"], 4, 1e9)


def test_more_at_once_than_allowed_takes_nothing() -> None:
    ledger = IsolationLedger(IsolationBudget(per_hour=2, share=1.0))
    assert not ledger.take(["a", "b", "c"], 100, 0.0)
    assert ledger.nodes == frozenset()
    assert ledger.take(["a", "b"], 100, 0.0)


def test_the_same_node_again_costs_nothing() -> None:
    ledger = IsolationLedger(IsolationBudget(per_hour=1, share=1.0))
    assert ledger.take(["a"], 100, 0.0)
    assert ledger.take(["a"], 100, 1.0)
    assert not ledger.take(["a", "b"], 100, 2.0)
