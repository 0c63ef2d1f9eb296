"""Processes beside a launcher (sidecars): starts, watches, restarts, ends the job's controller.

In it: pauses before a controller is started again, when it counts as hung, how long it has to end,
how much of its log is shown.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from ckptd.base.net.address import Address, any_address, is_here, is_loopback, parse_address
from ckptd.base.runtime.host import loopback
from ckptd.base.runtime.parent import ends_with_parent
from ckptd.decoding import ANYTHING
from ckptd.elastic.dial import await_greeting
from ckptd.elastic.launchers.nodestate import NO_ORDER
from ckptd.elastic.leader import LeaderView, stand_in_pause_s
from ckptd.elastic.places import JobPlaces
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    ProcessError,
    RefusedError,
    UsageError,
)

CKPTD = (sys.executable, "-c", "from ckptd.cli.main import main; main()")
"""The command line, in this Python."""
Greet: TypeAlias = Callable[[str, float], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a launcher."""
_GREET_S = 1.0
_LATE_S = 0.5
"""For so long the end of a probe may be late, where the machine is busy."""
_AGAIN_S = 0.5
_MOST_AGAIN_S = 10.0
_QUIET_S = 1.0
"""Two beats: a controller that answered within it counts as alive, in seconds."""
_HUNG_S = 5.0
"""Silence of a controller before its process is probed, and the probe's limit, in seconds."""
_END_S = 10.0
_MOST_LOG = 2000


def unblocked() -> None:
    """Make a new process take the signals that this one waits for by itself."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})


def _beside() -> None:
    """Make a new process end when this one does, however that may be."""
    unblocked()
    ends_with_parent(signal.SIGTERM)


class Sidecar:
    """A process beside a launcher, in a session of its own, with its output in files.

    Parameters
    ----------
    name
        For people, and for its files.
    command, env
        What is run. Its standard input is a pipe that ends with this process.
    folder
        Of its files.
    start
        Starts it as `subprocess.Popen` does.

    Raises
    ------
    ProcessError
        It cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.name = name
        self.out = folder / f"{name}.out"
        self._log = folder / f"{name}.log"
        try:
            with open(self.out, "wb") as out, open(self._log, "wb") as log:
                self.process = start(
                    command,
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_beside,
                )
        except OSError as error:
            raise ProcessError(f"the {name} cannot be started", found=str(error)) from error

    def failed(self, found: str) -> ProcessError:
        """Return the error that says that it is of no use, with the end of its log."""
        log = self._log.read_bytes()[-_MOST_LOG:].decode(errors="replace").strip()
        return ProcessError(f"the {self.name} {found}", found=log or None)

    def error(self) -> CkptdError | None:
        """Return the error that it has printed last, as a verb does with ``--json``, if any."""
        lines = self._log.read_bytes()[-_MOST_LOG:].splitlines()
        with suppress(msgspec.MsgspecError, KeyError, TypeError, IndexError):
            return CkptdError.from_dict(ANYTHING.decode(lines[-1])["error"])
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
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                self.process.wait(_END_S)

    def keep_log(self, path: Path) -> None:
        """Append its log to the file `path`, which outlives its folder."""
        with suppress(OSError), open(self._log, "rb") as log, open(path, "ab") as kept:
            shutil.copyfileobj(log, kept)


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


