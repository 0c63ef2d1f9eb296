"""``ckptd slurm``: ``ckptd run`` on every node of a Slurm allocation, and what keeps it there."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ckptd.cli import Document, Json, json_text
from ckptd.elastic.launchers import (
    CKPTD,
    EXIT_CODES,
    SECRET_VARIABLE,
    Address,
    check_folder,
    exit_code,
    secret_of,
)
from ckptd.errors import CkptdError, NotFoundError, UsageError

if TYPE_CHECKING:
    from ckptd.elastic.launchers import ControllerSupervisor, OperatorLink, Outcome, Supervisor
    from ckptd.monitor.cli import DaemonSupervisor
    from ckptd_slurm.launcher import SlurmLauncher

__all__ = ["Plan", "SlurmDocument", "plan_of", "slurm"]

_CALL_S = 30.0
_CONTROLLER_S = 60.0
_ENDING_S = 20.0
_LOOK_S = 0.5
_NODES_S = "120"
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_OURS = {"--node", "--standalone", "--rdzv-endpoint", "--master-addr", "--master-port"}
_OURS |= {"--local-addr", "--help", "-h"}


class SlurmDocument(Document, frozen=True, kw_only=True, tag="slurm"):
    """Final output of ``ckptd slurm --json``, on standard error.

    Attributes
    ----------
    job
        Name of the job.
    kind
        How it ended: ``done``, ``lost`` if it did not stop in time, or as in
        docs/reference/errors.md.
    text
        What happened.
    requeued
        Whether Slurm starts it again.
    exit_code
        Of the batch step.
    """

    job: str
    kind: str
    text: str
    requeued: bool
    exit_code: int


@dataclass(frozen=True)
class Plan:
    """Processes to start, and where.

    Attributes
    ----------
    job, log, endpoint
        Name of the job, URL of its membership log, ``HOST:PORT`` of its controller.
    words
        The command line of ``ckptd run``, the same on all nodes but for ``--node``.
    controller
        That of ``ckptd controller``.
    folder
        Of the job; None where everything else is given.
    daemon
        Options of ``ckptd serve``, besides where it listens; None: none is started here.
    """

    job: str
    log: str
    endpoint: str
    words: tuple[str, ...]
    controller: tuple[str, ...]
    folder: Path | None
    daemon: tuple[str, ...] | None

    def command(self, node: str) -> list[str]:
        """Return the command line of a node's launcher."""
        return [*CKPTD, "run", "--node", node, *self.words]


def slurm(
    *command: Annotated[
        str,
        Parameter(help="Options of ckptd run, the script, and its arguments."),
    ],
    json: Json = False,
) -> int:
    """Train on all nodes of the Slurm allocation that this is called in.

    For batch scripts: exec ckptd slurm --nproc-per-node 8 train.py. The controller runs here, and a
    launcher as a step on each node. What is lost is restarted inside the allocation; only when
    that does not help, or when Slurm says with USR1 that the time is over, the job is requeued. The
    exit codes are those of ckptd run.
    """
    from ckptd_slurm.launcher import IN_BATCH, SlurmLauncher

    environ = dict(os.environ)
    plan: Plan | None = None

    def launch(node: str) -> list[str]:
        return plan.command(node) if plan is not None else []

    launcher = SlurmLauncher(launch, environ=environ, timeout_s=_CALL_S)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    words, json = _without_json(command)
    if not (here := environ.get("SLURMD_NODENAME")):
        # The shell of salloc runs where salloc was called: on a login node.
        raise UsageError(
            "this machine is not a node of the Slurm allocation",
            where="SLURMD_NODENAME",
            found="not set",
            hint=IN_BATCH,
        )
    endpoint = _endpoint(launcher.address(here, _CALL_S))
    plan = plan_of(words, environ, launcher.names, endpoint, launcher.may_requeue(_CALL_S))
    environ[SECRET_VARIABLE] = launcher.environ[SECRET_VARIABLE] = _secret(plan, environ)
    with tempfile.TemporaryDirectory(prefix="ckptd-slurm-") as parts:
        try:
            document = _Batch(plan, launcher, environ).run(Path(parts))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if json:
        print(json_text(document), file=sys.stderr)
    return document.exit_code


