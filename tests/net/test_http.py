"""The HTTP client: answers are bounded, connections are kept while they last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptd.errors import StoreError, TransientStoreError, UsageError
from ckptd.net.http import HttpClient


class Server(ThreadingHTTPServer):
    """Answers ``/N`` with N bytes, ``/events`` with two events, and counts connections."""

    made = 0

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
        body = b"id: 7\nevent: x\ndata: 1\n\ndata: 2\n\n"
        if self.path != "/events":
            body = b"x" * int(self.path[1:])
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
    with Server(("127.0.0.1", 0), _Handler) as server:
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
        with pytest.raises(StoreError, match="too large"):
            client.ask("GET", "/11")
        assert len(client.ask("GET", "/1").body) == 1
        client.close()


def test_events_of_a_stream() -> None:
    with serving() as server:
        with HttpClient(server.url, "the server").stream("GET", "/events") as answer:
            assert list(answer.events()) == [("7", "x", b"1"), ("7", "x", b"2")]


def test_a_server_that_is_away_and_a_url_that_is_none() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(TransientStoreError) as caught:
        HttpClient(url, "the daemon", kind="daemon-away").ask("GET", "/1")
    assert (caught.value.kind, caught.value.where) == ("daemon-away", url)
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
