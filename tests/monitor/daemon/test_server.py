from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ckptd.base.net.address import listen_at
from ckptd.errors import StoreError
from ckptd.monitor.daemon import server
from ckptd.monitor.daemon.server import url_of
from tests.monitor.daemon.daemons import Running, running


def test_address_that_is_taken() -> None:
    with listen_at("127.0.0.1", 0, "the daemon") as sock, pytest.raises(StoreError) as caught:
        listen_at("127.0.0.1", sock.getsockname()[1], "the daemon")
    assert caught.value.kind == "listen"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(StoreError) as caught:
        listen_at(host, 0, "the daemon")
    assert caught.value.kind == "listen"


def test_urls() -> None:
    with listen_at("127.0.0.1", 0, "the daemon") as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        assert url_of(sock, "::1") == f"http://[::1]:{port}"


@pytest.mark.parametrize("start", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
def test_who_does_not_finish_a_head_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(server, "_HEAD_S", 0.2)
    with running(tmp_path / "history") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
            sock.sendall(start)
            assert sock.recv(1) == b""
            assert daemon.ask("GET", "/healthz").status == 200


def test_second_head_is_to_be_finished_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HEAD_S", 0.2)
    with running(tmp_path / "history") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200")


def test_head_that_is_too_large_is_refused(daemon: Running) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 17))
        answer = b""
        try:
            while part := sock.recv(4096):
                answer += part
        except ConnectionError:
            pass  # it hung up with the rest unread
    assert b"200 OK" not in answer
