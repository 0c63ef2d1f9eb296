"""`Door`: server side that holds unproved connections (strangers), then serves a thread each.

In it: the most strangers and clients at once; what a full server answers.

A connection that is not yet proved is a stranger. All listeners hold strangers in one way, which is
`Strangers`: so many at once, then the oldest goes for the next one, and silence ends after seconds.
So silent connections keep nobody out, and what they cost has a bound. Clients that have proved
themselves have a bound of their own, and one more of them gets an answer: ``link-busy``.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptd.base.net.address import same_user
from ckptd.base.net.certificates import given_files, read_files
from ckptd.base.net.connection import HELLO, MOST_BODY_BYTES, Connection, Refusal, answer_hello
from ckptd.base.net.handed import Proof
from ckptd.base.net.roles import DOORS
from ckptd.base.runtime.ownership import in_child
from ckptd.errors import CkptdError, UsageError

MOST_STRANGERS = 256
"""Of one listener. Each costs a descriptor and a few KiB, and no thread."""
_TICK_S = 0.5
_PAUSE_S = 0.1
_T = TypeVar("_T")


class Strangers(Generic[_T]):
    """Connections of one listener that have not proved themselves, the oldest first.

    Parameters
    ----------
    most
        Held at once: the oldest is cut off for one more.
    cut
        Ends one of them.
    wait_s
        `cut_late` cuts off those that have been here for longer.
    """

    def __init__(self, most: int, cut: Callable[[_T], object], wait_s: float = math.inf) -> None:
        self._most, self._cut, self._wait_s = most, cut, wait_s
        self._since: dict[_T, float] = {}
        self._lock = threading.Lock()

    def enter(self, one: _T) -> None:
        """Hold one more."""
        while len(self._since) >= self._most:
            self.cut_oldest()
        with self._lock:
            self._since[one] = time.monotonic()

    def leave(self, one: _T) -> bool:
        """Hold this one no more; return whether it was held."""
        with self._lock:
            return self._since.pop(one, None) is not None

    def cut_oldest(self) -> None:
        """Cut off the one that came first, if there is one."""
        for one in self.held()[:1]:
            self._end(one)

    def cut_late(self) -> None:
        """Cut off those that have been here for too long."""
        before = time.monotonic() - self._wait_s
        for one in self.held():
            if self._since.get(one, before) >= before:
                return
            self._end(one)

    def held(self) -> list[_T]:
        """Return all, the oldest first."""
        with self._lock:
            return list(self._since)

    def _end(self, one: _T) -> None:
        if self.leave(one):
            self._cut(one)


@dataclass(frozen=True, slots=True)
class Counts:
    """Connections of a server so far, but `served`: those of this moment.

    Attributes
    ----------
    served
        Clients that are connected now.
    accepted, refused
        Connections that were let in, and that were not: strangers, or no room.
    """

    served: int
    accepted: int
    refused: int


class Door:
    """Lets the clients of one listening socket in, and serves each in a thread of its own.

    One more thread holds the strangers; none of them has a thread. Between hosts a client shows a
    certificate of the job's authority, of a role that may ask here; over a Unix socket it runs as
    our user, and needs nothing.

    Parameters
    ----------
    listener
        Listens; the door closes it.
    proof
        Returns it, under the authority of clients that connect from now on.
    purpose
        One of `DOORS`.
    serve
        Serves one client, and returns whether it keeps the connection, which is closed otherwise.
        An error of the connection ends it and is nothing else.
    name
        Of this server, for errors and threads.
    clients
        Served at once.
    greeting_s
        For a client to prove itself, in seconds.
    send_s, most_body
        See `Connection`.
    about
        Returns what this server says of itself.
    strangers
        Held at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        proof: Callable[[], Proof],
        purpose: str,
        serve: Callable[[Connection], bool | None],
        *,
        name: str,
        clients: int,
        greeting_s: float,
        send_s: float,
        most_body: int = MOST_BODY_BYTES,
        about: Callable[[], dict[str, str | int | bool]] = dict,
        strangers: int = MOST_STRANGERS,
    ) -> None:
        self._listener, self._proof, self._purpose, self._serve = listener, proof, purpose, serve
        self._name, self._clients, self._about = name, clients, about
        self._send_s, self._most_body = send_s, most_body
        self._local = listener.family == socket.AF_UNIX
        if not self._local and not proof():
            raise UsageError("a connection over TCP needs a secret")
        if not self._local and DOORS[purpose].of_job and given_files():
            read_files(DOORS[purpose].serves)  # what cannot be read is an error now
        self._lock = threading.Lock()
        self._served: dict[Connection, threading.Thread] = {}
        self._accepted = self._refused = 0
        self._closing = threading.Event()
        self._strangers: Strangers[Connection] = Strangers(strangers, self._cut, greeting_s)
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        in_child(self._leave_to_parent)
        self._thread = threading.Thread(target=self._run, name=f"listen {name}", daemon=True)
        self._thread.start()

    def _leave_to_parent(self) -> None:
        self._listener.close()  # or the address would be taken for as long as the child lives

    def counts(self) -> Counts:
        """Return how many connections there are and were."""
        with self._lock:
            return Counts(len(self._served), self._accepted, self._refused)

    def close(self, wait_s: float, *, cut: bool = True) -> threading.Thread | None:
        """Stop listening and end all connections; return a thread that does not end in time.

        Without `cut` the clients that are served are waited for.
        """
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that holds strangers
        end = time.monotonic() + wait_s
        self._thread.join(wait_s)
        with self._lock:
            served = dict(self._served)
        for wire in served if cut else ():
            wire.close()
        for thread in (self._thread, *served.values()):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return thread
        return None

    # -- strangers: one thread -----------------------------------------------------------------

    def _run(self) -> None:
        with self._selector as selector, self._listener:
            while not self._closing.is_set():
                for key, _ in selector.select(_TICK_S):
                    if key.data is None:
                        self._accept()
                    elif not key.data.broken:  # not cut off in this round
                        self._hear(key.data)
                self._strangers.cut_late()
            for wire in self._strangers.held():
                self._cut(wire)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # a client that went away
        except OSError:
            # Closed, or no descriptors left for the moment.
            self._strangers.cut_oldest()
            self._closing.wait(_PAUSE_S)
            return
        try:
            wire = Connection(sock, self._name, self._send_s, self._most_body)
        except OSError:  # it is gone already
            sock.close()
            return
        self._strangers.enter(wire)
        self._selector.register(wire, selectors.EVENT_READ, wire)
        if self._local and not same_user(sock):
            self._end(wire)
        elif not self._local:
            from ckptd.base.net.tls import identity_at

            role = DOORS[self._purpose].serves
            with self._ended_by_errors(wire):
                wire.expect_tls(identity_at(self._purpose, self._proof(), role))

    def _hear(self, wire: Connection) -> None:
        with self._ended_by_errors(wire):
            for hello in wire.take(HELLO, 0.0):
                answer = answer_hello(
                    hello, self._purpose, wire.proved, self._about(), self._full()
                )
                wire.send(answer)
                if isinstance(answer, Refusal) or wire.codec.half:
                    self._end(wire)
                    return
                wire.codec.let_in()
                self._let_in(wire)
                return

    def _full(self) -> Refusal | None:
        with self._lock:
            full = len(self._served) >= self._clients
        return Refusal("link-busy", "the server is full") if full else None

    @contextlib.contextmanager
    def _ended_by_errors(self, wire: Connection) -> Iterator[None]:
        try:
            yield
        except (CkptdError, OSError):
            self._end(wire)

    def _end(self, wire: Connection) -> None:
        if self._strangers.leave(wire):
            self._cut(wire)

    def _cut(self, wire: Connection) -> None:
        self._selector.unregister(wire)
        wire.release()
        with self._lock:
            self._refused += 1

    # -- clients: a thread each ----------------------------------------------------------------

    def _let_in(self, wire: Connection) -> None:
        self._strangers.leave(wire)
        self._selector.unregister(wire)
        thread = threading.Thread(
            target=self._run_client, args=(wire,), name=f"serve {self._name}", daemon=True
        )
        with self._lock:
            self._served[wire] = thread
            self._accepted += 1
        try:
            thread.start()
        except RuntimeError:  # no more threads: this client tries again
            self._forget(wire)

    def _run_client(self, wire: Connection) -> None:
        kept = False
        try:
            kept = bool(self._serve(wire))
        except CkptdError:
            # The connection ended: clients come and go. What they asked for in vain was answered.
            if not wire.broken:
                raise
        finally:
            self._forget(wire, kept)

    def _forget(self, wire: Connection, kept: bool = False) -> None:
        with self._lock:
            self._served.pop(wire, None)
        if not kept:
            wire.release()
