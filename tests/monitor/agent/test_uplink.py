"""The way to the daemon: signed, found again after every kind of absence, never waited for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from ckptd.base.net.signing import new_challenge
from ckptd.errors import UsageError
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.report import AgentOrders, EvidenceReport, NodeReport, Stack, pack
from tests.monitor.agent.daemons import SECRET, daemon
from tests.processes import free_port, until

_numbers = count(1)


def sheet() -> NodeReport:
    return NodeReport(job="j", source="a", number=next(_numbers))


def found() -> EvidenceReport:
    return EvidenceReport(job="j", source="a", number=next(_numbers), stacks={1: Stack(text="x")})


@contextmanager
def uplink(url: str, secret: bytes = SECRET) -> Iterator[Uplink]:
    up = Uplink(url, secret, timeout_s=60.0)
    try:
        yield up
    finally:
        up.close(60.0)


def keep_offering(up: Uplink, true: Callable[[], Any], what: str) -> None:
    """Offer sheets, as a watcher does, until something is so."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, f"in vain: {what}"
        if up.ready:
            up.offer(sheet())
        time.sleep(0.01)


def test_sheets_arrive_and_orders_come_back() -> None:
    with daemon() as there, uplink(there.url) as up:
        there.orders = [AgentOrders(period_s=3.0, stacks=(1, 2))]
        up.offer(sheet())
        until(lambda: up.sent, "sent")
        assert up.orders() == [AgentOrders(period_s=3.0, stacks=(1, 2))]
        assert up.orders() == []
        assert len(there.sheets) == 1
        assert there.refused == 0


def test_one_connection_serves_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda *a, **k: made.append(a) or connect(*a, **k)
    )
    with daemon() as there, uplink(there.url) as up:
        keep_offering(up, lambda: up.sent >= 20, "twenty sheets")
    assert len(made) < 10


def test_findings_arrive_in_order() -> None:
    with daemon() as there, uplink(there.url) as up:
        for _ in range(5):
            up.report(found())
        until(lambda: len(there.found) == 5, "findings")
        numbers = [one.number for one in there.found]
        assert numbers == sorted(numbers)


def test_what_is_left_is_sent_at_the_end() -> None:
    with daemon() as there:
        with uplink(there.url) as up:
            up.offer(sheet())
            up.report(found())
        assert len(there.sheets) == len(there.found) == 1


def test_a_new_life_of_the_daemon_is_answered() -> None:
    with daemon() as there, uplink(there.url) as up:
        keep_offering(up, lambda: up.sent, "first")
        there.challenge = new_challenge()
        before = up.sent
        keep_offering(up, lambda: up.sent > before, "after the restart")
        assert there.refused >= 1


def test_a_daemon_that_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with (
        caplog.at_level(logging.WARNING, "ckptd.monitor"),
        uplink(f"http://127.0.0.1:{port}") as up,
    ):
        up.report(found())
        keep_offering(up, lambda: up._failures >= 3, "three failures")
        assert up.away
        with daemon(port=port) as there:
            keep_offering(up, lambda: up.sent >= 2, "taken at last")
            until(lambda: there.found, "what was found meanwhile")
        assert not up.away or up.sent
    said = [r.getMessage() for r in caplog.records]
    assert (
        sum("cannot reach the daemon" in text for text in said) <= 2
    )  # it is gone at the end again
    assert any("is reachable again" in text for text in said)


def test_another_secret_is_refused_and_nothing_piles_up() -> None:
    with daemon() as there, uplink(there.url, b"another secret of some length") as up:
        up.report(found())
        keep_offering(up, lambda: there.refused >= 3, "refused")
        assert not there.sheets
        assert not there.found
        assert up.orders() == []


def test_an_impostor_is_not_obeyed() -> None:
    """Somebody who does not know the secret answers with orders."""
    with daemon() as there, uplink(there.url) as up:

        def forged(handler: Any) -> bool:
            if handler.command == "POST":
                handler.say(200, pack(AgentOrders(period_s=9.0)), "v1 " + "0" * 64)
            return bool(handler.command == "POST")

        there.garbage = forged
        keep_offering(up, lambda: up.away, "told as a failure")
        assert up.orders() == []
        assert up.sent == 0


def _noise(handler: Any) -> bool:
    handler.wfile.write(os.urandom(200))
    handler.close_connection = True
    return True


def _huge(handler: Any) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 40))
    handler.end_headers()
    try:
        for _ in range(12):
            handler.wfile.write(bytes(1 << 20))
    except OSError:
        pass
    handler.close_connection = True
    return True


def _nothing(handler: Any) -> bool:
    handler.close_connection = True
    return True


def _odd_challenge(handler: Any) -> bool:
    handler.say(401, b'{"challenge": "a b\\r\\nc", "job": "j"}')
    return True


def _not_json(handler: Any) -> bool:
    handler.say(200, b"[" * 100000)
    return True


@pytest.mark.parametrize("garbage", [_noise, _huge, _nothing, _odd_challenge, _not_json])
def test_garbage_is_survived(garbage: Callable[[Any], bool]) -> None:
    with daemon() as there, uplink(there.url) as up:
        there.garbage = garbage
        keep_offering(up, lambda: up._failures >= 2, "failures")
        there.garbage = None
        keep_offering(up, lambda: up.sent, "taken again")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://a", "http://", "http://a:b", "http://a/path", "http://u@a"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError) as info:
        Uplink(url, SECRET)
    assert "invalid URL of" in info.value.message


def test_a_daemon_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        up = Uplink(f"http://127.0.0.1:{server.getsockname()[1]}", SECRET, timeout_s=0.2)
        up.offer(sheet())
        until(lambda: up.away, "the deadline")
        up.close()
        assert not up._thread.is_alive()
