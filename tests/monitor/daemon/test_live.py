from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import TransientStoreError
from ckptd.monitor.daemon.live import Hub, StreamEvent
from ckptd_simulated.feed import PlantedAt
from tests.monitor.daemon.daemons import Running, fed, running
from tests.processes import until


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "history") as daemon:
        yield daemon


def first(events: Iterator[tuple[str, str, Any]], name: str) -> tuple[str, Any]:
    return next((ident, body) for ident, said, body in events if said == name)


def test_what_is_so_comes_first_and_then_what_changes(followed: Running) -> None:
    with fed(followed, 8, PlantedAt("hang", 5, 1.0)):
        events = followed.client.events()
        head = list(islice(events, 3))
        assert [name for _, name, _ in head] == ["job", "ranks", "links"]
        assert head[1][2]["since"] is None
        _, incident = first(events, "incident")
        assert incident["verdict"]["suspects"][0]["name"] == "5"
        events.close()


def test_client_that_comes_back_gets_what_it_missed(followed: Running) -> None:
    with fed(followed, 8, PlantedAt("crash", 5, 1.0)):
        last, _ = first(followed.client.events(), "ranks")
        until(lambda: followed.service.rounds.last.open)
        until(lambda: followed.service.hub.missed(0))
        events = followed.client.events(last)
        name, body = next((n, b) for _, n, b in events)
        assert (name, body["kind"]) == ("incident", "crash")
        _, ranks = first(events, "ranks")
        assert ranks["since"] == int(last.rpartition("-")[2])


def test_after_a_restart_everything_comes(followed: Running) -> None:
    with fed(followed, 8):
        _, ranks = first(followed.client.events("0000-7"), "ranks")
        assert ranks["since"] is None
        assert len(ranks["rank"]) == 8


def test_end_of_the_daemon_ends_streams(tmp_path: Path) -> None:
    with running(tmp_path / "history") as daemon:
        events = daemon.client.events()
        next(events)
        daemon.service.hub.close()
        assert list(events) is not None  # it ends
        assert daemon.ask("GET", "/api/v1/stream").kind == "busy"


def test_client_that_does_not_read_is_dropped(followed: Running) -> None:
    service = followed.service
    loop = until(lambda: service._loop)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", followed.port))
        sock.sendall(
            b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer " + followed.token.encode() + b"\r\n\r\n"
        )
        until(lambda: len(service.hub))
        event = StreamEvent(1, "ranks", b"x" * (1 << 20))

        def flood() -> bool:
            loop.call_soon_threadsafe(service.hub.publish, event)
            clients = list(service.hub._clients)
            return all(c.dropped for c in clients) or not clients

        until(flood)
        assert all(c.bytes == 0 for c in service.hub._clients)
    until(lambda: service.hub.dropped == 1)


def test_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.live._MOST_CLIENTS", 2)

    async def join() -> None:
        hub = Hub()
        one, _ = hub.join(), hub.join()
        with pytest.raises(TransientStoreError):
            hub.join()
        hub.leave(one)
        hub.join()

    asyncio.run(join())


@pytest.mark.parametrize("last", [None, "", "x", "life-", "other-5", "-5", "life-" + "9" * 40])
def test_ids_that_are_none_of_ours(last: str | None) -> None:
    hub = Hub()
    hub.life = "life"
    assert hub.seen(last) is None
    assert hub.seen("life-5") == 5


def test_kept_events_are_bounded() -> None:
    async def publish() -> int:
        hub = Hub()
        for k in range(5000):
            hub.publish(StreamEvent(k, "incident", b"{}"), kept=True)
        return len(hub.missed(0))

    assert asyncio.run(publish()) == 512
