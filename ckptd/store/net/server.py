"""`StoreServer`: lets other processes use a store; its sockets, secret, counts.

In it: how long its end waits for clients.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from ckptd.base.closing import Closing
from ckptd.base.net.address import UnixAddress, parse_server
from ckptd.base.net.door import Counts, Door
from ckptd.base.net.signing import check_secret
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.errors import DeadlineError
from ckptd.store.base import Store, StoreSpec
from ckptd.store.net.messages import PURPOSE
from ckptd.store.net.rules import Allow, Rules
from ckptd.store.net.session import Limits, Session

_CLOSE_S = 30.0


class StoreServer(OfOneProcess, Closing):
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
        self.change_secret(secret)
        address = self._address
        listener, self._address = address.listen()
        self._inode = os.stat(address.path).st_ino if isinstance(address, UnixAddress) else 0
        self._door = Door(
            listener,
            lambda: self._secret,
            PURPOSE,
            lambda wire: Session(wire, self._store, self._rules, self._limits).run(),
            name=f"a client of {self.url}",
            clients=self._limits.connections,
            greeting_s=self._limits.greeting_s,
            send_s=self._limits.frame_s,
            about=lambda: msgspec.to_builtins(self._promised),
            strangers=self._limits.strangers,
        )

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
        return self._door.counts()

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening, end all connections and wait for their threads. Idempotent.

        Raises
        ------
        DeadlineError
            A call of the store did not end within 30 s; its thread is left behind.
        """
        left = self._door.close(_CLOSE_S)
        self._remove_socket()
        if left is not None:
            raise DeadlineError(
                "a thread of the store's server does not end", where=self.url, found=left.name
            )

    def _remove_socket(self) -> None:
        if isinstance(self._address, UnixAddress):
            with contextlib.suppress(OSError):  # it was removed
                if os.stat(self._address.path).st_ino == self._inode:
                    os.unlink(self._address.path)
