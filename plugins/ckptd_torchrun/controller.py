"""The job's controller, as agents of torchrun start and find it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ckptd.elastic.launchers import (
    Leader,
    Outlook,
    is_loopback,
    open_places,
    parse_address,
    stand_in_pause_s,
)
from ckptd.errors import CkptdError
from ckptd_torchrun.workers import Workers

__all__ = ["Controller", "ControllerPlace"]

_LOG = logging.getLogger(__name__)
_CKPTD = (sys.executable, "-c", "from ckptd.cli.main import main; main()")
_START_S = 20.0
_DIAL_S = 1.0
_POLL_S = 0.02
_END_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork


class ControllerPlace(Protocol):
    """Where a controller is to be, and for which job; see `SideSettings`."""

    @property
    def job(self) -> str:
        """Its name."""

    @property
    def host(self) -> str:
        """Name or address of the endpoint."""

    @property
    def port(self) -> int:
        """Port of the endpoint."""

    @property
    def endpoint(self) -> str:
        """Both."""

    @property
    def here(self) -> bool:
        """Whether that is this machine."""

    @property
    def least(self) -> int:
        """Nodes at least."""

    @property
    def most(self) -> int:
        """Nodes at most."""

    @property
    def conf(self) -> Mapping[str, str]:
        """All of ``--rdzv-conf``."""


class Controller:
    """Finds the controller, and sees to it that there is one.

    The first is started by an agent of the endpoint's machine. When it does not answer any more,
    any agent that sees the membership log starts the next one: those of the same machine, and with
    ``--rdzv-conf log=URL`` those of all machines.

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
    node
        Name of the agent's node.
    """

    def __init__(
        self,
        place: ControllerPlace,
        workers: Workers,
        environ: Mapping[str, str],
        folder: Path,
        node: str,
    ) -> None:
        self._place, self._workers, self._environ = place, workers, environ
        digest = hashlib.sha256(place.job.encode()).hexdigest()[:12]
        self._lock = folder / f"controller-{digest}.lock"
        self.log = folder / f"controller-{digest}.log"
        self._url = place.conf.get("log")
        self._seat = open_places(place.job, self._url).leader if self._sees_log else None
        several = self._seat is not None and place.most > 1
        self._outlook = Outlook(self._seat, node) if several and self._seat is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._silent_since = 0.0
        self._pause_s = 0.0
        self._met = False
        self._tries = 0

    @property
    def _sees_log(self) -> bool:
        return self._place.here or self._url is not None

    def address(self) -> str:
        """Return where the controller may be; in turns the newest seat and the endpoint."""
        self._asked += 1
        seat = self._newest() if self._asked % 2 else None
        return seat.address if seat is not None else self._place.endpoint

    def keep(self, connected: bool, node_rank: int) -> None:
        """Start one, if none has answered for long; call it a few times a second, in one thread.

        Parameters
        ----------
        connected
            Whether one answers now.
        node_rank
            Of this node in the last generation: the lower, the earlier it starts one.
        """
        now = time.monotonic()
        if connected:
            self._met, self._silent_since, self._tries = True, 0.0, 0
            return
        if self._silent_since == 0.0:
            self._silent_since = now
            # An agent that is new here has not met the controller yet, and there may be one.
            none = self._place.here and not self._met and not self._listens()
            self._pause_s = 0.0 if none else stand_in_pause_s(node_rank)
        may = self._sees_log and (self._met or self._place.here)
        if may and now - self._silent_since >= self._pause_s and self._may_stand_in():
            self._start()
            self._silent_since = 0.0
            self._met = True

    def _may_stand_in(self) -> bool:
        """Whether the controller is gone, or cut off from more nodes than it hears."""
        if self._outlook is None or self._pause_s == 0.0:
            return True
        # Where the place cannot be reached, no seat can be taken either.
        with contextlib.suppress(CkptdError):
            self._outlook.say_silent()
        return self._outlook.looked and self._outlook.may_stand_in(met=self._met)

    def leave(self, job_over: bool, within_s: float) -> None:
        """End a controller that this agent has started; where the job is over, it ends itself."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(within_s if job_over else 0.0)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _newest(self) -> Leader | None:
        if self._seat is None:
            return None
        # Where it cannot be read, the endpoint is as good a guess.
        with contextlib.suppress(CkptdError):
            return self._seat.newest()
        return None

    def _listens(self) -> bool:
        newest = self._newest()
        addresses = {self._place.endpoint, *([newest.address] if newest is not None else [])}
        for address in addresses:
            with contextlib.suppress(OSError, CkptdError):
                with socket.create_connection(parse_address(address), _DIAL_S) as sock:
                    if sock.getsockname() != sock.getpeername():
                        return True
        return False

    def _start(self) -> None:
        with self._locked() as mine:
            if not mine:
                return
            before = self._newest()
            if self._process is not None and self._process.poll() is None:
                # It does not answer, and another one is about to take its seat.
                self._process.kill()
                self._process.wait()
            number = before.number if before is not None else -1
            with open(self.log, "ab") as log:
                self._process = self._workers.start_other(
                    self._command(number),
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_with_its_parent,
                )
            self._tries += 1
            self._await_seat(self._process, number)

    def _await_seat(self, process: subprocess.Popen[bytes], number: int) -> None:
        end = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < end:
            newest = self._newest()
            if newest is not None and newest.number > number:
                return
            time.sleep(_POLL_S)
        if process.poll():
            _LOG.warning("the controller ended with %s; see %s", process.returncode, self.log)

    def _command(self, after: int) -> list[str]:
        place = self._place
        bind = place.host if is_loopback(place.host) else "0.0.0.0"
        # The endpoint's port may still be held by one that is stopped: another one then.
        port = place.port if place.here and self._tries % 2 == 0 else 0
        command = [*_CKPTD, "controller", "--job", place.job]
        command += ["--nodes", f"{place.least}:{place.most}", "--after", str(after)]
        command += ["--bind", bind, "--port", str(port)]
        if place.here:
            command += ["--host", place.host]
        if self._url is not None:
            command += ["--log", self._url]
        for key in sorted(place.conf):
            if key.startswith("controller."):
                command += ["--set", f"{key.removeprefix('controller.')}={place.conf[key]}"]
        return command

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Have at most one agent of a machine start one: of several, all but one would end."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(fd)


def _with_its_parent() -> None:
    """Let the controller end when this agent does; others of the job start the next one."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
