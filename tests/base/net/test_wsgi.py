"""Pages that need no secret: silent connections are bounded, and end."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import pytest

from ckptd.base.net import wsgi
from ckptd.errors import StoreError
from tests.processes import until


def page(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"fine"]


def test_silent_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with wsgi.serve_wsgi("127.0.0.1", 0, page, "the page") as at, ExitStack() as crowd:
        for _ in range(100):
            crowd.enter_context(socket.create_connection(at))
        with urllib.request.urlopen(f"http://{at}/", timeout=60) as answer:
            assert answer.read() == b"fine"
        until(lambda: threading.active_count() - before <= 33)
    monkeypatch.setattr(wsgi, "_REQUEST_S", 0.1)
    with wsgi.serve_wsgi("127.0.0.1", 0, page, "the page") as at:
        with socket.create_connection(at, 60) as silent, socket.create_connection(at, 60) as slow:
            slow.sendall(b"GET / HTTP/1.0\r\n")
            assert silent.recv(1) == b""
            assert slow.recv(1) == b""
        with pytest.raises(StoreError) as caught, wsgi.serve_wsgi(*at, page, "the page"):
            pass
        assert caught.value.kind == "listen"
    until(lambda: threading.active_count() <= before)
