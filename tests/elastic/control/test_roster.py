"""What a controller remembers of nodes over months."""

from __future__ import annotations

from ckptd.elastic.messages import NodeLost, NodeUp, Order, OrderKind, Progress, Tick
from tests.elastic.driven import Driver, restart

_DAY_S = 86_400.0


def test_names_that_never_come_back_do_not_pile_up() -> None:
    d = Driver("abc", gather_s=1.0, silent_s=2 * _DAY_S)
    d.up("a", "b", "c")
    d.hear(Progress(generation=1, step=1))
    for number in range(50):
        d.hear(NodeUp(node=f"spot-{number}", life="1", slots=1))
        d.hear(NodeLost(node=f"spot-{number}"))
    d.hear(NodeUp(node="kept-out", life="1", slots=1))
    d.hear(Order(kind=OrderKind.EXCLUDE, nodes=("kept-out",)))
    d.hear(NodeLost(node="kept-out"))
    d.hear(Tick(), 1.0)
    assert "spot-0" in d.machine.nodes
    d.hear(Tick(), _DAY_S)
    assert {node.name for node in d.machine.nodes} == {"a", "b", "c", "kept-out"}


def test_a_member_is_never_forgotten_and_who_was_is_fenced_when_it_comes() -> None:
    d = Driver("abc", gather_s=1.0, patience_s=1.0, silent_s=5 * _DAY_S)
    d.up("a", "b", "c")
    d.hear(Progress(generation=1, step=1))
    d.hear(NodeLost(node="c"))
    restart(d, "a", "b")
    assert d.machine.members == {"a", "b"}
    d.hear(Tick(), _DAY_S + 1.0)
    assert {node.name for node in d.machine.nodes} == {"a", "b"}
    d.hear(d.said("c"))  # with its old workers
    assert any(getattr(a, "nodes", ()) == ("c",) for a in d.actions)
