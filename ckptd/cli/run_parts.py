"""What runs beside a node's workers: the job's controller, the daemon, the watcher."""

from __future__ import annotations

import math
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ckptd.cli.watch_parts import Part, Reader, login_text
from ckptd.elastic.launchers.node import NO_ORDER
from ckptd.elastic.leader import Outlook, stand_in_pause_s
from ckptd.elastic.places import Places
from ckptd.errors import CkptdError, ConflictError, CorruptError, RefusedError, UsageError
from ckptd.net.address import is_here, is_loopback, parse_address
from ckptd.net.signing import SECRET_VARIABLE

__all__ = ["Steward", "Watch", "need_secret", "need_torch"]

_CKPTD = (sys.executable, "-c", "from ckptd.cli.main import main; main()")
_DIAL_S = 0.5
_AGAIN_S = 0.5
_MOST_AGAIN_S = 10.0
_TELLS_S = 5.0
"""After which a daemon that outlives a controller has told the next one where it is."""
_QUIET_S = 1.0
"""Two beats: a controller that was heard of within it is there."""
_LIVED_S = 60.0
_MOST_STARTS = 4
"""Of a daemon or a watcher, in a row, each of which has lived for less than `_LIVED_S`."""
_END_S = 10.0
_USAGE = 2
"""Exit code of a daemon whose command line would be refused again."""
_REFUSED = 5
"""Exit code of a daemon that finds another one of its job on this machine."""


def need_secret(endpoint: str, environ: Mapping[str, str]) -> None:
    """Refuse a job of several machines that share no secret.

    Raises
    ------
    RefusedError
        kind ``no-secret``: others reach the endpoint, and ``CKPTD_SECRET`` is not set.
    """
    if not is_loopback(parse_address(endpoint)[0]) and not environ.get(SECRET_VARIABLE):
        raise RefusedError(
            "others could reach the controller and the daemon, and no secret is set",
            kind="no-secret",
            where=endpoint,
            hint=f"set {SECRET_VARIABLE} to the same long random text on all nodes",
        )


def need_torch() -> None:
    """Refuse to launch where PyTorch is not installed: it serves the store that ranks meet at.

    Raises
    ------
    UsageError
        kind ``missing-package``.
    """
    try:
        found = find_spec("torch") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise UsageError(
            "ckptd run needs PyTorch",
            kind="missing-package",
            where=sys.executable,
            wanted="torch, in the Python that runs ckptd",
            hint="pip install 'ckptd[train]'",
        )


def _answers(address: str) -> bool:
    if not address:
        return False
    try:
        with socket.create_connection(parse_address(address), timeout=_DIAL_S):
            return True
    except (OSError, UnicodeError):
        return False


