"""One node's agent: takes connections of trainers, and knows when it may end."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time

from ckptd import events
from ckptd.engine.agentlink import AgentPlace, locked, peer_of
from ckptd.engine.channel import SocketChannel
from ckptd.engine.job import Happened, Request
from ckptd.engine.near import Near
from ckptd.engine.worker import Worker
from ckptd.events.event import AnyEvent

__all__ = ["NodeAgent"]

_log = logging.getLogger("ckptd")
_POLL_S = 0.2
_FIRST_S = 60.0
"""An agent to which nobody ever speaks ends after so many seconds."""


class NodeAgent:
    """Serves the trainers of one job on one node.

    It ends when no trainer is connected, everything that was sealed is where it should be, and
    nobody is to come back for what lies in memory: the trainers of a job that died are awaited for
    as long as they had asked for.

    Parameters
    ----------
    listener
        The listening socket of `place`.
    place
        Where it is found; the socket is removed at the end.
    stay
        Serve until a signal, also with nothing to do.
    """

    def __init__(self, listener: socket.socket, place: AgentPlace, *, stay: bool = False) -> None:
        self._listener = listener
        self._place = place
        self._stay = stay
        self._near = Near()
        self._lock = threading.Lock()
        self._sessions: set[threading.Thread] = set()
        self._until = time.monotonic() + _FIRST_S
        self._died = 0.0
        self._ending = threading.Event()

    def end(self) -> None:
        """Await nobody any more: end as soon as the trainers have ended. For a signal handler."""
        self._ending.set()

    def run(self) -> None:
        """Serve; returns at the end."""
        self._near.serve_here(str(self._place.socket.with_suffix(".mem")))
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._may_end():
                if selector.select(_POLL_S):
                    self._accept()
        self._near.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(True)
        pid, uid = peer_of(sock)
        if uid not in (-1, os.geteuid()):
            _log.warning("a process of user %d is sent away", uid)
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(sock, pid), name=f"ckptd-of-{pid}")
        with self._lock:
            self._sessions.add(thread)
        thread.start()

    def _serve(self, sock: socket.socket, pid: int) -> None:
        worker = Worker(SocketChannel(sock, Request), near=self._near)

        def relay(event: AnyEvent) -> None:
            if event.rank == worker.rank:
                worker.tell(Happened(event))

        began = time.monotonic()
        linger_s = 0.0
        subscription = events.subscribe(relay)
        try:
            worker.run()
            linger_s = worker.linger_s
        except Exception:  # noqa: BLE001 - a bug with one trainer must not take the others' snapshots along
            _log.exception("the session of process %d ended badly", pid)
        finally:
            subscription.close()
            self._left(began, linger_s)

    def _left(self, began: float, linger_s: float) -> None:
        """Decide how long to wait for the next life, now that a trainer of this one is gone."""
        now = time.monotonic()
        with self._lock:
            self._sessions.discard(threading.current_thread())
            if linger_s and self._near.shelf.folders():
                self._until, self._died = max(self._until, now + linger_s), now
            elif began > self._died and not self._sessions:
                self._until = now  # the life that came back has said goodbye

    def _may_end(self) -> bool:
        with self._lock:
            busy = bool(self._sessions)
            over = self._ending.is_set() or (not self._stay and time.monotonic() > self._until)
        if busy or not over:
            return False
        with locked(self._place):
            # Whoever looked for an agent before we had the lock is connected by now.
            self._accept()
            with self._lock:
                if self._sessions:
                    return False
            self._listener.close()
            self._place.socket.unlink(missing_ok=True)
        return True
