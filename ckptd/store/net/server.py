"""`StoreServer`: lets other processes use a store that this one holds."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from ckptd.base.net.address import UnixAddress, parse_server, same_user
from ckptd.base.net.connection import Connection, Refusal, greet_client
from ckptd.base.net.signing import check_secret
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.errors import CkptdError, DeadlineError
from ckptd.store.base import Store, StoreSpec
from ckptd.store.net.messages import PURPOSE
from ckptd.store.net.rules import Allow, Rules
from ckptd.store.net.session import Limits, Session

_CLOSE_S = 30.0
_PAUSE_S = 0.1


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


class StoreServer(OfOneProcess):
    """Serves `store` to `ckptd.store.net.NetStore`, a thread a connection.

    Over TCP clients need the secret; over a Unix socket they must run as our user. No client,
    whatever it sends, keeps the others from their work or makes the server allocate more than a
    few MiB a connection, besides the object of a put.

    Parameters
    ----------
    store
        Stays the caller's: `close` leaves it open.
    url
        Where to listen: ``ckptd://host:port`` (port 0: any) or ``ckptd+unix:///path``.
    secret
        Hexadecimal digits (`ckptd.store.net.new_secret`); needed for TCP.
    read_only, allow
        See `Rules`.
    limits
        See `Limits`.

    Raises
    ------
    UsageError
        No store opens this URL, or its scheme is taken; or a store does not know an option, or
        cannot take its value.
    StoreError
        The address cannot be had.
    """

    def __init__(
        self,
        store: Store,
        url: str = "ckptd://127.0.0.1:0",
        *,
        secret: str | None = None,
        read_only: bool = False,
        allow: Allow | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._address = parse_server(url)
        self._secret = b""
        self._store = store
        self._promised = store.capabilities
        self._rules = Rules(read_only, allow)
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._wires: dict[Connection, threading.Thread] = {}
        self._strangers: dict[Connection, None] = {}
        self._accepted = self._refused = 0
        self._closing = threading.Event()
        self.change_secret(secret)
        address = self._address
        self._listener, self._address = address.listen()
        self._inode = os.stat(address.path).st_ino if isinstance(address, UnixAddress) else 0
        self._thread = threading.Thread(target=self._accept, name=f"listen {self.url}", daemon=True)
        self._thread.start()

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        if "_listener" in vars(self):
            self._listener.close()  # or the address would be taken for as long as the child lives

    @property
    def url(self) -> str:
        """Where it listens, with the port that it got."""
        return self._address.url

    def change_secret(self, secret: str | None) -> None:
        """Ask another secret of clients that connect from now on; a Unix socket asks for none.

        Raises
        ------
        UsageError
            It is none.
        """
        if not self._address.local:
            self._secret = check_secret(secret, self._address.url)

    def describe(self) -> StoreSpec:
        """Return plain data from which another process opens the store; the secret is in it."""
        options: dict[str, Any] = {} if self._address.local else {"secret": self._secret.hex()}
        return StoreSpec(self.url, options)

    def counts(self) -> Counts:
        """Return how many connections there are and were."""
        with self._lock:
            return Counts(len(self._wires) - len(self._strangers), self._accepted, self._refused)

    # -- threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Closed, or no descriptors left for the moment, or a client that went away.
                self._closing.wait(_PAUSE_S)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        try:
            wire = Connection(sock, f"a client of {self.url}", self._limits.frame_s)
        except OSError:  # it is gone already
            sock.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(wire, sock), name=f"serve {self.url}", daemon=True
        )
        oldest = None
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                if len(self._strangers) >= self._limits.strangers:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                self._wires[wire] = thread
                self._strangers[wire] = None
        if oldest is not None:
            oldest.close()  # its thread counts it as refused
        if closing:
            wire.release()
            return
        try:
            thread.start()
        except RuntimeError:  # no more threads: this client tries again
            self._forget(wire)

    def _serve(self, wire: Connection, sock: socket.socket) -> None:
        try:
            if self._greet(wire, sock):
                Session(wire, self._store, self._rules, self._limits).run()
        except CkptdError:
            # The connection ended: clients come and go. Errors of the store were answered.
            if not wire.broken:
                raise
        finally:
            self._forget(wire)

    def _greet(self, wire: Connection, sock: socket.socket) -> bool:
        good = False
        try:
            if self._address.local and not same_user(sock):
                return False
            with self._lock:
                room = len(self._wires) - len(self._strangers) < self._limits.connections
            busy = Refusal("link-busy", "the server is full")
            greeting = greet_client(
                wire,
                self._secret,
                PURPOSE,
                wait_s=self._limits.greeting_s,
                about=msgspec.to_builtins(self._promised),
                refuse=lambda _, proved: busy if proved and not room else None,
            )
            good = greeting is not None
            return good
        finally:
            with self._lock:
                self._strangers.pop(wire, None)
                self._accepted += good
                self._refused += not good

    def _forget(self, wire: Connection) -> None:
        with self._lock:
            self._wires.pop(wire, None)
            self._strangers.pop(wire, None)
        wire.release()

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening, end all connections and wait for their threads. Idempotent.

        Raises
        ------
        DeadlineError
            A call of the store did not end within 30 s; its thread is left behind.
        """
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._join(self._thread, time.monotonic() + _CLOSE_S)
        self._listener.close()
        self._remove_socket()
        with self._lock:
            wires = dict(self._wires)
        for wire in wires:
            wire.close()
        end = time.monotonic() + _CLOSE_S
        for thread in wires.values():
            self._join(thread, end)

    def _join(self, thread: threading.Thread, end: float) -> None:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise DeadlineError(
                "a thread of the store's server does not end", where=self.url, found=thread.name
            )

    def _remove_socket(self) -> None:
        if isinstance(self._address, UnixAddress):
            with contextlib.suppress(OSError):  # it was removed
                if os.stat(self._address.path).st_ino == self._inode:
                    os.unlink(self._address.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
