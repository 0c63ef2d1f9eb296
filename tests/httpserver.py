"""An HTTP server in the process of a test, of whose clients some go before they have an answer."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["HttpServer"]


class HttpServer(ThreadingHTTPServer):
    """Says nothing of a client that has gone: its thread finds that out while another test runs."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
