"""Where a job keeps its membership log and its controller's seat, by URL."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ckptd.elastic.etcd import Etcd, EtcdLog, EtcdSeat
from ckptd.elastic.log import MembershipLog, StoreLog
from ckptd.elastic.seat import SeatBook, StoreSeat
from ckptd.errors import UsageError
from ckptd.runtime.agentlink import run_folder
from ckptd.store import open_store

__all__ = ["Places", "open_places", "own_log"]

_ETCD = "etcd"


class Places(NamedTuple):
    """The log and the seat of one job.

    Attributes
    ----------
    log, seat
        Open; nothing was contacted yet.
    url
        Where they are.
    """

    log: MembershipLog
    seat: SeatBook
    url: str


def own_log(job: str) -> str:
    """Return the folder for the log of `job` on this machine, where no other place is given."""
    return str(run_folder() / f"elastic-{hashlib.sha256(job.encode()).hexdigest()[:20]}")


def open_places(job: str, url: str | None = None) -> Places:
    """Open the log and the seat of `job`.

    Parameters
    ----------
    url
        A path, any URL of a store, or ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``; a folder of the run
        folder if left out, which only this machine sees. Jobs must not share a place.

    Raises
    ------
    UsageError
        kind ``bad-url``: nothing opens it.
    """
    url = url or own_log(job)
    if url.startswith(f"{_ETCD}://"):
        rest = url.removeprefix(f"{_ETCD}://")
        members, slash, prefix = rest.partition("/")
        if not members or not slash or not prefix.strip("/"):
            raise UsageError(
                "this is no place in etcd",
                kind="bad-url",
                wanted="etcd://HOST:PORT[,HOST:PORT]/PREFIX",
                found=url[:200],
            )
        endpoints = [f"http://{member}" for member in members.split(",")]
        prefix = prefix.strip("/")
        seat = EtcdSeat(Etcd(endpoints), f"/{prefix}/controller/")
        return Places(EtcdLog(endpoints, f"/{prefix}/membership/"), seat, url)
    store = open_store(url)
    return Places(StoreLog(store), StoreSeat(store), url)