def _without_json(command: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without a ``--json`` among the options: it is not for the nodes."""
    from ckptd.elastic.cli import separated

    words = separated(command)
    first = words.index("--")
    own = [word for word in words[:first] if word != "--json"]
    return own + words[first:], len(own) < first


def _endpoint(host: str) -> str:
    """Return an address of this machine with a port that is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        port = sock.getsockname()[1]
    return str(Address(host, port))


def plan_of(
    command: Sequence[str],
    environ: Mapping[str, str],
    nodes: Sequence[str],
    endpoint: str,
    requeue: bool,
) -> Plan:
    """Return what is started where.

    Parameters
    ----------
    command
        Options of ``ckptd run``, the script, and its arguments.
    environ
        Of the batch step.
    nodes, endpoint
        Names of the allocation's nodes; where the controller is to listen.
    requeue
        Whether Slurm may start the job again.

    Raises
    ------
    UsageError
        An option belongs to each node, or is given here.
    """
    from ckptd.elastic.cli import separated

    words = separated(command)
    given = {word.partition("=")[0] for word in words[: words.index("--")]}
    if wrong := sorted(given & _OURS):
        raise UsageError("ckptd slurm sets this option on each node", where=", ".join(wrong))
    number = environ["SLURM_JOB_ID"]
    folder = Path.cwd() / f"ckptd-{number}"
    more = {
        "--nnodes": f"1:{len(nodes)}",
        "--job": environ.get("CKPTD_JOB") or f"slurm-{number}",
        "--log": str(folder / "log"),
    }
    more = {name: value for name, value in more.items() if name not in given}
    own = SECRET_VARIABLE not in environ or "--log" in more
    more["--rdzv-endpoint"] = endpoint
    words = [*(f"{name}={value}" for name, value in more.items()), *words]
    options = _parsed(words)
    return Plan(
        job=options["job"],
        log=options["log"],
        endpoint=endpoint,
        words=tuple(words),
        controller=tuple(_controller(options, 3 if requeue else 2)),
        folder=folder if own else None,
        daemon=None if given & {"--daemon", "--no-watch"} else tuple(_daemon(options)),
    )


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return what ``ckptd run`` would make of a command line."""
    from cyclopts import CycloptsError

    from ckptd.cli import app

    try:
        _, bound, _ = app.parse_args(["run", *words], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(" ".join(str(error).split()), hint="ckptd run --help") from error
    bound.apply_defaults()
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        out |= vars(value) if is_dataclass(value) else {name: value}
    return out


def _controller(options: Mapping[str, Any], levels: int) -> list[str]:
    from ckptd.elastic.cli import controller_settings, slots_of

    out = ["--job", options["job"], "--log", options["log"], "--nodes", options["nnodes"]]
    out += ["--slots", str(slots_of(options["nproc_per_node"]))]
    for name in ("layout", "pp", "tp", "memory", "microbatches"):
        if options[name]:
            out += [f"--{name}", str(options[name])]
    words = controller_settings(
        options["setting"],
        level=options["level"],
        max_restarts=options["max_restarts"],
        no_restart_on=options.get("no_restart_on", "repeat"),
        interrupt_s=options.get("interrupt"),
    )
    settings = dict(text.partition("=")[::2] for text in words)
    settings.setdefault("levels", str(levels))
    settings.setdefault("nodes_s", _NODES_S)  # those that an allocation has lost do not come back
    for name, value in settings.items():
        out += ["--set", f"{name}={value}"]
    return out


def _daemon(options: Mapping[str, Any]) -> list[str]:
    out = ["--port", str(options["port"]), "--controller", options["log"]]
    for name in ("policy", "floor"):
        out += [f"--{name}={text}" for text in options[name]]
    return out


def _secret(plan: Plan, environ: Mapping[str, str]) -> str:
    """Return the job's secret: that of the environment, or one in the job's folder.

    Others may write where the job was submitted, and have made a folder of that name before it.

    Raises
    ------
    RefusedError
        As of `ckptd.base.net.signing.secret_of`.
    """
    folder = plan.folder
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)  # the membership log lies there too
    if (given := environ.get(SECRET_VARIABLE)) or folder is None:
        return given or ""
    return secret_of(folder / "secret").decode()


class _Batch:
    """The batch step: a controller, the daemon, the supervisor, and signals."""

    def __init__(self, plan: Plan, launcher: SlurmLauncher, environ: dict[str, str]) -> None:
        self._plan, self._launcher, self._environ = plan, launcher, environ
        self._looked = -math.inf
        self._watch: DaemonSupervisor | None = None

    def run(self, parts: Path) -> SlurmDocument:
        """Train; return how it ended."""
        from ckptd.elastic.launchers import (
            ControllerSupervisor,
            OperatorLink,
            Supervisor,
            open_places,
            parse_address,
        )
        from ckptd.monitor.cli import DaemonSupervisor

        plan, secret = self._plan, self._environ[SECRET_VARIABLE].encode()
        host, _ = parse_address(plan.endpoint)
        places = open_places(plan.job, plan.log)
        controller = ControllerSupervisor(
            places,
            plan.endpoint,
            host,
            plan.controller,
            self._environ,
            parts,
            _say,
            greet=lambda *asked: link.greet(*asked),
        )
        if plan.daemon is not None:
            self._watch = DaemonSupervisor(
                plan.job, None, plan.daemon, None, self._environ, parts, _say
            )
        link = OperatorLink(controller.addresses, plan.job, secret, name="slurm")
        supervisor = Supervisor(self._launcher, link, _say, turn=lambda: self._turn(controller))
        for number in _SIGNALS:
            signal.signal(number, lambda n, _: _stop(supervisor, signal.Signals(n)))
        try:
            self._await_controller(controller, link)
            return self._after(supervisor.run())
        finally:
            self._launcher.close()
            link.close()
            if self._watch is not None:
                self._watch.end(0.0)
            controller.end(_ENDING_S)

    def _turn(self, controller: ControllerSupervisor) -> None:
        """Have a controller and the daemon; a controller that stands in elsewhere will do."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            controller.turn(math.inf, 0)
            if self._watch is not None:
                self._watch.turn(controller)

    def _await_controller(self, controller: ControllerSupervisor, link: OperatorLink) -> None:
        end = time.monotonic() + _CONTROLLER_S
        while True:
            self._turn(controller)
            try:
                link.status()
            except NotFoundError:
                if time.monotonic() >= end:
                    raise
            else:
                return

    def _after(self, outcome: Outcome) -> SlurmDocument:
        """See to what follows the job's end."""
        _say(f"the job ends: {outcome.kind}{': ' if outcome.text else ''}{outcome.text}")
        worker = self._launchers_end()
        again = outcome.requeue and self._requeue(outcome.text)
        code = EXIT_CODES["requeue"] if again else exit_code(outcome.kind, worker)
        return SlurmDocument(
            job=self._plan.job,
            kind=outcome.kind,
            text=outcome.text,
            requeued=again,
            exit_code=code,
        )

    def _requeue(self, text: str) -> bool:
        _say(f"job {self._launcher.job} is requeued")
        try:
            return self._launcher.requeue(text, _CALL_S)
        except CkptdError as error:
            _say(f"it cannot be requeued: {error}")
            return False

    def _launchers_end(self) -> int:
        """Wait for the launchers, which know of the end; return what one failed with."""
        end = time.monotonic() + _ENDING_S
        while True:
            machines = self._launcher.running()
            if not machines or time.monotonic() >= end:
                codes = sorted(self._launcher.codes().items())
                return next((code for _, code in codes if code), 0)
            time.sleep(_LOOK_S / 10)


def _stop(supervisor: Supervisor, number: signal.Signals) -> None:
    if number is signal.SIGUSR1:
        supervisor.stop("the allocation's time limit is reached", requeue=True)
    else:
        supervisor.stop(f"'the batch step received {number.name}'", requeue=False)


def _say(text: str) -> None:
    print(f"ckptd: {text}", file=sys.stderr, flush=True)
