"""Job store of a generation (TCPStore, MASTER_PORT): the process that serves it."""

from __future__ import annotations

import contextlib
import signal
import socket

from torch.distributed import TCPStore

from ckptd.errors import StoreError

_BACKLOG = 2048


def host_store(host: str) -> TCPStore:
    """Start a fresh store in this process, on a free port of `host` and of no other address.

    By default torch's store listens on all addresses, for any process that reaches one of them.

    Raises
    ------
    StoreError
        `host` is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        family, kind, _, _, address = found
        listener = socket.socket(family, kind)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.bind(address)
            listener.listen(_BACKLOG)
            on_error.pop_all()
    except OSError as error:
        raise StoreError(
            "the job's store cannot listen here",
            where=host,
            wanted="an address of this machine that the other nodes reach",
            found=error.strerror or error,
            hint="give --local-addr ADDRESS",
        ) from error
    # With a descriptor, torch asks for the port too, and takes the descriptor over.
    return TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def main(host: str, told: str) -> None:
    """Serve a job store on a free port of `host`, tell the port, and stay until killed.

    Parameters
    ----------
    host
        Address of this machine to listen at; other nodes reach it by that.
    told
        A descriptor: the port is written there, in decimal digits, and it is closed.
    """
    store = host_store(host)
    with open(int(told), "w") as out:
        out.write(f"{store.port}\n")
    while True:
        signal.pause()
