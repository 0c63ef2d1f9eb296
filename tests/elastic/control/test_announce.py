"""Where a job's daemon is: announced to the controller, and told to nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptd.decoding import msgpack_decoder
from ckptd.elastic.dial import dial
from ckptd.elastic.messages import (
    Announce,
    Answer,
    DaemonAt,
    Order,
    OrderKind,
    Tell,
    ToOperator,
)
from ckptd.monitor.daemon.controller import ControllerLink
from tests.elastic.controlled import (
    SECRET,
    ControllerProcess,
    PretendedNode,
    controlled,
    pretended,
    status_when,
)
from tests.processes import until

FIRST, SECOND = "http://127.0.0.1:8400", "http://127.0.0.2:8400"


def told(node: PretendedNode) -> list[str]:
    return [order.url for order in list(node.orders) if isinstance(order, DaemonAt)]


@contextmanager
def daemon(addresses: Callable[[], str], url: str) -> Iterator[ControllerLink]:
    link = ControllerLink(addresses, "j", SECRET.encode(), lambda _: None, url)
    link.start()
    try:
        yield link
    finally:
        link.close()


def test_nodes_are_told_on_each_connection_and_when_it_changes(tmp_path: Path) -> None:
    with controlled(tmp_path, "--nodes", "2") as c, pretended(2, c.seat) as nodes:
        with daemon(c.seat, FIRST) as link:
            until(lambda: all(told(node) for node in nodes), "told")
            until(lambda: link.status is not None and link.status.daemon == FIRST, "status")
            c.kill()
            before = [len(told(node)) for node in nodes]
            c.start()
            until(
                lambda: all(len(told(n)) > k for n, k in zip(nodes, before, strict=True)), "again"
            )
            assert {url for node in nodes for url in told(node)} == {FIRST}
        with daemon(c.seat, SECOND):
            until(lambda: all(told(node)[-1] == SECOND for node in nodes), "the newest")
        late = PretendedNode("late", c.seat)
        until(lambda: SECOND in told(late), "who comes later is told")
        late.close()
        operator = c.operator()
        status_when(operator, lambda s: s.daemon == SECOND)
        operator.close()


def test_all_launchers_are_told_of_a_node_that_is_left_out(tmp_path: Path) -> None:
    with controlled(tmp_path, "--nodes", "1:2") as c, pretended(2, c.seat) as nodes:
        operator = c.operator()
        name = nodes[1].name
        until(lambda: any(n.name == name and n.up for n in operator.status().nodes), "its beat")
        operator.order(Order(kind=OrderKind.EXCLUDE, nodes=(name,), reason="its fan is loud"))
        for node in nodes:
            (tell,) = until(partial(tells, node), "told")
            assert tell.text == f"node {name} is left out until it is taken back: its fan is loud"
            assert tell.command == f"ckptd ctl add {name}"
        operator.close()


def tells(node: PretendedNode) -> list[Tell]:
    return [order for order in list(node.orders) if isinstance(order, Tell)]


def test_a_daemon_that_other_machines_cannot_reach_is_not_told(tmp_path: Path) -> None:
    with controlled(tmp_path, "--host", "192.0.2.1") as c:
        here = f"127.0.0.1:{c.address.rpartition(':')[2]}"
        with pretended(1, lambda: here) as nodes:
            answer = announced(c, here, FIRST)
            assert (answer.ok, answer.kind) == (False, "refused")
            assert "is reached from its own machine alone" in answer.text
            assert announced(c, here, "http://192.0.2.1:8400").ok
            until(lambda: told(nodes[0]) == ["http://192.0.2.1:8400"], "told")


def announced(c: ControllerProcess, address: str, url: str) -> Answer:
    connection, _ = dial(
        address,
        job=c.job,
        role="operator",
        name="daemon",
        secret=SECRET.encode(),
        timeout_s=60.0,
    )
    try:
        connection.send(Announce(number=5, url=url))

        def answers() -> list[Answer]:
            said = connection.take(msgpack_decoder(ToOperator), 1.0)
            return [a for a in said if isinstance(a, Answer) and a.number == 5]

        return next(iter(until(answers, "an answer")))
    finally:
        connection.release()
