"""What runs beside a watched command: the daemon, the watcher, and who reads the incidents out."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ckptd.cli.output import shorten
from ckptd.daemon.client import DaemonClient
from ckptd.errors import CkptdError, WorkerError

__all__ = [
    "SIGNALS",
    "Part",
    "Reader",
    "line_of",
    "login_text",
    "old_folders",
    "shell_code",
    "start_daemon",
    "start_watcher",
    "unblocked",
]

_START_S = 60.0
_POLL_S = 0.05
_END_S = 10.0
_RETRY_S = 0.5
_FIRST_S = 1.0  # after which an agent has told of a rank
_MOST_LOG = 2000
_MOST_NAMED = 4
_CKPTD = (sys.executable, "-c", "from ckptd.cli.main import main; main()")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


_libc = ctypes.CDLL(None)  # loaded before any fork
_PR_SET_PDEATHSIG = 1


def unblocked() -> None:
    """Let a new process take the signals that this one waits for by itself."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})


def login_text(login: str, job: str) -> str:
    """Return where the page of `job` is, for standard error.

    Whoever has the token may act on the job. A batch system writes standard error to a file that
    others often may read: there it is said where the token is, and not the token.
    """
    from ckptd.daemon.place import DaemonPlace

    url = DaemonClient(login).url
    try:
        info = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # no descriptor is behind it, or it is closed
        return login
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o044 or login == url:
        return login
    return f"{url} (others may read this file: the token is in {DaemonPlace(job).address})"


def _beside() -> None:
    """Let a new process end when this one does, however that may be."""
    unblocked()
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Part:
    """A process beside the command, in a session of its own, with its output in a file.

    Parameters
    ----------
    name
        For people, and for its files.
    command, env
        What is run. Its standard input is a pipe that ends with this process.
    folder
        Of its files.

    Raises
    ------
    WorkerError
        It cannot be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self.out = folder / f"{name}.out"
        self._log = folder / f"{name}.log"
        try:
            with open(self.out, "wb") as out, open(self._log, "wb") as log:
                self.process = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_beside,
                )
        except OSError as error:
            raise WorkerError(f"the {name} cannot be started", found=str(error)) from error

    def failed(self, found: str) -> WorkerError:
        """Return the error that says that it is of no use, with the end of its log."""
        log = self._log.read_bytes()[-_MOST_LOG:].decode(errors="replace").strip()
        return WorkerError(f"the {self.name} {found}", found=log or None)

    def error(self) -> CkptdError | None:
        """Return the error that it has printed last, as a verb does with ``--json``, if any."""
        lines = self._log.read_bytes()[-_MOST_LOG:].splitlines()
        with suppress(msgspec.MsgspecError, KeyError, TypeError, IndexError):
            return CkptdError.from_dict(msgspec.json.decode(lines[-1])["error"])
        return None

    def end(self) -> None:
        """End it, and wait until it has; harmless if it has ended."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_daemon(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, parts: list[Part]
) -> tuple[str, str]:
    """Start ``ckptd serve``, add it to `parts`, and return its URL and the one for a browser.

    Raises
    ------
    WorkerError
        It cannot be started, or does not listen in time.
    """
    part = Part("daemon", [*_CKPTD, "serve", "--json", *arguments], env, folder)
    parts.append(part)
    end = time.monotonic() + _START_S
    while True:
        with suppress(msgspec.MsgspecError, KeyError, TypeError):
            said = msgspec.json.decode(part.out.read_bytes())
            return str(said["url"]), str(said["login"])
        if part.process.poll() is not None:
            raise part.failed("ended at once")
        if time.monotonic() > end:
            raise part.failed(f"does not listen after {_START_S:.0f} s")
        time.sleep(_POLL_S)


def start_watcher(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, parts: list[Part]
) -> None:
    """Start the watcher of this node and add it to `parts`; errors as of `start_daemon`."""
    command = [sys.executable, "-m", "ckptd.agent.watched", *arguments]
    parts.append(Part("agent", command, {**env, "PYTHONUNBUFFERED": "1"}, folder))


# --- incidents ------------------------------------------------------------------------------------


def line_of(incident: Mapping[str, Any]) -> str:
    """Return an incident as one line: what, who, after how long."""
    verdict = incident["verdict"]
    named = [
        f"{s['target']} {s['name']}" + (f" ({s['detail']})" if s["detail"] else "")
        for s in verdict["suspects"][:_MOST_NAMED]
    ]
    left = len(verdict["suspects"]) - len(named)
    who = ", ".join(named) + (f" and {left} more" if left > 0 else "")
    text = f"{incident['kind']}: {who or 'nobody can be named'}"
    if incident["state"] == "closed":
        return shorten(f"over: {text}", 400)
    why = verdict["evidence"][0] if verdict["evidence"] else ""
    return shorten(f"{text}, after {incident['latency_s']:.1f} s. {why}", 400)


class Reader:
    """Reads out the incidents of a daemon as they come, in a thread that ends with the process.

    Parameters
    ----------
    client
        Of the daemon.
    since
        Unix seconds: older incidents were told before.
    say
        Takes a line and the incident.
    """

    def __init__(
        self, client: DaemonClient, since: float, say: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._client = client
        self._since = since
        self._say = say
        self._said: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.last: dict[str, dict[str, Any]] = {}
        """Newest state of each incident that was told, by its id."""
        threading.Thread(target=self._follow, name="ckptd-incidents", daemon=True).start()

    def finish(self, wait_s: float) -> None:
        """Ask once more, for up to `wait_s` seconds until there is one, and read no more.

        Where no rank was ever heard of there is nothing to wait for.
        """
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            with suppress(CkptdError, KeyError):
                if waited > _FIRST_S and not self._client.get("/job")["ranks_reporting"]:
                    break
                for incident in reversed(self._client.get("/incidents", limit=50)["incidents"]):
                    self._take(incident)
            if self.last or waited > wait_s:
                break
            time.sleep(_POLL_S)
        self._ended.set()

    def _follow(self) -> None:
        last = ""
        while not self._ended.is_set():
            with suppress(CkptdError, msgspec.MsgspecError):  # it may come back
                for ident, name, body in self._client.events(last):
                    last = ident
                    if name == "incident":
                        self._take(body)
            self._ended.wait(_RETRY_S)

    def _take(self, incident: dict[str, Any]) -> None:
        key = (incident["state"], [s["name"] for s in incident["verdict"]["suspects"]])
        with self._lock:
            told = self._said.get(incident["id"]) == key or incident["updated_at"] < self._since
            if told or self._ended.is_set():
                return
            self._said[incident["id"]] = key
            self.last[incident["id"]] = incident
            self._say(line_of(incident), incident)


def shell_code(code: int) -> int:
    """Return the exit code that a shell shows for a process's."""
    return 128 - code if code < 0 else code


def old_folders(base: Path, prefix: str) -> list[Path]:
    """Return folders that watches left that were killed; names are ``PREFIXPID-...``."""
    found = []
    for path in base.glob(f"{prefix}*-*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            found.append(path)
    return found
