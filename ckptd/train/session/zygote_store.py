"""A process that serves the job store of one generation, and does nothing else."""

from __future__ import annotations

import signal

from ckptd.elastic.launchers.torchrun_store import host_store

__all__ = ["main"]


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
