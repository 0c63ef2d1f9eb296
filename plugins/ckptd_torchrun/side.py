"""Side of an agent of torchrun: a link, a guard, a lease, and perhaps the controller."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptd.elastic.launchers import (
    KEPT_FROM_RANKS,
    LAUNCHER_VARIABLE,
    LEASE_VARIABLE,
    SECRET_VARIABLE,
    Address,
    ControllerSupervisor,
    LeaseFile,
    NodeLink,
    address_towards,
    claim_name,
    hand,
    is_here,
    is_loopback,
    job_secret,
    open_places,
    parse_address,
    run_folder,
)
from ckptd.errors import CkptdError, UsageError
from ckptd_torchrun import guard
from ckptd_torchrun.guard import TOKEN_VARIABLE
from ckptd_torchrun.node import Joined, TorchrunNode

__all__ = ["Side", "SideSettings"]

_LOG = logging.getLogger(__name__)
_PORT = 29400
_LOOK_S = 0.25
_LEASE_S = 120.0


@dataclass(frozen=True)
class SideSettings:
    """Settings from torchrun's arguments.

    Attributes
    ----------
    job
        ``--rdzv-id``.
    host, port
        ``--rdzv-endpoint``: where the controller is.
    least, most
        ``--nnodes``.
    local_addr
        Address of this machine for others; empty to find out.
    here
        Whether the controller is to be started by an agent of this machine.
    join_s
        For how long no controller may answer while this agent waits, in seconds.
    conf
        All of ``--rdzv-conf``.
    """

    job: str
    host: str
    port: int
    least: int
    most: int
    local_addr: str
    here: bool
    join_s: float
    conf: Mapping[str, str]

    @classmethod
    def read(
        cls,
        endpoint: str,
        job: str,
        least: int,
        most: int,
        local_addr: str | None,
        conf: Mapping[str, Any],
    ) -> SideSettings:
        """Return the settings of ``torchrun``'s arguments.

        Raises
        ------
        UsageError
            A duration, size or rule on the command line cannot be read, or a plugin is called in a
            way that it does not serve.
        """
        host, port = parse_address(
            endpoint,
            "a rendezvous endpoint",
            where="--rdzv-endpoint",
            default_port=_PORT,
        )
        is_host = str(conf.get("is_host", "")).lower()
        here = is_host in ("1", "true", "yes") if is_host else is_here(host)
        return cls(
            job=job,
            host=host,
            port=port,
            least=least,
            most=most,
            local_addr=local_addr or "",
            here=here,
            join_s=_seconds(conf, "timeout", 900.0),
            conf={str(key): str(value) for key, value in conf.items()},
        )

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``, a host of IPv6 in brackets."""
        return str(Address(self.host, self.port))


def _seconds(conf: Mapping[str, Any], key: str, default: float) -> float:
    try:
        value = float(conf.get(key, default))
    except (TypeError, ValueError):
        value = -1.0
    if not 0.0 < value < 1e9:
        raise UsageError(
            "invalid number of seconds",
            where=f"--rdzv-conf {key}",
            found=str(conf.get(key))[:100],
        )
    return value


def _towards(host: str) -> str:
    """Return the address by which others reach this machine; empty where only its name is known."""
    found = address_towards(host)
    return "" if is_loopback(found) or found in ("0.0.0.0", "::") else found


