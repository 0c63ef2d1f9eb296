"""Sockets of gloo's process groups: found as they are made, shut so that waits on them end.

``gloo`` has no abort: a collective whose peers are stopped, or have left, waits for its time-out,
half an hour by default. It fails at once when its connections end, but for one hole: an operation
whose message is under way is not told of that (``Pair::signalException``), and waits on. So each
ends when nothing moves on it, and by what it reads: a write that fails leaves such a message too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from torch.distributed import distributed_c10d

_MAKERS = ("_new_process_group_helper", "init_process_group", "new_group", "split_group")
"""Makers of groups; the first, which all others call, is private and may be gone one day."""
_LOOKS = 2
"""So many times in a row nothing has moved on a connection that is at rest: threads may be late."""
_COUNTS = slice(120, 136)
"""Of Linux's ``tcp_info``: ``tcpi_bytes_acked`` and ``tcpi_bytes_received``."""


def sockets_of_this_process() -> dict[str, int]:
    """Return the descriptors of all sockets, by what tells them from earlier ones of the number."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[link] = int(name)
    return found


class GroupSockets:
    """Watches which sockets come to be while process groups are made.

    Connections to a job's store are left out: by their port, and by being there before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._before: set[str] = set()
        self._moved: dict[str, tuple[bytes, int]] = {}
        """How far each connection was at the last look, and for how many looks before that."""
        self._depth = 0
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Begin; until `close`."""
        makers = _MAKERS[:1] if hasattr(distributed_c10d, _MAKERS[0]) else _MAKERS[1:]
        for name in makers:
            if (function := getattr(distributed_c10d, name, None)) is not None:
                setattr(distributed_c10d, name, self._watched(function))
                self._undo.append(partial(setattr, distributed_c10d, name, function))

    def close(self) -> None:
        """Watch no more. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Forget the groups that were made so far, also those whose making was cut short."""
        with self._lock:
            self._known.clear()
            self._depth = 0

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **more: Any) -> Any:
            self._begin()
            try:
                return function(*args, **more)
            finally:
                self._end()

        return watched

    def _begin(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._before = set(sockets_of_this_process())

    def _end(self) -> None:
        with self._lock:
            self._depth -= 1
            self._known |= sockets_of_this_process().keys() - self._before

    def shut(
        self, *, store_ports: frozenset[int], stores: bool = False, whole: bool = False
    ) -> int:
        """Shut down what groups communicate through; return how many connections are left open.

        Those on which bytes have moved in the last calls are left open, as all are at the first.

        Parameters
        ----------
        store_ports
            Ports of job stores.
        stores
            Shut down the connections to job stores as well: a rank may wait there for the others.
        whole
            Shut down all of them now, and both ways.
        """
        with self._lock:
            now = sockets_of_this_process()
            making = now.keys() - self._before if self._depth else set()
            wanted = (self._known | making) & now.keys()
        before, self._moved = self._moved, {}
        left = 0
        for link, fd in now.items():
            with contextlib.suppress(OSError):  # not connected, or closed meanwhile
                for sock in _opened(link, fd):
                    if {sock.getsockname()[1], sock.getpeername()[1]} & store_ports:
                        if stores:
                            sock.shutdown(socket.SHUT_RDWR)
                    elif link in wanted:
                        moved = _moved(sock)
                        last, count = before.get(link, (b"", 0))
                        self._moved[link] = moved, count + 1 if moved == last else 0
                        if whole or self._moved[link][1] >= _LOOKS:
                            sock.shutdown(socket.SHUT_RDWR if whole else socket.SHUT_RD)
                        else:
                            left += 1
        return left


def _opened(link: str, fd: int) -> Iterator[socket.socket]:
    """Yield a descriptor of its own of an internet socket: what is closed must not be another's."""
    copy = os.dup(fd)
    if os.readlink(f"/proc/self/fd/{copy}") != link:
        os.close(copy)  # it was another one's by then
        return
    with socket.socket(fileno=copy) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock


def _moved(sock: socket.socket) -> bytes:
    """Return how many bytes were sent and received, and how many of these nobody has read yet."""
    counts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.stop)[_COUNTS]
    return counts + fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
