"""Daemon and watcher beside a job: starts, restarts, login line, incidents on the console.

In it: pauses and how often a daemon that ends is started again.
"""

from __future__ import annotations

import math
import os
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ckptd.cli.output import shorten
from ckptd.decoding import ANYTHING
from ckptd.elastic.launchers.sidecars import CKPTD, Sidecar
from ckptd.errors import CkptdError, first_few
from ckptd.monitor.daemon.client import DaemonClient

_POLL_S = 0.05
_END_S = 10.0
_RETRY_S = 0.5
_FIRST_S = 1.0  # after which an agent has told of a rank
_MOST_NAMED = 4
_TELLS_S = 5.0
"""After which a daemon that outlives a controller has told the next one where it is."""
_UNWATCHED_S = 30.0
"""For so long a daemon may take to be announced by a controller that answers."""
_LIVED_S = 60.0
_MOST_STARTS = 4
"""Of a daemon or a watcher, in a row, each of which has lived for less than `_LIVED_S`."""
_USAGE = 2
"""Exit code of a daemon whose command line would be refused again."""
_REFUSED = 5
"""Exit code of a daemon that finds another one of its job on this machine."""


def login_text(login: str, job: str) -> str:
    """Return the URL of the page of `job`, for standard error.

    The token in it gives control of the job. A batch system writes standard error to a file that
    other users often may read: there the text names the file of the token, and not the token.
    """
    from ckptd.monitor.daemon.place import DaemonPlace

    url = DaemonClient(login).url
    try:
        info = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # no descriptor is behind it, or it is closed
        return login
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o044 or login == url:
        return login
    return f"{url} (others may read this file: the token is in {DaemonPlace(job).address})"


# --- incidents ------------------------------------------------------------------------------------


def line_of(incident: Mapping[str, Any]) -> str:
    """Return an incident as one line: what, who, after how long."""
    verdict = incident["verdict"]
    named = [
        f"{s['target']} {s['name']}" + (f" ({s['detail']})" if s["detail"] else "")
        for s in verdict["suspects"]
    ]
    text = f"{incident['kind']}: {first_few(named, _MOST_NAMED) or 'no suspect'}"
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
        Unix seconds: older incidents were printed before.
    say
        Takes a line and the incident.
    """

    def __init__(
        self, client: DaemonClient, since: float, say: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._client = client
        self._since = since
        self._say = say
        self._shown: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.last: dict[str, dict[str, Any]] = {}
        """Newest state of each incident that was printed, by its id."""
        threading.Thread(target=self._follow, name="ckptd-incidents", daemon=True).start()

    def finish(self, wait_s: float) -> None:
        """Ask once more, for up to `wait_s` seconds until there is one, and read no more.

        Without any rank that has reported there is nothing to wait for.
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
            known = self._shown.get(incident["id"]) == key or incident["updated_at"] < self._since
            if known or self._ended.is_set():
                return
            self._shown[incident["id"]] = key
            self.last[incident["id"]] = incident
            self._say(line_of(incident), incident)


class _Seat(Protocol):
    """A job's controller, as the watch needs it; `ControllerSupervisor` implements it."""

    @property
    def since(self) -> float:
        """Second of ``time.monotonic`` at which it was started here; 0.0: it was not."""

    @property
    def seated(self) -> bool:
        """Whether it has the seat, as far as is known."""

    @property
    def answered(self) -> bool:
        """Whether a controller has ever answered."""

    @property
    def host(self) -> str:
        """Address at which it listens, and the daemon as well."""


