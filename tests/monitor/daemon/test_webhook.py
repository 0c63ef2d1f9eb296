from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ckptd.errors import UsageError
from ckptd.monitor.daemon.webhook import SIGNATURE_HEADER, Webhook, sign_hook
from ckptd_simulated.feed import PlantedAt
from tests.httpserver import HttpServer
from tests.monitor.daemon.daemons import JOB, fed, running
from tests.processes import until

KEY = b"key of the hook"


class Receiver(HttpServer):
    """Takes POSTs; answers with the statuses it was given, then with 204."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = list(statuses)
        self.got: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?a=b"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.headers[SIGNATURE_HEADER], body))
        assert self.path == "/hook?a=b"
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def receiver(*statuses: int) -> Iterator[Receiver]:
    with Receiver(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_bodies_arrive_in_order_and_signed() -> None:
    with receiver() as server:
        hook = Webhook(server.url, KEY)
        for k in range(5):
            hook.send(f"{k}".encode())
        hook.close(60)
    assert server.got == [(sign_hook(KEY, f"{k}".encode()), f"{k}".encode()) for k in range(5)]
    assert hook.sent.done == 5


def test_failure_is_tried_again() -> None:
    with receiver(500, 429) as server:
        hook = Webhook(server.url, KEY, first_wait_s=0.01)
        hook.send(b"x")
        until(lambda: hook.sent.done == 1)
        hook.close(60)
    assert len(server.got) == 3


def test_refusal_is_not_tried_again() -> None:
    with receiver(403) as server:
        hook = Webhook(server.url, KEY, first_wait_s=0.01)
        hook.send(b"x")
        until(lambda: hook.sent.failed == 1)
        hook.close(60)
    assert len(server.got) == 1


def test_tries_are_bounded() -> None:
    with receiver(*[500] * 20) as server:
        hook = Webhook(server.url, KEY, first_wait_s=0.01)
        hook.send(b"x")
        until(lambda: hook.sent.failed == 1)
        hook.close(60)
    assert len(server.got) == 5


def test_nobody_there_holds_up_nobody() -> None:
    with receiver() as server:
        url = server.url
    hook = Webhook(url, KEY, first_wait_s=60.0)
    for _ in range(1000):
        hook.send(b"x")
    assert hook.sent.dropped >= 1000 - 256 - 2
    hook.close(60)


def test_name_that_is_none_fails_and_ends_nothing() -> None:
    hook = Webhook(f"http://{'a' * 64}.example/", KEY, first_wait_s=0.01)
    hook.send(b"x")
    hook.send(b"y")
    until(lambda: hook.sent.failed == 2)
    hook.close(60)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "x", "http://a b", "http://h:99999/", "http://h/\u00e9"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Webhook(url, KEY)
    assert "invalid URL of" in caught.value.message


def test_daemon_tells_of_an_incident(tmp_path: Path) -> None:
    with receiver() as server:
        setup = {"webhook": server.url, "webhook_key": KEY}
        with running(tmp_path / "history", **setup) as daemon:
            with fed(daemon, 8, PlantedAt("crash", 3, 1.0)):
                until(lambda: server.got)
    signature, body = server.got[0]
    assert signature == sign_hook(KEY, body)
    told = json.loads(body)
    assert (told["event"], told["job"]) == ("opened", JOB)
    assert (told["life"], told["number"]) == (daemon.service.hub.life, 1)
    assert abs(told["unix"] - time.time()) < 3600
    assert told["incident"]["verdict"]["suspects"][0]["name"] == "3"
