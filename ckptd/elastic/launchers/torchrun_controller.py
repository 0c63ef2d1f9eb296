"""The job's controller, started by an agent of the machine that the endpoint names."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ckptd.elastic.launchers.torchrun_workers import Workers

__all__ = ["Controller", "ControllerPlace", "command_of", "is_here"]

_DIAL_S = 1.0
_START_S = 20.0
_POLL_S = 0.02
_END_S = 5.0
_MOST_EXACT = 1000


class ControllerPlace(Protocol):
    """Where a controller is to be, and for which job; see `SideSettings`."""

    @property
    def job(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def conf(self) -> Mapping[str, str]: ...


def is_here(host: str) -> bool:
    """Return whether a name or address is this machine's: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, number, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, number) as sock:
            sock.bind(address)
            return True
    return False


def command_of(place: ControllerPlace) -> list[str]:
    """Return the command that starts the controller of this job."""
    conf = place.conf
    microbatches = conf.get("microbatches") or str(_microbatches(place.most))
    command = [sys.executable, "-m", "ckptd.cli.main", "controller", "--job", place.job]
    command += ["--listen", place.endpoint, "--planned", f"1,{place.most},1"]
    command += ["--microbatches", microbatches, "--least", str(place.least)]
    for key in sorted(conf):
        if key.startswith("controller."):
            command += [f"--{key.removeprefix('controller.')}", conf[key]]
    return command


def _microbatches(most: int) -> int:
    """Return a number of micro-batches with which each further node makes steps shorter."""
    return min(most, _MOST_EXACT) * (most + 1)


class Controller:
    """Sees to it that a controller listens, from an agent of its machine.

    Parameters
    ----------
    place
        Where, and for which job.
    workers
        Of the agent: the controller is no worker.
    environ
        Of the controller.
    folder
        Of its lock and its log.
    """

    def __init__(
        self, place: ControllerPlace, workers: Workers, environ: Mapping[str, str], folder: Path
    ) -> None:
        self._place, self._workers, self._environ = place, workers, environ
        digest = hashlib.sha256(place.job.encode()).hexdigest()[:12]
        self._lock = folder / f"controller-{digest}.lock"
        self.log = folder / f"controller-{digest}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start it if nobody listens, unless another agent is about to."""
        with self._locked() as mine:
            if not mine or self._listens():
                return
            with open(self.log, "ab") as log:
                self._process = self._workers.start_other(
                    command_of(self._place),
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            end = time.monotonic() + _START_S
            while self._process.poll() is None and time.monotonic() < end and not self._listens():
                time.sleep(_POLL_S)

    def leave(self, within_s: float) -> None:
        """Wait for the end of a controller that this agent has started; end it if need be."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listens(self) -> bool:
        try:
            with socket.create_connection((self._place.host, self._place.port), _DIAL_S) as sock:
                return bool(sock.getsockname() != sock.getpeername())
        except OSError:
            return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(fd)
