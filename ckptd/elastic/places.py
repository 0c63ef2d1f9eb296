"""Opens the membership log and leader record of a job: a URL, or a folder of this machine."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ckptd.base.runtime.agentlink import run_folder
from ckptd.elastic.leader import LeaderRecord
from ckptd.elastic.log import MembershipLog
from ckptd.store import open_store


class JobPlaces(NamedTuple):
    """The log and the leader record of one job.

    Attributes
    ----------
    log, leader
        Open; nothing was contacted yet.
    url
        Where they are.
    local
        Whether only this machine sees them.
    """

    log: MembershipLog
    leader: LeaderRecord
    url: str
    local: bool


def own_log(job: str) -> str:
    """Return the folder for the log of `job` on this machine, where no other place is given."""
    return str(run_folder() / f"elastic-{hashlib.sha256(job.encode()).hexdigest()[:20]}")


def open_places(job: str, url: str | None = None) -> JobPlaces:
    """Open the log and the leader record of `job`.

    Parameters
    ----------
    url
        A path or any URL of a store; a folder of the run folder if left out, which only this
        machine sees. Jobs must not share a place.

    Raises
    ------
    UsageError
        Nothing opens it.
    """
    local, url = not url, url or own_log(job)
    store = open_store(url)
    return JobPlaces(MembershipLog(store), LeaderRecord(store), url, local)
