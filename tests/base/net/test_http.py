"""The HTTP client: answers are bounded, connections are kept while they last."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler

import pytest

from ckptd.base.net.http import HttpClient
from ckptd.errors import StoreError, TransientStoreError, UsageError
from tests.httpserver import HttpServer
from tests.processes import PATIENCE_S

_SLOW_S = 1.0


class Server(HttpServer):
    """Answers ``/N`` with N bytes, ``/events`` with two events, and counts connections.

    ``/slow`` is answered late, and ``/stream`` does not end before the client closes it.
    """

    made = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.left = threading.Event()
        """Set when the client has closed the connection of ``/stream``."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def verify_request(self, *_: object) -> bool:
        self.made += 1
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"line\n")
            self.rfile.read(1)
            self.server.left.set()
            return
        if self.path == "/slow":
            time.sleep(_SLOW_S)
        body = b"id: 7\nevent: x\ndata: 1\n\ndata: 2\n\n"
        if self.path != "/events":
            body = b"x" * (0 if self.path == "/slow" else int(self.path[1:].partition("?")[0]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        # Without a word of it: the client finds out at its next request.
        self.close_connection = self.path == "/9"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_connection_is_kept_and_made_anew() -> None:
    with serving() as server:
        client = HttpClient(server.url, "the server", keep=True)
        assert [len(client.ask("GET", f"/{n}").body) for n in (0, 1, 9, 2, 3)] == [0, 1, 9, 2, 3]
        assert server.made == 2
        client.close()
        once = HttpClient(server.url, "the server")
        for _ in range(3):
            assert once.ask("GET", "/1").status == 200
        assert server.made == 5


def test_an_answer_is_bounded() -> None:
    with serving() as server:
        client = HttpClient(server.url, "the server", most_bytes=10, keep=True)
        assert len(client.ask("GET", "/10").body) == 10
        with pytest.raises(StoreError, match="too large") as caught:
            client.ask("GET", "/11?token=x")
        assert caught.value.where == f"{server.url}/11"
        assert len(client.ask("GET", "/1").body) == 1
        client.close()


def test_events_of_a_stream() -> None:
    with serving() as server:
        with HttpClient(server.url, "the server").stream("GET", "/events") as answer:
            assert list(answer.events()) == [("7", "x", b"1"), ("7", "x", b"2")]


def test_a_stream_that_fails_is_closed_at_once() -> None:
    with serving() as server:
        client = HttpClient(server.url, "the server")
        with pytest.raises(ZeroDivisionError), client.stream("GET", "/stream") as answer:
            assert next(answer.lines()) == b"line\n"
            raise ZeroDivisionError
        assert server.left.wait(PATIENCE_S), answer  # which still exists


def test_a_time_out_holds_for_its_request_alone_on_a_connection_that_is_kept() -> None:
    with serving() as server:
        client = HttpClient(server.url, "the server", keep=True)
        client.ask("GET", "/1", timeout_s=_SLOW_S / 4)
        assert client.ask("GET", "/slow").status == 200
        with pytest.raises(TransientStoreError, match="timed out"):
            client.ask("GET", "/slow", timeout_s=_SLOW_S / 4)
        assert server.made == 1


def test_https_offers_the_one_protocol_that_is_spoken() -> None:
    def ask(client: HttpClient) -> None:
        with suppress(TransientStoreError):
            client.ask("GET", "/")

    with socket.create_server(("127.0.0.1", 0)) as server:
        client = HttpClient(f"https://127.0.0.1:{server.getsockname()[1]}", "the server")
        asked = threading.Thread(target=ask, args=(client,))
        asked.start()
        with server.accept()[0] as sock:
            hello = sock.recv(1 << 16)
        asked.join()
    assert b"\x08http/1.1" in hello


def test_a_server_that_is_away_and_a_url_that_is_none() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(TransientStoreError) as caught:
        HttpClient(url, "the daemon").ask("GET", "/1")
    assert (caught.value.message, caught.value.where) == ("the daemon does not answer", url)
    with pytest.raises(UsageError):
        HttpClient("ftp://x", "the daemon")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("http://[::1]/", "::1", 80), ("https://[fe80::abcd]", "fe80::abcd", 443)],
)
def test_an_ipv6_address_without_a_port(url: str, host: str, port: int) -> None:
    client = HttpClient(url, "a daemon")
    assert (client._host, client._port) == (host, port)
    connection = client._connection(1.0)
    assert (connection.host, connection.port) == (host, port)
