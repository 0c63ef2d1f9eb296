"""A line between a launcher and its controller that can be cut without either of them ending."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

__all__ = ["Line"]

_TURN_S = 0.05
_READ = 65536


class Line:
    """Forwards a port of loopback to another one, in a thread, until it is cut.

    While it is cut, connections stay open and new ones are taken, and nothing goes either way: as
    of a switch that drops packets.

    Parameters
    ----------
    target
        Port of loopback that it leads to.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing = False
        threading.Thread(target=self._serve, name=f"line-{self.port}", daemon=True).start()

    def close(self) -> None:
        """Break all connections and take no more."""
        self._closing = True
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):  # whichever end has gone, both are closed
            if not self._wait_open():
                return
            with socket.create_connection(("127.0.0.1", self._target), timeout=5.0) as far:
                self._pump(near, far)

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._closing:
                ready = selector.select(1.0)
                if not self._wait_open():
                    return
                for key, _ in ready:
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    data = source.recv(_READ)
                    if not data:
                        return
                    key.data.sendall(data)

    def _wait_open(self) -> bool:
        while self.cut and not self._closing:
            time.sleep(_TURN_S)
        return not self._closing
