"""A process that serves the job store of one generation, and does nothing else."""

from __future__ import annotations

import signal
import socket

from torch.distributed import TCPStore

__all__ = ["main"]

_BACKLOG = 2048


def main(host: str, told: str) -> None:
    """Serve a job store on a free port of `host`, tell the port, and stay until killed.

    Parameters
    ----------
    host
        Address of this machine to listen at; other nodes reach it by that.
    told
        A descriptor: the port is written there, in decimal digits, and it is closed.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.bind(address)
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    with open(int(told), "w") as out:
        out.write(f"{store.port}\n")
    while True:
        signal.pause()
