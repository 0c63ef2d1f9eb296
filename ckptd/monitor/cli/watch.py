"""``ckptd watch``: runs a program of ranks watched, with its daemon and watcher; exit codes.

In it: how long the daemon lingers and is awaited.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ckptd.base.runtime.host import loopback
from ckptd.cli.output import Document, Json, flag, json_text, print_error
from ckptd.errors import CkptdError, UsageError

_PREFIX = "watch-"
_TURN_S = 0.5
_START_S = 60.0
_POLL_S = 0.05
_LAST_WORD_S = 10.0
"""Wait for a first incident after the command failed, in seconds: mostly one is still to come."""
_LINGER_S = "30"
_SI_KERNEL = 0x80  # si_code of what the terminal sends to all processes before it


class WatchDocument(Document, frozen=True, kw_only=True, tag="watch"):
    """The document that ``ckptd watch --json`` prints to standard error when COMMAND has ended.

    Attributes
    ----------
    job
        Name of the job.
    url
        Of the daemon; null if nothing was watched.
    exit_code
        Of COMMAND.
    incidents
        Each as it was last told, as GET /api/v1/incidents tells them.
    """

    job: str
    url: str | None
    exit_code: int
    incidents: list[dict[str, Any]]


def watch(
    *command: Annotated[str, Parameter(help="COMMAND and its arguments, behind --.")],
    job: Annotated[
        str | None,
        Parameter(help="Name of the job, the same on all nodes; CKPTD_JOB.", show_default=False),
    ] = None,
    daemon: Annotated[
        str | None,
        Parameter(help="Report to the daemon at this URL, instead of starting one."),
    ] = None,
    port: Annotated[int, Parameter(help="Port of the daemon; 0 picks a free one.")] = 0,
    floor: Annotated[
        tuple[str, ...],
        Parameter(help="PHASE=SECONDS: least time-out of a phase, such as train=30."),
    ] = (),
    keep_serving: Annotated[
        bool, flag("Keep serving the page after COMMAND has ended, until TERM or INT.")
    ] = False,
    json: Json = False,
) -> int:
    """Run COMMAND with every collective of its ranks watched; the exit code is COMMAND's.

    COMMAND is anything that starts PyTorch ranks, torchrun for one. Nothing in it needs an edit.
    Incidents are printed to standard error as they come. What fails in the watch never stops
    COMMAND: it then runs unwatched, and that is said.
    """
    if not command or shutil.which(command[0]) is None:
        raise UsageError(
            "command not found" if command else "no command given",
            wanted="ckptd watch -- COMMAND...",
            found=command[0] if command else None,
        )
    check_floors(floor)
    name = job or os.environ.get("CKPTD_JOB") or f"{_stem(command)}-{os.getpid()}"
    one = _Watched(name, job, daemon, port, floor, quiet=json)
    try:
        one.begin()
        code = one.run(command)
        one.finish(code, keep_serving)
        url = one.url
    finally:
        one.end()
    if json:
        incidents = list(one.incidents.values())
        document = WatchDocument(job=name, url=url, exit_code=code, incidents=incidents)
        print(json_text(document), file=sys.stderr)
    return code


def check_floors(floors: tuple[str, ...]) -> None:
    """Refuse what ``--floor`` does not take; errors as of `floors_of`."""
    from ckptd.monitor.agent.watched import floors_of

    words = {}
    for text in floors:
        phase, _, seconds = text.partition("=")
        words[phase] = 0.0
        with suppress(ValueError):
            words[phase] = float(seconds)
    floors_of(words)


def _stem(command: tuple[str, ...]) -> str:
    """Return a name for a job that has none: that of its script."""
    scripts = [word for word in command if word.endswith(".py")]
    stem = Path(scripts[0] if scripts else command[0]).stem
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem)[:64] or "job"


@dataclass(frozen=True)
class _Here:
    """In the place of a controller: a command has none, and its daemon is this process's."""

    since: float = field(default_factory=time.monotonic)
    seated: bool = True
    answered: bool = True
    host: str = field(default_factory=loopback)


