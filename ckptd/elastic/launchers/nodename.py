"""Name of a node, locked so that two launchers of a job on one machine do not have the same."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from ckptd.base.runtime.agentlink import run_folder
from ckptd.errors import UsageError

_MOST_NAMES = 1000


def name_lock(job: str, node: str) -> Path:
    """Return the file that a launcher of `job` locks for as long as it is node `node`."""
    digest = hashlib.sha256(f"{job}\n{node}".encode()).hexdigest()[:20]
    return run_folder() / f"node-{digest}.lock"


def claim_name(job: str, given: str) -> tuple[str, int]:
    """Return a name for this node, and the descriptor of its lock.

    `given`, with a number from the second launcher of the job on this machine on: so each has the
    same name again when the job is started again. No other launcher gets it until the descriptor is
    closed or this process ends.

    Raises
    ------
    UsageError
        Too many launchers of the job run on this machine.
    """
    for number in range(1, _MOST_NAMES + 1):
        name = given if number == 1 else f"{given}-{number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name_lock(job, name), flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return name, fd
    raise UsageError("too many launchers of this job run on this machine", where=given)
