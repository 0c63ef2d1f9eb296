"""A daemon that takes what agents send, keeps it, and answers as it is told; over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from ckptd.base.net.signing import (
    CHALLENGE_PATH,
    MAC_HEADER,
    SHEETS_PATH,
    check_request,
    new_challenge,
    sign_answer,
)
from ckptd.errors import RefusedError
from ckptd.monitor.report import (
    AgentOrders,
    EvidenceReport,
    NodeReport,
    pack,
    unpack_evidence,
    unpack_report,
)
from tests.httpserver import HttpServer

SECRET = b"a secret of tests, long enough"


class Daemon:
    """What was received; `orders` are answered to the next sheet and then again the default."""

    def __init__(self, secret: bytes, port: int = 0) -> None:
        self.secret = secret
        self.challenge = new_challenge()
        self.sheets: list[NodeReport] = []
        self.found: list[EvidenceReport] = []
        self.orders: list[AgentOrders] = []
        self.refused = 0
        self.garbage: Callable[[Any], bool] | None = None
        """Takes the request's handler; whether it has answered it itself."""
        self._server = HttpServer(("127.0.0.1", port), _handler(self))
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, body: bytes) -> bytes:
        if path != SHEETS_PATH:
            self.found.append(unpack_evidence(body))
            return b""
        self.sheets.append(unpack_report(body))
        return pack(self.orders.pop(0) if self.orders else AgentOrders(period_s=0.1))

    def rows(self) -> dict[int, Any]:
        """Return the newest row of each rank in the newest sheet."""
        if not self.sheets:
            return {}
        return {int(row["rank"]): row for row in self.sheets[-1].table("ranks")}


def _handler(daemon: Daemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if daemon.garbage is None or not daemon.garbage(self):
                assert self.path == CHALLENGE_PATH
                self.say(200, json.dumps({"challenge": daemon.challenge, "job": "j"}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if daemon.garbage is not None and daemon.garbage(self):
                return None
            mac = self.headers[MAC_HEADER]
            try:
                check_request(mac, daemon.secret, "POST", self.path, daemon.challenge, body)
            except RefusedError as error:
                daemon.refused += 1
                status = 401 if error.kind == "stale-mac" else 403
                said = json.dumps({"challenge": daemon.challenge, "job": "j"}).encode()
                return self.say(status, said)
            answer = daemon.take(self.path, body)
            return self.say(200, answer, sign_answer(daemon.secret, mac, answer))

        def say(self, status: int, body: bytes, mac: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if mac:
                self.send_header(MAC_HEADER, mac)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def daemon(secret: bytes = SECRET, port: int = 0) -> Iterator[Daemon]:
    serving = Daemon(secret, port)
    try:
        yield serving
    finally:
        serving.close()