class _Watched:
    """A command and what runs beside it."""

    def __init__(
        self,
        name: str,
        job: str | None,
        daemon: str | None,
        port: int,
        floors: tuple[str, ...],
        *,
        quiet: bool,
    ) -> None:
        from ckptd.elastic.launchers.sidecars import SIGNALS
        from ckptd.monitor.cli.watch_parts import DaemonSupervisor

        self._name = name
        self._named = bool(job or os.environ.get("CKPTD_JOB"))
        self._daemon = daemon
        self._port = port
        self._floors = [word for text in floors for word in ("--floor", text)]
        self._quiet = quiet
        self._side: DaemonSupervisor | None = None
        self._here = _Here()
        self._folder: Path | None = None
        self._env: dict[str, str] = {k: v for k, v in os.environ.items() if k != "CKPTD_DAEMON"}
        self._signals = {*SIGNALS, signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self.incidents: dict[str, dict[str, Any]] = {}

    @property
    def url(self) -> str | None:
        return self._side.url if self._side is not None else None

    def say(self, text: str) -> None:
        if not self._quiet:
            print(f"ckptd: {text}", file=sys.stderr, flush=True)

    # --- before ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything beside COMMAND; say so if that fails, and leave COMMAND as it is."""
        try:
            self._env |= self._begin(dict(self._env))
        except (CkptdError, OSError) as error:
            shown = error if isinstance(error, CkptdError) else CkptdError(str(error))
            self._end_side()
            if not self._quiet:
                print_error(shown, False)
            self.say("the command runs unwatched")

    def _begin(self, env: dict[str, str]) -> Mapping[str, str]:
        """Return the variables that COMMAND is to have besides."""
        from ckptd.base.net.signing import SECRET_VARIABLE, access_token, job_secret, new_secret
        from ckptd.base.runtime.agentlink import run_folder
        from ckptd.elastic.launchers.sidecars import old_folders
        from ckptd.monitor.cli.watch_parts import DaemonSupervisor
        from ckptd.monitor.injection import environment

        base = run_folder()
        for old in old_folders(base, _PREFIX):
            shutil.rmtree(old, ignore_errors=True)
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        rings = folder / "rings"
        rings.mkdir(mode=0o700)
        beside, token = dict(env), ""
        arguments = ["--port", str(self._port), "--linger", _LINGER_S, *self._floors]
        if self._daemon is not None:
            token = access_token(job_secret(self._name, base))
        elif not self._named:  # it has no name to ask for later: nothing of it is to stay
            beside.setdefault(SECRET_VARIABLE, new_secret())
            arguments += ["--history", str(folder / "history.sqlite")]
        self._side = DaemonSupervisor(
            self._name,
            self._daemon,
            arguments,
            ["--rings", str(rings), *self._floors],
            beside,
            folder,
            self.say,
            tell=self._tell,
            token=token,
        )
        end = time.monotonic() + _START_S
        while not self._side.settled:
            if time.monotonic() > end:
                self.say(f"no daemon is ready after {_START_S:.0f} s: the command does not wait")
                break
            time.sleep(_POLL_S)
            self._side.turn(self._here)
        if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            self.say("TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents ranks from being recorded")
        more = environment(folder / "injection", env) | {"CKPTD_RINGS": str(rings)}
        return more | ({"CKPTD_JOB": self._name} if self._named else {})

    def _tell(self, line: str, incident: dict[str, Any]) -> None:
        self.incidents[incident["id"]] = incident
        self.say(f"incident {incident['id']}: {line}")

    # --- meanwhile ------------------------------------------------------------------------------

    def run(self, command: tuple[str, ...]) -> int:
        """Run COMMAND and return its exit code; signals are passed on to it."""
        from ckptd.elastic.launchers.sidecars import shell_code, unblocked

        process = subprocess.Popen(command, env=self._env, preexec_fn=unblocked)
        while process.poll() is None:
            info = signal.sigtimedwait(self._signals, _TURN_S)
            # What a terminal sends has reached COMMAND by itself.
            by_hand = info is not None and info.si_code != _SI_KERNEL
            if info is not None and by_hand and info.si_signo != signal.SIGCHLD:
                with suppress(ProcessLookupError):
                    process.send_signal(info.si_signo)
            if self._side is not None:
                self._side.turn(self._here)
        return shell_code(process.returncode)

    # --- after ----------------------------------------------------------------------------------

    def finish(self, code: int, keep_serving: bool) -> None:
        """Report the last incidents of the end, and serve on if that is wanted."""
        if self._side is not None:
            self._side.finish(_LAST_WORD_S if code else 0.0)
        if keep_serving and self.url is not None and self._daemon is None:
            self.say(f"the command has ended with {code}; the page stays until TERM or INT")
            signal.sigwait(self._signals - {signal.SIGCHLD})

    def end(self) -> None:
        """End what runs beside COMMAND, and remove what it left."""
        self._end_side()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._daemon is None and not self._named:
            self._remove_lock()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _end_side(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.end(0.0)

    def _remove_lock(self) -> None:
        """Remove the lock of a daemon whose name will not be used again."""
        with suppress(CkptdError):
            from ckptd.monitor.daemon.place import DaemonPlace

            DaemonPlace(self._name).lock.unlink(missing_ok=True)