class Steward:
    """Sees to it that the job has a controller, if it can have one here.

    Parameters
    ----------
    places
        Of the log and the seat; None where only others can reach them.
    endpoint
        Where the job's nodes meet, ``HOST:PORT``; empty on one machine: any free port.
    address
        Of this machine, for a controller that does not listen at `endpoint`.
    arguments
        Of ``ckptd controller``.
    env, folder
        Of its process.
    say
        Tells people.
    node
        Name of this node where others may start a controller; empty on one machine.

    Attributes
    ----------
    host
        Where the controller of this launcher listens, and what runs beside it.
    since
        Second of ``time.monotonic`` at which this launcher last started a controller; 0.0 before.
    """

    def __init__(
        self,
        places: Places | None,
        endpoint: str,
        address: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
        node: str = "",
    ) -> None:
        several = places is not None and node
        self._outlook = Outlook(places.leader, node) if several and places is not None else None
        self._yielded = False
        """Whether its controller has ended because another one is there, or should be."""
        self._cut = False
        """Whether it was said that this node alone is cut off."""
        self._places, self._endpoint, self._address = places, endpoint, address
        self._arguments, self._env, self._folder, self._say = arguments, env, folder, say
        self._part: Part | None = None
        self._announced = ""
        """Where the controller of this launcher listens."""
        self._lives = 0
        self.host = "127.0.0.1"
        self.since = 0.0
        self._not_before = 0.0
        self._again_s = _AGAIN_S
        self._pause_of, self._pause_s = -1, 0.0
        """How long is waited in silence, and by a node of which rank."""
        self._silent_s = 0.0
        self._problem = ""
        """Why none could be started, as it was said last."""
        self._met = self._follows = False
        """Whether one was ever heard of; and whether this launcher's has ended for another one."""

    @property
    def started(self) -> bool:
        """Whether this launcher has started a controller."""
        return self._lives > 0

    @property
    def seated(self) -> bool:
        """Whether the controller of this launcher has the seat, as far as is known."""
        return self._part is not None and bool(self._announced)

    def addresses(self) -> str:
        """Return where the controller is now; for `NodeLink`."""
        if self._announced and self._part is not None:
            return self._announced
        return self._seated() or self._endpoint

    def still(self, life: str) -> bool:
        """Whether the controller of that life was seated last; for `NodeLink`."""
        try:
            return self._places is not None and self._places.leader.still(life)
        except CkptdError:
            return False

    def _seated(self) -> str:
        if self._places is None:
            return ""
        try:
            newest = self._places.leader.newest()
        except CkptdError:
            return ""
        return newest.address if newest is not None else ""

    def turn(self, silent_s: float, order: int) -> bool:
        """Start a controller where it is time to; return whether one has just begun to listen.

        Parameters
        ----------
        silent_s
            For how long none was heard of.
        order
            Rank of this node in the last generation: nodes do not try all at once.

        Raises
        ------
        CkptdError
            None can be started, and no generation of the job has begun here.
        """
        self._met |= silent_s < self._silent_s
        self._silent_s = silent_s
        if self._part is not None:
            return self._look(self._part, order < NO_ORDER)
        if self._places is None or time.monotonic() < self._not_before:
            return False
        if self._pause_of != order:
            self._pause_of, self._pause_s = order, stand_in_pause_s(order)
        if self._met and silent_s <= _QUIET_S:
            self._yielded = self._cut = False
        if self._met and silent_s > _QUIET_S:
            self._say_silent()
        if self._met and silent_s <= self._quiet_s():
            return False  # all is well: the place of the seat, perhaps far away, is not asked
        first = not self.started and not self._met and not self._seated()
        own = self.started and not self._yielded
        mine = own or (first and (not self._endpoint or self._endpoint_here()))
        if mine or (silent_s > self._pause_s and self._may_stand_in()):
            if _answers(self.addresses()):
                # It may refuse this launcher for good: the place of the seat has other guests.
                self._not_before = time.monotonic() + _AGAIN_S
            else:
                self._try_start(order < NO_ORDER)
        return False

    def _say_silent(self) -> None:
        """Leave word beside the seat that this node hears no controller, and see who else does."""
        if self._outlook is not None:
            # Where the place cannot be reached, no seat can be taken either.
            with suppress(CkptdError):
                self._outlook.say_silent()

    def _may_stand_in(self) -> bool:
        """Whether the controller is gone, or cut off from more nodes than it hears."""
        if self._outlook is None:
            return True
        if not self._met:
            self._say_silent()
        may = self._outlook.looked and self._outlook.may_stand_in(met=self._met)
        if self._outlook.looked and not may and not self._cut:
            self._cut = True
            self._say(
                "the controller lives and is heard by others: this node is cut off from it, and "
                "takes its place only if more nodes say so than it hears"
            )
        return may

    def _quiet_s(self) -> float:
        if not self.started or self._yielded:
            return self._pause_s
        return _QUIET_S if self._follows else 0.0

    def _endpoint_here(self) -> bool:
        return is_here(parse_address(self._endpoint)[0])

    def _try_start(self, begun: bool) -> None:
        try:
            self._start()
        except CkptdError as error:
            # Workers that run go on for as long as their lease: a store may be back by then.
            if not begun:
                raise
            self._not_before = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _MOST_AGAIN_S)
            if self._problem != error.message:
                self._problem = error.message
                self._say(f"no controller can be started, which is tried again: {error}")

    def _start(self) -> None:
        host, port = self._address, 0
        if self._endpoint:
            host, port = parse_address(self._endpoint)
            if not is_here(host):
                host, port = self._address, 0
        newest = self._places.leader.newest() if self._places is not None else None
        after = newest.number if newest is not None else -1
        name = f"controller-{self._lives}" if self._lives else "controller"
        command = [*_CKPTD, "controller", "--json", *self._arguments]
        command += ["--bind", host, "--host", host, "--port", str(port), "--after", str(after)]
        self._lives += 1
        self._follows = False
        self.host, self.since = host, time.monotonic()
        self._announced = ""
        self._part = Part(name, command, self._env, self._folder)

    def _look(self, part: Part, begun: bool) -> bool:
        before = self._announced
        if not before:
            with suppress(msgspec.MsgspecError, KeyError, TypeError):
                self._announced = str(msgspec.json.decode(part.out.read_bytes())["address"])
                self._again_s, self._problem = _AGAIN_S, ""
        code = part.process.poll()
        if code is None:
            return self._announced != before
        self._part, self._announced, self._pause_of = None, "", -1
        self._not_before = time.monotonic() + (self._again_s if code >= 0 else 0.0)
        self._again_s = min(2 * self._again_s, _MOST_AGAIN_S)
        # Each launcher of a machine may have started a controller: all of them but one exit.
        self._follows = code > 0 and _answers(self.addresses())
        if not self._follows:
            self._judge(part, code, begun)
        return False

    def _judge(self, part: Part, code: int, begun: bool) -> None:
        """Say what has become of the controller; give up what another one could not do either."""
        error = part.error()
        self._yielded = self._yielded or isinstance(error, ConflictError)
        if error is None or isinstance(error, ConflictError):
            if code:
                self._say(f"{part.failed(f'has ended with {code}')}\nanother one is started")
        elif not isinstance(error, UsageError | CorruptError | RefusedError):
            self._say(f"the controller has ended, and another one is started: {error}")
        elif not begun:
            raise error
        else:
            self._not_before = math.inf
            self._say(f"no controller can be started; training goes on without: {error}")

    def end(self, wait_s: float) -> None:
        """End the controller of this launcher, after `wait_s` in which it may end by itself."""
        part, self._part = self._part, None
        if part is not None:
            end = time.monotonic() + wait_s
            while part.process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            part.end()