class DaemonSupervisor:
    """The daemon of the job, where this launcher starts it, and the watcher of this node.

    The launcher that starts the controller starts the daemon; the daemon tells the controller where
    it is, and the controller tells all launchers. Their watchers go where it says. A daemon that
    has served and a watcher are started again when they end by themselves.

    Parameters
    ----------
    job
        Its name.
    daemon
        URL of a daemon that is there; None: one that a launcher of this job starts.
    daemon_arguments, watcher_arguments
        Besides the job and the daemon; None for the second: no ranks run here.
    env, folder, say
        As of `ControllerSupervisor`.
    tell
        Takes a line and the incident, of whatever daemon the job has; by default the lines of a
        daemon that this launcher has started are said.
    token
        Lets this process read at `daemon`, where its URL has none.

    Attributes
    ----------
    url
        Of the daemon whose incidents are read out, as it was last; None before.
    """

    def __init__(
        self,
        job: str,
        daemon: str | None,
        daemon_arguments: Sequence[str],
        watcher_arguments: Sequence[str] | None,
        env: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
        *,
        tell: Callable[[str, dict[str, Any]], None] | None = None,
        token: str = "",
    ) -> None:
        self._job, self._url, self._say = job, daemon, say
        self._tell = tell or self._say_incident
        self._reads = tell is not None
        """Whether the incidents of a daemon that is not this launcher's are read out."""
        self._token = token
        self.url: str | None = None
        self._daemon_arguments, self._watcher_arguments = daemon_arguments, watcher_arguments
        self._env, self._folder = env, folder
        self._daemon: Sidecar | None = None
        self._agent: Sidecar | None = None
        self._agent_by = 0.0
        """When a watcher that must end, for another one, is killed; 0.0: none must."""
        self._starts: dict[str, tuple[float, int]] = {}
        """When a part was started last, and how often in a row, by its name."""
        self._given_up = False
        self._watching = ""
        """URL of the daemon that the watcher tells."""
        self._announced, self._announced_at = "", 0.0
        self._own = ""
        """URL of the daemon of this launcher."""
        self._started = 0
        self._another_at = -1.0
        """Start of the controller for which another launcher of this machine has a daemon."""
        self._unwatched_by = 0.0
        """When it is said that no daemon watches; infinite: it was."""
        self._lost = self._served = False
        self._reader: Reader | None = None
        self._since = time.time()

    @property
    def settled(self) -> bool:
        """Whether the job is watched, or will not be."""
        return self._lost or self._given_up or self._reader is not None

    def daemon_at(self, url: str) -> None:
        """Take in what a controller says of where the daemon is."""
        self._announced, self._announced_at = url, time.monotonic()

    def turn(self, controller: _Seat) -> None:
        """Start what can be started now, the daemon beside the controller."""
        if self._lost:
            return
        try:
            self._turn(controller)
        except (CkptdError, OSError) as error:
            self._lost = True
            self._say(f"{error}\ntraining continues unwatched")

    def _turn(self, controller: _Seat) -> None:
        if self._is_mine(controller.since, controller.seated):
            self._start_daemon(controller.host)
        self._look_at_daemon(controller.since)
        self._look_at_agent()
        login = self._login()
        told = self._url or login if self._reads else login if self._daemon is not None else ""
        if told and self._reader is None:
            self._read_out(told)
        url = self._url or self._announced or login
        self._say_unwatched(bool(url) or controller.since > 0.0 or not controller.answered)
        if url and self._watcher_arguments is not None:
            self._watch(url)

    def _say_unwatched(self, watched: bool) -> None:
        """Say it once if the job has a controller for long, and no launcher starts a daemon."""
        now = time.monotonic()
        if watched:
            self._unwatched_by = max(self._unwatched_by, now + _UNWATCHED_S)
        elif now > self._unwatched_by:
            self._unwatched_by = math.inf
            self._say(
                "no daemon watches this job: its controller was started elsewhere, and none is "
                "announced there. Where the controller runs, start one:\n"
                f"  next:   ckptd serve --job {self._job} --controller HOST:PORT --bind ADDRESS"
            )

    def _is_mine(self, since: float, seated: bool) -> bool:
        """Whether the daemon is this launcher's to start."""
        if self._url is not None or self._daemon is not None or since in (0.0, self._another_at):
            return False
        if self._given_up:
            return False
        if not self._announced:
            return True
        # One that outlives a controller tells the next one where it is; and of launchers that stand
        # in, one has the seat.
        return seated and self._announced_at < since < time.monotonic() - _TELLS_S

    def _start_daemon(self, host: str) -> None:
        name = f"daemon-{self._started}" if self._started else "daemon"
        self._started += 1
        self._note_start("daemon")
        command = [*CKPTD, "serve", "--json", "--job", self._job, "--bind", host]
        self._daemon = Sidecar(name, [*command, *self._daemon_arguments], self._env, self._folder)
        self._announced = ""

    def _look_at_daemon(self, since: float) -> None:
        daemon = self._daemon
        if daemon is None or (code := daemon.process.poll()) is None:
            return
        if code != _REFUSED and self._announced in ("", self._own):
            self._again(daemon, code)
        # Another launcher of this machine, for a node of this job, was first: it is found. Or the
        # job has a newer daemon, and this one has ended because no watcher told it anything.
        daemon.end()
        self._daemon = None
        if self._reader is not None:
            self._reader.finish(0.0)
            self._reader = None
        if code == _REFUSED:
            self._another_at = since

    def _again(self, daemon: Sidecar, code: int) -> None:
        """Have another daemon started in the place of one that has ended, or say what to do."""
        self._announced = self._own = ""
        # What ends one that has never served ends the next one as well.
        self._given_up = code == _USAGE or not self._served or self._too_often("daemon")
        what = "another one is started"
        if self._given_up:
            command = ["ckptd", "serve", "--job", self._job, *self._daemon_arguments]
            what = f"training continues unwatched; to start a daemon: {shlex.join(command)}"
        self._say(f"{daemon.failed(f'has ended with {code}')}\n  next:   {what}")

    def _look_at_agent(self) -> None:
        agent = self._agent
        if agent is None:
            return
        if (code := agent.process.poll()) is None:
            if self._agent_by and time.monotonic() > self._agent_by:
                agent.process.kill()
            return
        if not self._agent_by:
            error = agent.failed(f"has ended with {code}")
            if self._too_often("agent"):
                raise error
            self._say(f"{error}\n  next:   another one is started")
        agent.end()
        self._agent, self._agent_by, self._watching = None, 0.0, ""

    def _note_start(self, name: str) -> None:
        at, number = self._starts.get(name, (0.0, 0))
        now = time.monotonic()
        self._starts[name] = now, (number if now - at < _LIVED_S else 0) + 1

    def _too_often(self, name: str) -> bool:
        at, number = self._starts.get(name, (0.0, 0))
        return number >= _MOST_STARTS and time.monotonic() - at < _LIVED_S

    def _login(self) -> str:
        """Return the URL of a daemon on this machine, with its token; empty while there is none."""
        if self._daemon is not None:
            with suppress(msgspec.MsgspecError, KeyError, TypeError):
                return str(ANYTHING.decode(self._daemon.out.read_bytes())["login"])
            return ""
        from ckptd.monitor.daemon.place import find_daemon

        with suppress(CkptdError):
            return find_daemon(self._job).login
        return ""

    def _watch(self, url: str) -> None:
        """Have the watcher tell the daemon at `url`."""
        url = DaemonClient(url).url
        if url == self._watching:
            return
        if self._agent is not None:
            # It is not waited for: a node that was lost is often why there is another daemon, and
            # the controller's orders are to be followed meanwhile.
            if not self._agent_by:
                self._say(f"the job's daemon is now {url}")
                self._agent.process.terminate()
                self._agent_by = time.monotonic() + _END_S
            return
        self._note_start("agent")
        command = [sys.executable, "-m", "ckptd.monitor.agent.watched", "--job", self._job]
        command += ["--daemon", url, *(self._watcher_arguments or ())]
        env = {**self._env, "PYTHONUNBUFFERED": "1"}
        self._agent = Sidecar("agent", command, env, self._folder)
        self._watching = url

    def _read_out(self, login: str) -> None:
        self._say(f"job {self._job} is watched: {login_text(login, self._job)}")
        client = DaemonClient(login, self._token)
        self.url = self._own = client.url
        self._served = True
        self._reader = Reader(client, self._since, self._tell)

    def _say_incident(self, line: str, incident: dict[str, Any]) -> None:
        self._say(f"incident {incident['id']}: {line}")

    def finish(self, last_word_s: float) -> None:
        """Tell what is still to be told of incidents, and read no more."""
        if self._reader is not None and not self._lost:
            self._reader.finish(last_word_s)

    def end(self, last_word_s: float) -> None:
        """End them, after what is still to be told of incidents."""
        self.finish(last_word_s)
        for part in (self._agent, self._daemon):
            if part is not None:
                part.end()
        self._agent = self._daemon = None