class Side:
    """Everything of an agent but torch.

    Parameters
    ----------
    settings
        See `SideSettings`.

    Attributes
    ----------
    node
        What the agent asks.
    """

    def __init__(self, settings: SideSettings) -> None:
        self._settings = settings
        folder = run_folder()
        given = os.environ.get("CKPTD_NODE") or socket.gethostname()
        name, self._name_lock = claim_name(settings.job, given)
        token = secrets.token_hex(8)
        mine = folder / f"t-{token[:8]}"
        mine.mkdir(mode=0o700)
        self._folder = mine
        self._lease = LeaseFile(mine / "lease")
        self.node = TorchrunNode(
            name,
            settings.local_addr,
            mine / "w",
            partial(hand, os.environ.get(SECRET_VARIABLE), name),
        )
        self._environ = os.environ.copy()
        self._guard = self._start_guard(token)
        self._token = token
        self._controller = self._make_supervisor()
        self._link = NodeLink(
            self._controller.addresses,
            settings.job,
            job_secret(settings.job, folder),
            self.node.up,
            self.node.take,
            lease_s=_seconds(settings.conf, "controller.lease_s", _LEASE_S),
            leased=self._lease.extend,
            seated=self._controller.still,
        )
        self._mark_environment(token)
        self._problem = ""
        """Why no controller could be started, as it was logged last."""
        self._leaving_s = 0.0
        """For how long a controller of this agent may go on when the agent leaves."""
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="ckptd-side", daemon=True)

    def start(self) -> None:
        """Begin to look after the controller, and connect to it."""
        self._keeper.start()
        self._link.start()
        self.node.start(self._link)

    @property
    def address(self) -> str:
        """Where others reach this machine."""
        return self._settings.local_addr or self._link.here or socket.getfqdn()

    def join(
        self, host_store: Callable[[int], tuple[str, int]], connect: Callable[[str, int], None]
    ) -> Joined:
        """Wait until this node takes part in a generation; see `TorchrunNode.join`."""
        joined = self.node.join(host_store, connect, self._settings.join_s)
        os.environ["CKPTD_GENERATION"] = str(joined.begin.generation)
        return joined

    def leave(self, within_s: float) -> None:
        """End all that is beside the agent; see `TorchrunNode.leave`."""
        self.node.leave(within_s)
        self._link.close()
        # Where the job is over, the controller ends by itself.
        self._leaving_s = within_s if self.node.job_over else 0.0
        self._closed.set()
        self._keeper.join()
        self._guard.kill()
        self._guard.wait()
        os.environ.update({n: v for n, v in self._environ.items() if n in KEPT_FROM_RANKS})
        os.close(self._name_lock)
        self._lease.close()
        for path in (*self._folder.iterdir(), self._folder):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def _make_supervisor(self) -> ControllerSupervisor:
        s = self._settings
        url = s.conf.get("log")
        digest = hashlib.sha256(s.job.encode()).hexdigest()[:12]
        arguments = ["--job", s.job, "--nodes", f"{s.least}:{s.most}"]
        if url is not None:
            arguments += ["--log", url]
        for key in sorted(s.conf):
            if key.startswith("controller."):
                arguments += ["--set", f"{key.removeprefix('controller.')}={s.conf[key]}"]
        return ControllerSupervisor(
            open_places(s.job, url) if s.here or url is not None else None,
            s.endpoint,
            s.local_addr or _towards(s.host),
            arguments,
            self._environ,
            self._folder,
            _LOG.warning,
            self.node.name if s.most > 1 else "",
            here=s.here,
            # The controller is no worker of the agent's.
            start=self.node.workers.start_other,
            anywhere=True,
            kept_log=run_folder() / f"controller-{digest}.log",
            greet=lambda *asked: self._link.greet(*asked),
        )

    def _mark_environment(self, token: str) -> None:
        """Set the environment variables that the workers of this agent inherit; take its secrets.

        `leave` gives them back: the agent may have another rendezvous.
        """
        for name in KEPT_FROM_RANKS:
            os.environ.pop(name, None)
        os.environ.setdefault("CKPTD_JOB", self._settings.job)
        os.environ["CKPTD_NODE"] = self.node.name
        os.environ[LEASE_VARIABLE] = str(self._lease.path)
        os.environ[LAUNCHER_VARIABLE] = str(self.node.reports.path)
        os.environ[TOKEN_VARIABLE] = token

    def _start_guard(self, token: str) -> subprocess.Popen[bytes]:
        # By its path and without site-packages: it must be there within milliseconds.
        command = [sys.executable, "-I", "-S", str(guard.__file__)]
        return self.node.workers.start_other(
            [*command, str(os.getpid()), token, str(self._lease.path)],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _keep(self) -> None:
        while not self._closed.is_set():
            if self._guard.poll() is not None:
                self._guard = self._start_guard(self._token)
            self._keep_controller()
            if refusal := self._link.new_refusal():
                _LOG.warning("%s", refusal)
            self._closed.wait(_LOOK_S)
        self._controller.end(self._leaving_s)

    def _keep_controller(self) -> None:
        try:
            if self._controller.turn(self._link.absent_s, self.node.node_rank):
                self._link.hurry()
        except CkptdError as error:
            # It is tried again: torchrun itself gives up after its own time-out.
            if self._problem != error.message:
                self._problem = error.message
                _LOG.warning("cannot start a controller, trying again: %s", error)