class Watch:
    """The daemon of the job, where this launcher starts it, and the watcher of this node.

    The launcher that starts the controller starts the daemon; the daemon tells the controller where
    it is, and the controller tells all launchers. Their watchers go where it says.

    Parameters
    ----------
    job
        Its name.
    daemon
        URL of a daemon that is there; None: one that a launcher of this job starts.
    daemon_arguments, watcher_arguments
        Besides the job and the daemon; None for the second: no ranks run here.
    env, folder, say
        As of `Steward`.
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
    ) -> None:
        self._job, self._url, self._say = job, daemon, say
        self._daemon_arguments, self._watcher_arguments = daemon_arguments, watcher_arguments
        self._env, self._folder = env, folder
        self._daemon: Part | None = None
        self._agent: Part | None = None
        self._agent_by = 0.0
        """When a watcher is killed that was told to end, for another one; 0.0: none was."""
        self._starts: dict[str, tuple[float, int]] = {}
        """When a part was started last, and how often in a row, by its name."""
        self._given_up = False
        self._watching = ""
        """URL of the daemon that the watcher tells."""
        self._told, self._told_at = "", 0.0
        self._own = ""
        """URL of the daemon of this launcher."""
        self._started = 0
        self._another_at = -1.0
        """Start of the controller for which another launcher of this machine has a daemon."""
        self._lost = False
        self._reader: Reader | None = None
        self._since = time.time()

    def daemon_at(self, url: str) -> None:
        """Take in what a controller says of where the daemon is."""
        self._told, self._told_at = url, time.monotonic()

    def turn(self, steward: Steward) -> None:
        """Start what can be started now, the daemon beside the controller of `steward`."""
        if self._lost:
            return
        try:
            self._turn(steward)
        except (CkptdError, OSError) as error:
            self._lost = True
            self._say(f"{error}\ntraining goes on unwatched")

    def _turn(self, steward: Steward) -> None:
        if self._is_mine(steward.since, steward.seated):
            self._start_daemon(steward.host)
        self._look_at_daemon(steward.since)
        self._look_at_agent()
        login = self._login()
        if self._daemon is not None and login and self._reader is None:
            self._read_out(login)
        url = self._url or self._told or login
        if url and self._watcher_arguments is not None:
            self._watch(url)

    def _is_mine(self, since: float, seated: bool) -> bool:
        """Whether the daemon is this launcher's to start."""
        if self._url is not None or self._daemon is not None or since in (0.0, self._another_at):
            return False
        if self._given_up:
            return False
        if not self._told:
            return True
        # One that outlives a controller tells the next one where it is; and of launchers that stand
        # in, one has the seat.
        return seated and self._told_at < since < time.monotonic() - _TELLS_S

    def _start_daemon(self, host: str) -> None:
        name = f"daemon-{self._started}" if self._started else "daemon"
        self._started += 1
        self._note_start("daemon")
        command = [*_CKPTD, "serve", "--json", "--job", self._job, "--bind", host]
        self._daemon = Part(name, [*command, *self._daemon_arguments], self._env, self._folder)
        self._told = ""

    def _look_at_daemon(self, since: float) -> None:
        daemon = self._daemon
        if daemon is None or (code := daemon.process.poll()) is None:
            return
        if code != _REFUSED and self._told in ("", self._own):
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

    def _again(self, daemon: Part, code: int) -> None:
        """Have another daemon started in the place of one that has ended, or say what to do."""
        self._told = self._own = ""
        self._given_up = code == _USAGE or self._too_often("daemon")
        what = "another one is started"
        if self._given_up:
            command = ["ckptd", "serve", "--job", self._job, *self._daemon_arguments]
            what = f"training goes on unwatched, until you start one: {shlex.join(command)}"
        self._say(f"{daemon.failed(f'has ended with {code}')}\n{what}")

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
            self._say(f"{error}\nanother one is started")
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
                return str(msgspec.json.decode(self._daemon.out.read_bytes())["login"])
            return ""
        from ckptd.daemon.place import find_daemon

        with suppress(CkptdError):
            return find_daemon(self._job).login
        return ""

    def _watch(self, url: str) -> None:
        """Have the watcher tell the daemon at `url`."""
        from ckptd.daemon.client import DaemonClient

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
        command = [sys.executable, "-m", "ckptd.agent.watched", "--job", self._job]
        command += ["--daemon", url, *(self._watcher_arguments or ())]
        env = {**self._env, "PYTHONUNBUFFERED": "1"}
        self._agent = Part("agent", command, env, self._folder)
        self._watching = url

    def _read_out(self, login: str) -> None:
        from ckptd.daemon.client import DaemonClient

        self._say(f"job {self._job} is watched: {login_text(login, self._job)}")
        client = DaemonClient(login)
        self._own = client.url
        self._reader = Reader(client, self._since, self._tell)

    def _tell(self, line: str, incident: dict[str, object]) -> None:
        self._say(f"incident {incident['id']}: {line}")

    def end(self, last_word_s: float) -> None:
        """End them, after what is still to be told of incidents."""
        if self._reader is not None and not self._lost:
            self._reader.finish(last_word_s)
        for part in (self._agent, self._daemon):
            if part is not None:
                part.end()
        self._agent = self._daemon = None
