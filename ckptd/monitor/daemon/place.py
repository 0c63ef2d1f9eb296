"""Where a job's daemon is found: address file in the run folder, lock, URL with token."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckptd.base.net.signing import reader_token
from ckptd.base.runtime.agentlink import run_folder
from ckptd.decoding import json_decoder
from ckptd.errors import ConflictError, NotFoundError

_MOST_BYTES = 16 << 10


class DaemonAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a daemon listens.

    Attributes
    ----------
    job
        Whose it is.
    url
        ``http://HOST:PORT``.
    token
        Lets people and scripts read and act.
    pid
        Its process.
    history
        Its history file.
    """

    job: str
    url: str
    token: str
    pid: int
    history: str

    @property
    def login(self) -> str:
        """URL for a browser; it gives full access."""
        return f"{self.url}/?token={self.token}"

    @property
    def reading(self) -> str:
        """URL for a browser that may read and not act."""
        return f"{self.url}/?token={reader_token(self.token)}"


_addresses = json_decoder(DaemonAddress)


class DaemonPlace:
    """Files of one job's daemon in the run folder.

    Parameters
    ----------
    job
        Name of the job.
    folder
        The run folder; the usual one if left out.
    """

    def __init__(self, job: str, folder: Path | None = None) -> None:
        self.job = job
        base = folder or run_folder()
        name = hashlib.sha256(job.encode()).hexdigest()[:20]
        self.address = base / f"daemon-{name}.json"
        self.lock = base / f"daemon-{name}.lock"
        self.history = base / f"history-{name}.sqlite"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the job's daemon on this machine while the block runs.

        Raises
        ------
        ConflictError
            Another process is.
        """
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    "a daemon of this job runs on this machine already",
                    where=str(self.address),
                    hint="ckptd serve --job NAME for another job",
                ) from None
            try:
                yield
            finally:
                self.address.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def write(self, address: DaemonAddress) -> None:
        """Say where the daemon listens; readers see all of it or nothing."""
        draft = self.address.with_suffix(f".{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(address))
        os.replace(draft, self.address)

    def read(self) -> DaemonAddress | None:
        """Return where the daemon listens; None if none runs."""
        try:
            data = self.address.read_bytes()[:_MOST_BYTES]
            fd = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None  # not locked: the files were left by a daemon that was killed
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
        try:
            return _addresses.decode(data)
        except msgspec.MsgspecError:
            return None


def daemons(folder: Path | None = None) -> list[DaemonAddress]:
    """Return the daemons of this user that run on this machine."""
    base = folder or run_folder()
    found = []
    for path in sorted(base.glob("daemon-*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = _addresses.decode(path.read_bytes()[:_MOST_BYTES])
            address = DaemonPlace(record.job, base).read()
            if address is not None:
                found.append(address)
    return found


def find_daemon(job: str | None = None) -> DaemonAddress:
    """Return the daemon of a job, or the only one of this user on this machine.

    Parameters
    ----------
    job
        Name of the job; ``CKPTD_JOB`` if left out.

    Raises
    ------
    NotFoundError
        None runs here, or it is not clear which is meant.
    """
    job = job or os.environ.get("CKPTD_JOB")
    found = daemons()
    if job is not None:
        found = [a for a in found if a.job == job]
    if len(found) == 1:
        return found[0]
    raise NotFoundError(
        "no daemon runs here" if not found else "several daemons run here",
        wanted=f"the daemon of {job}" if job else "one daemon",
        found=", ".join(a.job for a in found) or None,
        hint="ckptd serve starts one; --job NAME or --daemon URL says which"
        if not found
        else "--job NAME says which",
    )