class _Probe:
    """Asks the process that listens at `address` whether it runs, in a thread of its own.

    It has `wait_s` seconds to take the connection, and as many to answer `greet`.
    """

    def __init__(self, address: str, wait_s: float, greet: Greet = await_greeting) -> None:
        self._address, self._wait_s, self._greet = address, wait_s, greet
        self._error: CkptdError | None = None
        self._thread = threading.Thread(target=self._ask, name="ckptd-probe", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._greet(self._address, self._wait_s)
        except CkptdError as error:
            self._error = error

    @property
    def over(self) -> bool:
        """Whether it is known how it ended."""
        return not self._thread.is_alive()

    def may_answer(self) -> bool:
        """Wait for the end, and return whether the process answers, or is not known not to.

        Looking up a name can take longer than the wait: a controller that may live has its place.
        """
        self._thread.join(2 * self._wait_s + _LATE_S)
        return not self.over or self._error is None

    @property
    def problem(self) -> str:
        """Why the process could not be asked; empty if it answers, or proved that it does not."""
        return "" if self._error is None or self.hung else str(self._error)

    @property
    def hung(self) -> bool:
        """Whether it listens and does not answer."""
        return self._error is not None and self._error.kind == "link-late"


class ControllerSupervisor:
    """Keeps a controller for the job, if it can have one here.

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
    here
        Whether `endpoint` is this machine; by default, whether a socket can be bound to it.
    start
        Starts its process as `subprocess.Popen` does.
    anywhere
        Whether it listens at all addresses of this machine, unless `endpoint` is a loopback
        address: what a name represents here need not be what it represents elsewhere. `address`
        may then be empty: nodes are given this machine's name.
    kept_log
        File to which the log of each controller is appended when it has ended.
    greet
        Raises unless a controller at an address answers in time, see `NodeLink.greet` and
        `OperatorLink.greet`.

    Attributes
    ----------
    host
        Where the controller of this launcher listens, and what runs beside it.
    since
        Second of ``time.monotonic`` at which this launcher last started a controller; 0.0 before.
    """

    def __init__(
        self,
        places: JobPlaces | None,
        endpoint: str,
        address: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
        node: str = "",
        *,
        here: bool | None = None,
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        anywhere: bool = False,
        kept_log: Path | None = None,
        greet: Greet,
    ) -> None:
        self._greet = greet
        several = places is not None and node
        self._outlook = LeaderView(places.leader, node) if several and places is not None else None
        self._yielded = False
        """Whether its last controller has ended because another one is there, or should be."""
        self._cut = False
        """Whether it was said that this node alone is cut off."""
        self._places, self._endpoint, self._address = places, endpoint, address
        self._arguments, self._env, self._folder, self._say = arguments, env, folder, say
        self._here, self._start_process = here, start
        self._anywhere, self._kept_log = anywhere, kept_log
        self._bound_to = ""
        """Host by which this machine reaches the controller of this launcher."""
        self._other_port = False
        """Whether the endpoint's port may be held by a controller that hangs."""
        self._part: Sidecar | None = None
        self._announced = ""
        """Where the controller of this launcher listens."""
        self._lives = 0
        self.host = loopback()
        self.since = 0.0
        self._not_before = 0.0
        self._again_s = _AGAIN_S
        self._pause_of, self._pause_s = -1, 0.0
        """Rank of this node in the last generation, and its wait in silence, in seconds."""
        self._silent_s = 0.0
        self._turned = self._answered_at = time.monotonic()
        """When `turn` last looked, and when its own controller was last known to answer."""
        self._probe: _Probe | None = None
        self._probe_at, self._silence = 0.0, ""
        """When it may be probed again, and the last log line since it last answered."""
        self._problem = ""
        """Why none could be started, as logged last."""
        self._asked = 0
        self._answered = False
        """Whether any ever answered."""

    @property
    def started(self) -> bool:
        """Whether this launcher has started a controller."""
        return self._lives > 0

    @property
    def seated(self) -> bool:
        """Whether the controller of this launcher has the seat, as far as is known."""
        return self._part is not None and bool(self._announced)

    @property
    def answered(self) -> bool:
        """Whether a controller has ever answered."""
        return self._answered

    def addresses(self) -> str:
        """Return where the controller is now; for `NodeLink`.

        Before one has answered, in turns the leader record's and the endpoint: an old record may be
        left of another run, and a controller may have been started at the endpoint by hand.
        """
        if self._announced and self._part is not None:
            return self._announced
        self._asked += 1
        if not self._answered and self._endpoint and self._asked % 2 == 0:
            return self._endpoint
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
            For how long none has answered; infinite where that is not known.
        order
            Rank of this node in the last generation: nodes do not try all at once.

        Raises
        ------
        CkptdError
            None can be started, and no generation of the job has begun here.
        """
        self._answered |= silent_s < self._silent_s
        self._silent_s = silent_s
        if self._part is not None:
            self._end_hung(self._part, silent_s)
            return self._look(self._part, order < NO_ORDER)
        if self._places is None:
            return False
        if self._pause_of != order:
            self._pause_of, self._pause_s = order, stand_in_pause_s(order)
        if self._answered and silent_s <= _QUIET_S:
            self._cut = False
        if self._answered and silent_s > _QUIET_S:
            self._say_silent()
        if self._answered and silent_s <= self._quiet_s():
            return False  # all is well: the place of the seat, perhaps far away, is not asked
        if time.monotonic() < self._not_before:
            return False
        first = not self.started and not self._answered and not self._may_live()
        own = self.started and not self._yielded
        mine = own or (first and (not self._endpoint or self._endpoint_here()))
        if mine or (silent_s > self._pause_s and self._may_stand_in()):
            if self._answers(self._seated(), self._endpoint):
                # It may refuse this launcher for good: the place of the seat has other guests.
                self._not_before = time.monotonic() + _AGAIN_S
            else:
                self._try_start(order < NO_ORDER)
        return False

    def _say_silent(self) -> None:
        """Write beside the seat that this node hears no controller, and see which others say so."""
        if self._outlook is not None:
            # Where the place cannot be reached, no seat can be taken either.
            with suppress(CkptdError):
                self._outlook.say_silent()

    def _may_stand_in(self) -> bool:
        """Whether the controller is gone, or cut off from more nodes than it hears."""
        if self._outlook is None:
            return True
        if not self._answered:
            self._say_silent()
        may = self._outlook.looked and self._outlook.may_stand_in(known=self._answered)
        if self._outlook.looked and not may and not self._cut:
            self._cut = True
            self._say(
                "this node does not reach the controller, which left a sign of life just now; it "
                "starts another when the signs end, or when more nodes have lost it than reach it"
            )
        return may

    def _quiet_s(self) -> float:
        return 0.0 if self.started and not self._yielded else self._pause_s

    def _may_live(self) -> bool:
        """Whether a controller that was recorded may live, though this node hears none."""
        if self._places is not None and self._places.local:
            return self._answers(self._seated())  # no other node reads this machine's record
        return bool(self._seated())

    def _answers(self, *addresses: str) -> bool:
        """Ask all at once: the launcher's loop, which looks at fences and signals, waits for it.

        What cannot prove itself is not alive, even where its address takes connections.
        """
        probes = [_Probe(address, _GREET_S, self._greet) for address in set(addresses) if address]
        return any(probe.may_answer() for probe in probes)

    def _end_hung(self, part: Sidecar, silent_s: float) -> None:
        """Kill a controller of this launcher that runs and answers no more.

        It is stopped, say: another one may then take its place here. Its silence alone
        proves nothing: this launcher may have been stopped, its link may wait for a slow store, or
        not reach the address that others are given. So the process is probed where it listens.
        """
        now = time.monotonic()
        answers = silent_s <= _QUIET_S or silent_s == math.inf
        if answers or not self._announced or now - self._turned > _QUIET_S:
            self._answered_at, self._probe, self._probe_at, self._silence = now, None, 0.0, ""
        self._turned = now
        if now - self._answered_at <= _HUNG_S or part.process.poll() is not None:
            return
        if self._probe is None and now >= self._probe_at:
            port = parse_address(self._announced).port
            self._probe = _Probe(str(Address(self._bound_to, port)), _HUNG_S)
        elif self._probe is not None and self._probe.over:
            self._judge_silent(part, self._probe, f"for {now - self._answered_at:.0f} s")
            self._probe, self._probe_at = None, now + _HUNG_S

    def _judge_silent(self, part: Sidecar, probe: _Probe, since: str) -> None:
        """Kill a process that has proved that it hangs; say once what was found."""
        if probe.hung:
            part.process.kill()  # its end is seen by the next looks
            found, text = "hung", f"the controller has not answered {since}: killing it"
        else:
            found = f"cannot be asked: {probe.problem}" if probe.problem else "answers"
            text = (
                f"no answer {since} from the controller at {self._announced}, which is not "
                f"ended: its process runs, and {found}"
            )
        if found != self._silence:
            self._silence = found
            self._say(text)

    def _endpoint_here(self) -> bool:
        if self._here is not None:
            return self._here
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
                self._say(f"cannot start a controller, trying again: {error}")

    def _start(self) -> None:
        host, port = self._address, 0
        there = parse_address(self._endpoint) if self._endpoint else None
        if there is not None and self._endpoint_here():
            host, port = there.host, 0 if self._other_port else there.port
        elif there is not None and self._anywhere and is_loopback(there.host):
            host = there.host
        self._other_port = False
        if self._anywhere:
            everywhere = there is None or not is_loopback(there.host)
        else:
            # One that is said to be this machine's, behind a translation of addresses, cannot be
            # bound to.
            everywhere = not is_here(host)
        bind = any_address(host or socket.gethostname()) if everywhere else host
        self._bound_to = ("::1" if bind == "::" else "127.0.0.1") if everywhere else bind
        newest = self._places.leader.newest() if self._places is not None else None
        after = newest.number if newest is not None else -1
        name = f"controller-{self._lives}" if self._lives else "controller"
        command = [*CKPTD, "controller", "--json", *self._arguments]
        command += ["--bind", bind, "--port", str(port), "--after", str(after)]
        if host:
            command += ["--host", host]
        self._lives += 1
        self.host, self.since = host or bind, time.monotonic()
        self._announced = ""
        self._part = Sidecar(name, command, self._env, self._folder, self._start_process)

    def _look(self, part: Sidecar, begun: bool) -> bool:
        before = self._announced
        if not before:
            with suppress(msgspec.MsgspecError, KeyError, TypeError):
                self._announced = str(ANYTHING.decode(part.out.read_bytes())["address"])
                self._again_s, self._problem, self._yielded = _AGAIN_S, "", False
        code = part.process.poll()
        if code is None:
            return self._announced != before
        self._end_part(part)
        self._part, self._announced, self._pause_of = None, "", -1
        self._not_before = time.monotonic() + (self._again_s if code >= 0 else 0.0)
        self._again_s = min(2 * self._again_s, _MOST_AGAIN_S)
        # Each launcher of a machine may have started a controller: all of them but one exit.
        if code > 0 and self._answers(self._seated(), self._endpoint):
            self._yielded = True
        else:
            self._judge(part, code, begun)
        return False

    def _judge(self, part: Sidecar, code: int, begun: bool) -> None:
        """Say what has become of the controller; give up what another one could not do either."""
        error = part.error()
        if isinstance(error, ConflictError):
            # Another node leads, or is to: this one may have been cut off from most of them.
            self._yielded, self._not_before = True, time.monotonic() + _MOST_AGAIN_S
        if error is not None and error.kind == "listen":
            # Of a job that had a controller, one that hangs may hold the port: every other start
            # takes any port, and nodes find it by the leader's record.
            self._other_port = self._answered or bool(self._seated())
        if error is None or isinstance(error, ConflictError):
            if code:
                self._say(
                    f"{part.failed(f'has ended with {code}')}\n  next:   another one is started"
                )
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
            self._end_part(part)

    def _end_part(self, part: Sidecar) -> None:
        part.end()
        if self._kept_log is not None:
            part.keep_log(self._kept_log)
