"""``ckptd run``: torchrun's command line, for jobs that go on when ranks and nodes are lost."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from ckptd.cli.output import Document, Json, json_text
from ckptd.cli.run_options import JobOptions, TorchrunOptions
from ckptd.cli.watch import check_floors
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from ckptd.cli.run_parts import Steward, Watch
    from ckptd.elastic.launchers.crew import Program
    from ckptd.elastic.launchers.node import Ending, NodeLauncher

__all__ = ["RunDocument", "run"]

_PREFIX = "run-"
_ELSEWHERE = "192.0.2.1"
"""No host's address; what is sent there takes the usual way out."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RunDocument(Document, frozen=True, kw_only=True, tag="run"):
    """What ``ckptd run --json`` prints to standard error at its end.

    Attributes
    ----------
    job, node
        Names.
    kind
        How it ended: ``done``, ``left``, or as in docs/reference/errors.md.
    text
        What happened.
    exit_code
        Of the launcher.
    """

    job: str
    node: str
    kind: str
    text: str
    exit_code: int


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says, as far as more than one place has to know."""

    command: tuple[str, ...]
    low: int
    high: int
    slots: int
    job: str
    named: bool
    node: str
    run_id: str
    endpoint: str
    log: str | None
    local_addr: str
    role: str
    max_restarts: int | None
    json: bool


def run(
    *command: Annotated[str, Parameter(help="The script and its arguments.")],
    torchrun: TorchrunOptions | None = None,
    own: JobOptions | None = None,
    json: Json = False,
) -> int:
    """Train on this node; torchrun's command line does what it says there.

    On one machine a script is all that is needed. Ranks that are lost are started again, from a
    process that has imported PyTorch already; with --nnodes MIN:MAX the job goes on with fewer
    nodes, and takes them back. The exit code is 0 if the job has finished, 75 if it is to be
    submitted again, 76 and 77 if it has no nodes or makes no progress, else that of the worker that
    failed for good.
    """
    if not command:
        raise UsageError(
            "say what is to be run",
            kind="bad-argument",
            wanted="ckptd run [OPTION]... SCRIPT [ARGUMENT]...",
        )
    torchrun, own = torchrun or TorchrunOptions(), own or JobOptions()
    if torchrun.module and torchrun.no_python:
        raise UsageError(
            "-m and --no-python exclude each other", kind="bad-argument", found="-m --no-python"
        )
    options = _options(command, torchrun, own, json)
    check_floors(own.floor)
    watched = ["--policy=" + text for text in own.policy]
    watched += ["--port", str(own.port), "--linger", "30"]
    one = _Run(
        options,
        _controller_arguments(options, own),
        None if own.no_watch else watched,
        [word for text in own.floor for word in ("--floor", text)],
        own.daemon,
    )
    mode = "exec" if torchrun.no_python else "module" if torchrun.module else "script"
    files = (torchrun.log_dir, torchrun.redirects, torchrun.tee, torchrun.local_ranks_filter)
    return one.run(mode, files, float(torchrun.shutdown_timeout))


# --- what the flags say ---------------------------------------------------------------------------


def _options(
    command: tuple[str, ...], torchrun: TorchrunOptions, own: JobOptions, json: bool
) -> _Options:
    from ckptd.cli.run_flags import slots_of

    port, alone = torchrun.master_port, torchrun.standalone
    endpoint = torchrun.rdzv_endpoint or (f"{torchrun.master_addr}:{port}" if port else "")
    low, high = _range("1" if alone else torchrun.nnodes)
    if high == 1 and endpoint.endswith(":0"):  # torchrun's way of asking for any free port
        endpoint = ""
    if high > 1 and not endpoint and own.log is None:
        raise UsageError(
            "nodes of one job have to find each other",
            kind="bad-argument",
            wanted="--rdzv-endpoint HOST:PORT, or --log URL",
            found=f"--nnodes {torchrun.nnodes}",
        )
    run_id = torchrun.rdzv_id
    slots = slots_of(torchrun.nproc_per_node)
    name = _job_name(own.job, run_id, command, alone=high == 1 and (alone or not endpoint))
    given = own.node or os.environ.get("CKPTD_NODE")
    return _Options(
        command=command,
        low=low,
        high=high,
        slots=slots,
        job=name,
        named=bool(own.job or os.environ.get("CKPTD_JOB") or run_id != "none" or endpoint),
        node=given or _free_name(name, socket.gethostname()),
        run_id=run_id,
        endpoint="" if alone else endpoint,
        log=own.log,
        local_addr=torchrun.local_addr,
        role=torchrun.role,
        max_restarts=torchrun.max_restarts,
        json=json,
    )


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    with suppress(ValueError):
        least, most = int(low), int(high if colon else low)
        if 1 <= least <= most:
            return least, most
    raise UsageError(
        "there is no such number of nodes",
        kind="bad-argument",
        where="--nnodes",
        wanted="N, or MIN:MAX",
        found=text[:100],
    )


def _job_name(job: str | None, run_id: str, command: tuple[str, ...], *, alone: bool) -> str:
    given = job or os.environ.get("CKPTD_JOB") or ("" if run_id == "none" else run_id)
    if given:
        return given
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(command[0]).stem)[:64]
    return f"{stem or 'job'}-{os.getpid()}" if alone else stem or "job"


def _lock_of(job: str, node: str) -> Path:
    from ckptd.runtime.agentlink import run_folder

    digest = hashlib.sha256(f"{job}\n{node}".encode()).hexdigest()[:20]
    return run_folder() / f"node-{digest}.lock"


def _free_name(job: str, given: str) -> str:
    """Return a name for this node that no other launcher of the job on this machine has.

    It is held until this process ends: its lock is never let go of.
    """
    number = 1
    while True:
        name = given if number == 1 else f"{given}-{number}"
        fd = os.open(_lock_of(job, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            number += 1
        else:
            return name


def _settings(
    given: tuple[str, ...], level: int | None, max_restarts: int | None, no_restart_on: str
) -> tuple[str, ...]:
    from ckptd.elastic.states import ControllerSettings, ExitCodes

    ExitCodes(no_restart_on)
    names = {text.partition("=")[0] for text in given}
    more: dict[str, int | str | None] = {"levels": level, "max_restarts": max_restarts}
    if no_restart_on != ControllerSettings.no_restart_on:
        more["no_restart_on"] = no_restart_on
    return given + tuple(
        f"{name}={value}" for name, value in more.items() if value is not None and name not in names
    )


def _controller_arguments(options: _Options, own: JobOptions) -> list[str]:
    out = ["--job", options.job, "--nodes", f"{options.low}:{options.high}"]
    out += ["--slots", str(options.slots)]
    given = {
        "--layout": own.layout,
        "--pp": own.pp,
        "--tp": own.tp,
        "--memory": own.memory,
        "--log": options.log,
        "--microbatches": own.microbatches,
    }
    for name, value in given.items():
        out += [name, str(value)] if value else []
    for text in _settings(own.setting, own.level, options.max_restarts, own.no_restart_on):
        out += ["--set", text]
    return out


# --- the run --------------------------------------------------------------------------------------


class _Run:
    """One launcher and what runs beside it."""

    def __init__(
        self,
        options: _Options,
        controller: list[str],
        watched: list[str] | None,
        floors: list[str],
        daemon: str | None,
    ) -> None:
        self._floors = floors
        self._o, self._controller, self._watched, self._daemon = (
            options,
            controller,
            watched,
            daemon,
        )
        self._env = dict(os.environ)
        self._launcher: NodeLauncher | None = None
        self._steward: Steward | None = None
        self._watch: Watch | None = None
        self._pending: list[signal.Signals] = []

    def say(self, text: str) -> None:
        if not self._o.json:
            _print(f"ckptd: {text}")

    def run(self, mode: str, files: tuple[Path | None, str, str, str], grace_s: float) -> int:
        """Launch; return the exit code."""
        from ckptd.cli.run_parts import need_secret, need_torch
        from ckptd.cli.watch_parts import old_folders
        from ckptd.runtime.agentlink import run_folder

        need_torch()
        if self._o.endpoint:
            need_secret(self._o.endpoint, self._env)
        before = {number: signal.signal(number, self._signalled) for number in _signals()}
        base = run_folder()
        for old in old_folders(base, _PREFIX):
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        try:
            ending = self._launch(folder, mode, files, grace_s)
        finally:
            self._end_parts(folder)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._last_words(ending)

    def _launch(
        self, folder: Path, mode: str, files: tuple[Path | None, str, str, str], grace_s: float
    ) -> Ending:
        from ckptd.elastic.launchers.node import NodeLauncher, NodeSettings
        from ckptd.elastic.launchers.output import Output, parse_streams
        from ckptd.net.signing import SECRET_VARIABLE, job_secret
        from ckptd.runtime.agentlink import run_folder

        o = self._o
        given = self._env.get(SECRET_VARIABLE)
        secret = given.encode() if given else job_secret(o.job, run_folder())
        self._steward = self._make_steward(folder)
        program = self._program(mode, folder)
        from ckptd.cli.run_flags import ranks_filter

        log_dir, redirects, tee, shown = files
        output = Output(
            log_dir,
            folder,
            o.run_id if o.run_id != "none" else o.job,
            o.role,
            parse_streams(redirects, "--redirects"),
            parse_streams(tee, "--tee"),
            ranks_filter(shown),
        )
        self._launcher = launcher = NodeLauncher(
            NodeSettings(
                job=o.job, node=o.node, slots=o.slots, address=o.local_addr, grace_s=grace_s
            ),
            program,
            output,
            folder,
            self._steward.addresses,
            secret,
            self.say,
            self._turn,
            self._steward.still,
            self._daemon_at,
        )
        for number in self._pending:
            launcher.leave(number)
        return launcher.run()

    def _make_steward(self, folder: Path) -> Steward:
        from ckptd.cli.run_parts import Steward, Watch
        from ckptd.elastic.places import open_places
        from ckptd.net.address import is_here, loopback_of, parse_address
        from ckptd.runtime.host import address_towards

        o = self._o
        host = parse_address(o.endpoint)[0] if o.endpoint else "127.0.0.1"
        own = o.log is not None or is_here(host)
        places = open_places(o.job, o.log) if own else None
        address = o.local_addr or address_towards(host)
        if o.high > 1 and (here := loopback_of(host)):
            self.say(
                f"{host} is {here} on this machine, where others do not reach it; if there are "
                f"any, name its address: --rdzv-endpoint {address_towards(_ELSEWHERE)}:PORT"
            )
        if not o.endpoint:
            address = self._own_address()
        if self._watched is not None:
            url = places.url if places is not None else o.endpoint
            # The ranks' rings have the launcher's name of the node, which the host need not have.
            watcher = [f"--node={o.node}", "--rings", str(folder / "rings"), *self._floors]
            watched = [*self._watched, *self._floors, "--controller", url]
            if not o.named:
                watched += ["--history", str(folder / "history.sqlite")]
            self._watch = Watch(o.job, self._daemon, watched, watcher, self._env, folder, self.say)
        return Steward(
            places,
            o.endpoint,
            address,
            self._controller,
            self._env,
            folder,
            self.say,
            o.node if o.high > 1 else "",
        )

    def _own_address(self) -> str:
        """Return where a controller listens that other nodes find by the log alone."""
        from ckptd.net.signing import SECRET_VARIABLE
        from ckptd.runtime.host import address_towards

        if self._o.high == 1:
            return "127.0.0.1"
        if self._o.local_addr or os.environ.get(SECRET_VARIABLE):
            return self._o.local_addr or address_towards(_ELSEWHERE)
        self.say(f"without {SECRET_VARIABLE}, only launchers on this machine find this one")
        return "127.0.0.1"

    def _program(self, mode: str, folder: Path) -> Program:
        from ckptd.elastic.launchers.environ import Told, common

        o = self._o
        told = Told(
            job=o.job,
            node=o.node,
            run_id=o.run_id if o.run_id != "none" else o.job,
            role=o.role,
            max_restarts=o.max_restarts or 0,
            launcher=folder / "launcher.sock",
            lease=folder / "lease",
        )
        base: Mapping[str, str] = {**os.environ, **self._recording(folder)}
        if "OMP_NUM_THREADS" not in base and o.slots > 1:
            self.say("OMP_NUM_THREADS=1 for each rank, unless you set it")
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        environ = common(base, told, o.slots)
        argv = o.command
        if mode != "exec" and python != sys.executable:
            argv = (python, "-u", *(["-m"] if mode == "module" else []), *argv)
            mode = "exec"
        plain = mode == "exec" or os.environ.get("CKPTD_ZYGOTE") == "0"
        from ckptd.elastic.launchers.crew import programs

        return programs({"mode": mode, "argv": argv, "environ": environ, "plain": plain})

    def _recording(self, folder: Path) -> dict[str, str]:
        """Return the variables with which ranks record themselves."""
        if self._watched is None:
            return {}
        from ckptd.monitor.injection import environment

        (folder / "rings").mkdir(mode=0o700)
        try:
            more = environment(folder / "injection", os.environ)
        except OSError as error:
            self.say(f"ranks cannot be watched: {error}")
            self._watch = None
            return {}
        return more | {"CKPTD_RINGS": str(folder / "rings")}

    def _turn(self, silent_s: float, order: int) -> bool:
        if self._steward is None:
            return False
        listens = self._steward.turn(silent_s, order)
        if self._watch is not None:
            self._watch.turn(self._steward)
        return listens

    def _daemon_at(self, url: str) -> None:
        if self._watch is not None:
            self._watch.daemon_at(url)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if self._launcher is None:
            self._pending.append(signal.Signals(number))
        else:
            self._launcher.leave(signal.Signals(number))

    # --- the end ----------------------------------------------------------------------------------

    def _end_parts(self, folder: Path) -> None:
        if self._watch is not None:
            self._watch.end(0.0)
        if self._steward is not None:
            self._steward.end(0.0)
        shutil.rmtree(folder, ignore_errors=True)
        if not self._o.named:
            self._remove_leavings()

    def _remove_leavings(self) -> None:
        """Remove what belongs to the name of a job that nobody will use again."""
        from ckptd.daemon.place import DaemonPlace
        from ckptd.elastic.places import own_log
        from ckptd.net.signing import secret_path
        from ckptd.runtime.agentlink import run_folder

        secret_path(self._o.job, run_folder()).unlink(missing_ok=True)
        if self._o.log is None:
            shutil.rmtree(own_log(self._o.job), ignore_errors=True)
        DaemonPlace(self._o.job).lock.unlink(missing_ok=True)
        _lock_of(self._o.job, self._o.node).unlink(missing_ok=True)

    def _last_words(self, ending: Ending) -> int:
        from ckptd.cli.watch_parts import shell_code

        code = shell_code(ending.code)
        if ending.kind != "done" and ending.text:
            self.say(ending.text)
        if self._o.json:
            document = RunDocument(
                job=self._o.job,
                node=self._o.node,
                kind=ending.kind,
                text=ending.text,
                exit_code=code,
            )
            _print(json_text(document))
        return code


def _print(text: str) -> None:
    """Tell people; that nobody reads it any more is no reason to end a job."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _signals() -> list[signal.Signals]:
    """Return those that end the launcher: not the one that ``nohup`` has it ignore."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if not (ignored and number is signal.SIGHUP)]
