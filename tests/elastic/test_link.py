"""A node's link: leases, repeats, controllers that move."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from ckptd.base.net.address import parse_address
from ckptd.base.net.connection import Connection
from ckptd.elastic.link import NodeLink
from ckptd.elastic.messages import Left, NodeUp
from ckptd.elastic.places import open_places
from ckptd.errors import RefusedError, StoreError
from tests.elastic.controlled import SECRET, controlled, pretended
from tests.processes import until


def test_the_lease_counts_from_sending_and_goes_on_while_nobody_follows(tmp_path: Path) -> None:
    leases: list[float] = []
    with controlled(tmp_path, "--nodes", "2", "--set", "lease_s=50") as c:
        seat = open_places("j", c.log).leader
        link = NodeLink(
            c.seat,
            "j",
            SECRET.encode(),
            lambda: NodeUp(node="n0", life="l", slots=1),
            lambda _: None,
            beat_s=0.05,
            leased=leases.append,
            seated=seat.still,
        ).start()
        assert link.lease_until == 0.0
        until(lambda: leases)
        # The controller says how long: nine tenths of its own lease_s.
        assert link.lease_until <= time.monotonic() + 45.0
        c.kill()
        until(lambda: not link.connected)
        alone = len(leases)
        until(lambda: len(leases) > alone + 2)
        seat.take(1, "127.0.0.1:9", "another")
        followed = until(lambda: not seat.still("none") and len(leases))
        until(lambda: link.silent_s > 3.0)
        assert len(leases) <= followed + 1
        assert leases == sorted(leases)
        link.close()
        assert not link.alive


def test_a_goodbye_is_acknowledged(tmp_path: Path) -> None:
    with controlled(tmp_path) as c:
        link = NodeLink(
            c.seat,
            "j",
            SECRET.encode(),
            lambda: NodeUp(node="n0", life="l", slots=1),
            lambda _: None,
        ).start()
        until(lambda: link.answered)
        link.tell(Left(node="n0"))
        until(link._all_acknowledged)
        link.close(0.0)


def test_why_a_controller_takes_no_word_of_a_node_is_known(tmp_path: Path) -> None:
    with controlled(tmp_path) as c:
        for job, secret, word in (
            ("k", SECRET, "job 'j'"),
            ("k", "y" * 32, "another job"),
            ("j", "y" * 32, "secret"),
        ):
            link = NodeLink(
                c.seat,
                job,
                secret.encode(),
                lambda: NodeUp(node="n0", life="l", slots=1),
                lambda _: None,
            ).start()
            said = until(link.new_refusal)
            assert word in said
            assert word in link.problem
            assert link.new_refusal() == ""
            assert not link.answered
            link.close(0.0)


def test_a_controller_that_refuses_is_not_absent() -> None:
    """A refused node is connected for a moment each time, and then it counted the silence."""
    link = NodeLink(str, "j", b"", lambda: NodeUp(node="n0", life="l", slots=1), lambda _: None)
    link._echoed_at -= 60.0
    assert link.absent_s > 59.0
    link._error = RefusedError("the name of this node is already in use", kind="name-taken")
    here, there = socket.socketpair()
    with there:
        link._connection = Connection(here, "controller", 1.0)
        assert (link.connected, link.absent_s) == (True, 0.0)
        link._disconnect()
    link._error = RefusedError("another job's", kind="not-the-controller")
    assert link.absent_s > 59.0
    # Anybody can answer that: it says something only while this node's secret may be the wrong one.
    link._error = StoreError("another secret", kind="permission")
    assert link.absent_s == 0.0
    link._answered = True
    assert link.absent_s > 59.0
    link._error = RefusedError("the name of this node is already in use", kind="name-taken")
    assert link.absent_s == 0.0
    link.start().close(0.0)


@pytest.mark.long
def test_a_controller_that_moves_is_found(tmp_path: Path) -> None:
    with controlled(tmp_path) as c, pretended(1, c.seat) as nodes:
        until(lambda: nodes[0].running)
        before = parse_address(c.address)
        c.kill()
        c.start()
        assert parse_address(c.address) != before
        until(lambda: nodes[0].link.connected)
        assert nodes[0].running == 1


@pytest.mark.long
def test_a_callback_that_fails_ends_the_link_and_is_reported(tmp_path: Path) -> None:
    heard: list[type[BaseException]] = []
    before = threading.excepthook
    threading.excepthook = lambda args: heard.append(args.exc_type)
    try:
        with controlled(tmp_path) as c:

            def up() -> NodeUp:
                raise ZeroDivisionError

            link = NodeLink(c.seat, "j", SECRET.encode(), up, lambda _: None).start()
            until(lambda: not link.alive)
            assert heard == [ZeroDivisionError]
    finally:
        threading.excepthook = before
