"""Connects to the controller with proof of both ends; longest frame, time for a send."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from ckptd.base.net.address import parse_address
from ckptd.base.net.connection import Connection, greet_server

if TYPE_CHECKING:
    from ckptd.base.net.tls import Identity

PURPOSE = "controller"
"""Of the connections to a controller, see `ckptd.base.net.roles.DOORS`."""
MOST_FRAME_BYTES = 4 << 20
"""Largest message between a controller and its peers."""
_SEND_S = 2.0


def dial(
    address: str,
    *,
    job: str,
    role: Literal["agent", "operator"],
    name: str,
    secret: bytes,
    timeout_s: float,
) -> tuple[Connection, str]:
    """Connect to the controller at `address`, if it is known, and shake hands, within `timeout_s`.

    Returns
    -------
    tuple
        The connection, and which life of which controller answers.

    Raises
    ------
    UsageError
        It is no address.
    ConnectionRefusedError
        It is empty.
    TransientStoreError
        Kinds of `Connection`: nothing answers there, or what answers is no controller.
    StoreError
        kind ``permission``: it has another secret. Another protocol.
    RefusedError
        kind ``not-the-controller``: it is another job's.
    """
    if not address:
        raise ConnectionRefusedError("the controller's address is unknown")
    end = time.monotonic() + timeout_s
    sock = parse_address(address).connect(timeout_s)
    connection = Connection(sock, address, _SEND_S, MOST_FRAME_BYTES)
    try:
        said = greet_server(
            connection,
            secret,
            PURPOSE,
            role=role,
            node=name,
            scope=job,
            wait_s=end - time.monotonic(),
            about={"job": job},
        )
    except BaseException:
        connection.release()
        raise
    return connection, str(said.get("life", ""))


def await_greeting(address: str, timeout_s: float, identity: Identity | None = None) -> None:
    """Return once the server at `address` has answered: its process is there and runs.

    That it can be connected to proves neither: the kernel accepts connections to a process that is
    stopped, and a proxy those to one that is gone.

    Parameters
    ----------
    timeout_s
        For the connection, and once more for the greeting: a slow look-up of the name says nothing
        of the server.
    identity
        With one the server has to prove that it is the job's controller; without, it may be any.

    Raises
    ------
    UsageError
        It is no address.
    TransientStoreError
        Kind ``link-late``: no answer within `timeout_s`. Kinds of `Connection`: nothing listens
        there.
    StoreError
        What listens there is no server of ckptd, or not the job's controller.
    """
    connection = Connection(parse_address(address).connect(timeout_s), address, _SEND_S)
    try:
        connection.shake(identity, timeout_s, None if identity is None else PURPOSE)
    finally:
        connection.release()
