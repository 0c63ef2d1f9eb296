"""What a controller remembers of nodes over months."""

from __future__ import annotations

import msgspec

from ckptd.elastic.control.history import RecoveryHistory
from ckptd.elastic.control.status import Setting, status_of
from ckptd.elastic.messages import NodeLost, NodeUp, Order, OrderKind, Progress, Tell, Tick
from tests.elastic.driven import Driver, none, restart

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


def test_a_slot_that_is_out_of_use_is_told_once_and_shown() -> None:
    d = Driver("abc", gather_s=1.0)
    sick = NodeUp(node="d", life="1", slots=1, sick=("slot 1: the device fails: lost",))
    text = "d has lost a slot: slot 1: the device fails: lost"
    assert [a.text for a in d.hear(sick) if isinstance(a, Tell)] == [text]
    assert none(d.hear(sick), Tell)
    found = status_of(Setting("j", "log", "127.0.0.1:1", "1"), d.machine, RecoveryHistory())
    (row,) = found.nodes
    assert (row.slots, row.sick) == (1, sick.sick)
    d.hear(NodeUp(node="d", life="2", slots=2))  # its launcher was started anew
    found = status_of(Setting("j", "log", "127.0.0.1:1", "1"), d.machine, RecoveryHistory())
    assert (found.nodes[0].slots, found.nodes[0].sick) == (2, ())


def test_a_lost_node_is_replaced_by_one_whose_links_are_as_fast() -> None:
    speeds = {"a": 50, "b": 50, "c": 50, "d": 6, "e": 47}
    d = Driver("abcde", gather_s=1.0)
    for name, speed in speeds.items():
        d.hear(msgspec.structs.replace(d.said(name), card_bytes_per_s=speed * 10**9))
    d.hear(Progress(generation=1, step=1))
    assert d.machine.members == {"a", "b", "c"}
    d.hear(NodeLost(node="a"))
    d.all_fenced("b", "c")
    assert d.machine.members == {"b", "c", "e"}


def test_a_lost_node_is_replaced_from_its_own_rack() -> None:
    d = Driver("abcde", gather_s=1.0)
    for name, rack in {"a": "r1", "b": "r1", "c": "r1", "d": "r2", "e": "r1"}.items():
        d.hear(msgspec.structs.replace(d.said(name), domains=("block", rack)))
    d.hear(Progress(generation=1, step=1))
    assert d.machine.members == {"a", "b", "c"}
    d.hear(NodeLost(node="a"))
    said = [a.text for a in d.all_fenced("b", "c") if isinstance(a, Tell)]
    assert d.machine.members == {"b", "c", "e"}
    assert said[1] == "the replicas of 1 of 1 pipeline stages are within one domain"
