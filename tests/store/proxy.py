"""A small HTTP proxy on loopback that loses answers, as networks do.

It reads a whole request, lets a rule decide, forwards it on a connection of its own, waits for the
whole answer, and then passes it on, cuts it, or drops it: the request has had its effect by then.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

__all__ = ["Proxy", "Request"]


@dataclass
class Request:
    """One request as the proxy saw it; header names are in lower case."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    head: bytes
    body: bytes = field(repr=False)

    @property
    def kind(self) -> str:
        """Name of the S3 operation, as far as tests tell them apart."""
        if "uploadId" in self.query:
            names = {"PUT": "part", "POST": "complete", "DELETE": "abort"}
            return names.get(self.method, "?")
        return "create" if "uploads" in self.query else self.method.lower()


Rule = Callable[[Request], str]
"""Returns what to do: ``pass``, ``lose``, ``hang``, ``cut``, ``slow``, or ``503 SlowDown``.

``without NAME`` gives a field of the answer another name: to the client it is not there.
``garble NAME`` gives it a value that is no value of its type.
"""


class Proxy:
    """Forwards to `endpoint`; `rule` decides about each request; `requests` remembers them."""

    def __init__(self, endpoint: str, rule: Rule = lambda request: "pass") -> None:
        target = urlsplit(endpoint)
        self._target = (target.hostname or "", target.port or 80)
        self.rule = rule
        self.requests: list[Request] = []
        self.at_once: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def seen(self, kind: str) -> int:
        return sum(r.kind == kind for r in self.requests)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), client.makefile("rb") as stream:
            while request := self._read(client, stream.readline, stream.read):
                with self._lock:
                    self.requests.append(request)
                    now = self._now[request.kind] = self._now.get(request.kind, 0) + 1
                    self.at_once[request.kind] = max(now, self.at_once.get(request.kind, 0))
                try:
                    if not self._act(client, request):
                        return
                finally:
                    with self._lock:
                        self._now[request.kind] -= 1

    def _act(self, client: socket.socket, request: Request) -> bool:
        """Answer, or do not; returns whether the connection stays."""
        action = self.rule(request)
        if action == "hang":
            self._closing.wait(30)
            return False
        if action[0].isdigit():
            client.sendall(_refusal(request.method, *action.split(" ", 1)))
            return True
        if action == "slow":
            time.sleep(0.2)
        answer = self._forward(request)
        if action == "lose":
            return False
        act, _, name = action.partition(" ")
        if act == "without":
            answer = re.sub(name.encode(), b"X" * len(name), answer, flags=re.IGNORECASE)
        if act == "garble":
            value = rb"(?<=%s.)[^<\r]*" % name.encode()
            answer = re.sub(value, lambda m: b"?" * len(m[0]), answer, flags=re.IGNORECASE)
        client.sendall(answer[: len(answer) // 2] if action == "cut" else answer)
        return False  # the answer says so: its connection was asked to close

    def _read(
        self,
        client: socket.socket,
        readline: Callable[[], bytes],
        read: Callable[[int], bytes],
    ) -> Request | None:
        lines = []
        while (line := readline()) not in (b"\r\n", b""):
            lines.append(line)
        if not lines:
            return None
        method, target, _ = lines[0].decode().split(" ")
        pairs = (line.decode().split(":", 1) for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = read(int(headers.get("content-length", "0")))
        kept = [n for n in lines[1:] if n.split(b":")[0].lower() not in (b"connection", b"expect")]
        head = b"".join([lines[0], *kept, b"Connection: close\r\n", b"\r\n"])
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        return Request(method, url.path, query, headers, head, body)

    def _forward(self, request: Request) -> bytes:
        with socket.create_connection(self._target, timeout=30) as server:
            server.sendall(request.head + request.body)
            parts = []
            while part := server.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)


def _refusal(method: str, status: str, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by rule</Message></Error>"
    lines = [
        f"HTTP/1.1 {status} Refused",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
        "",
        "" if method == "HEAD" else body,
    ]
    return "\r\n".join(lines).encode()
