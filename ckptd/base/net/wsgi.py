"""Serves a WSGI application without a secret (metrics): most requests at once, seconds for each."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ckptd.base.net.address import Address, listen_at
from ckptd.base.net.door import Strangers

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

_MOST = 32
_REQUEST_S = 10.0
_log = logging.getLogger("ckptd")


@contextlib.contextmanager
def serve_wsgi(host: str, port: int, application: WSGIApplication, what: str) -> Iterator[Address]:
    """Serve `application` while the block runs; give the address, with the port that it got.

    A connection, of which each has a thread, ends after 10 s, and the oldest of 32 for one more.

    Raises
    ------
    StoreError
        kind ``listen``: the address cannot be had.
    """
    with listen_at(host, port, what) as listener:
        server = _Server(listener)
        server.set_app(application)
        thread = threading.Thread(target=server.serve_forever, name=what, daemon=True)
        thread.start()
        try:
            yield Address(host, server.server_port)
        finally:
            server.shutdown()
            thread.join()
            for sock in server.strangers.held():
                _cut(sock)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.strangers = listener, Strangers(_MOST, _cut, _REQUEST_S)
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.enter(request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        self.strangers.cut_late()

    def shutdown_request(self, request: Any) -> None:
        self.strangers.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request for metrics failed", exc_info=True)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)  # its thread closes it
