"""``ckptd run``: options of torchrun and of the job, help texts, the launcher of this node.

In it: options without effect; ranks for each node (auto, cpu, gpu); the default time in which
sessions leave a generation, and its range; which options reach the controller; signals; last words
on the console.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from ckptd.base.net.address import parse_address
from ckptd.base.net.signing import SECRET_VARIABLE, need_secret
from ckptd.cli.help import Rare
from ckptd.cli.output import Document, Json, json_text
from ckptd.errors import UsageError
from ckptd.parts import part

if TYPE_CHECKING:
    from ckptd.elastic.cli.beside import Watch, WatchSide
    from ckptd.elastic.launchers.node import LauncherEnding, NodeLauncher
    from ckptd.elastic.launchers.sidecars import ControllerSupervisor
    from ckptd.elastic.launchers.workerpool import Program

_PREFIX = "run-"
_MOST_INTERRUPT_S = 3600.0
_KILL_S = 2.0
"""From the kill of a session until its node says that it is dead."""
_ELSEWHERE = "192.0.2.1"
"""No host's address; what is sent there takes the usual way out."""
SWITCHES = frozenset(
    {
        "--standalone",
        "--module",
        "-m",
        "--no-python",
        "--run-path",
        "--no-watch",
        "--json",
        "--help",
        "--help-all",
        "-h",
        "--version",
    }
)
"""Options without a value: what follows any other is its value."""
_FROM_ENVIRONMENT = (
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "standalone",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "role",
    "module",
    "no-python",
    "run-path",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
)
"""torchrun takes these from variables ``PET_...`` as well."""
_TRUE = ("1", "true", "yes")
_TORCHRUN = Rare("Less used options of torchrun")
_WITHOUT_EFFECT = Rare("Options of torchrun without effect, accepted so that its command lines run")
_RECOVERY = Rare("Layouts, watching, recovery")
_also, _void, _deep = (
    partial(Parameter, group=group) for group in (_TORCHRUN, _WITHOUT_EFFECT, _RECOVERY)
)
_DEVICE = re.compile(r"\d+$|(GPU|MIG)-")


class RunDocument(Document, frozen=True, kw_only=True, tag="run"):
    """The document that ``ckptd run --json`` prints to standard error at its end.

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """Options of torchrun, with the same meaning."""

    nnodes: Annotated[str, Parameter(help="Number of nodes: N or MIN:MAX.")] = "1"
    nproc_per_node: Annotated[
        str, Parameter(help="Ranks on this node: a number, auto, cpu or gpu.")
    ] = "1"
    rdzv_endpoint: Annotated[
        str, Parameter(help="HOST:PORT of the controller, the same on all nodes.")
    ] = ""
    rdzv_id: Annotated[str, _also(help="Name of the job, unless --job is given.")] = "none"
    rdzv_backend: Annotated[str, _void()] = "ckptd"
    rdzv_conf: Annotated[str, _void()] = ""
    node_rank: Annotated[int, _void(help="The controller numbers nodes.")] = 0
    master_addr: Annotated[str, _also(help="With --master-port: the endpoint.")] = "127.0.0.1"
    master_port: Annotated[int | None, _also(help="See --master-addr.")] = None
    local_addr: Annotated[
        str, _also(help="Address under which other nodes reach this one; detected by default.")
    ] = ""
    standalone: Annotated[bool, _also(help="Run on one node; overrides the other options.")] = False
    max_restarts: Annotated[
        int | None, Parameter(help="Faults after which the job fails; unlimited by default.")
    ] = None
    monitor_interval: Annotated[float, _void()] = 0.1
    start_method: Annotated[str, _void()] = "spawn"
    role: Annotated[str, _also(help="Value of ROLE_NAME for workers.")] = "default"
    module: Annotated[
        bool,
        Parameter(
            name=("--module", "-m"), help="The script is the name of a module.", show_default=False
        ),
    ] = False
    no_python: Annotated[bool, _also(help="The script is a command.")] = False
    run_path: Annotated[bool, _void(help="Scripts always run that way.")] = False
    log_dir: Annotated[
        Path | None, Parameter(help="Folder for the output files of workers.", show_default=False)
    ] = None
    redirects: Annotated[
        str, _also(name=("--redirects", "-r"), help="1 out, 2 err, 3 both to files; RANK:BITS,...")
    ] = "0"
    tee: Annotated[
        str, _also(name=("--tee", "-t"), help="As --redirects, and to the console as well.")
    ] = "0"
    local_ranks_filter: Annotated[
        str, _also(help="Local ranks that may write to the console, such as 0,1.")
    ] = ""
    signals_to_handle: Annotated[str, _void()] = ""
    shutdown_timeout: Annotated[
        int,
        _also(
            name=("--shutdown-timeout", "--grace"),
            help="Seconds between SIGTERM (or SIGINT) and SIGKILL for workers.",
        ),
    ] = 30


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options that torchrun lacks: names, layouts, the log, the watch, the controller."""

    job: Annotated[
        str | None,
        Parameter(help="Name of the job, the same on all nodes; CKPTD_JOB.", show_default=False),
    ] = None
    node: Annotated[
        str | None,
        Parameter(help="Unique name of this node; by default CKPTD_NODE, or the host name."),
    ] = None
    layout: Annotated[
        str | None, Parameter(help="pp=P,dp=D,tp=T at full size; all data-parallel by default.")
    ] = None
    pp: Annotated[str, _deep(help="Other pipeline sizes that the layers allow: 1,2.")] = ""
    tp: Annotated[str, _deep(help="Other tensor-parallel sizes that are allowed: 1,2.")] = ""
    microbatches: Annotated[
        int | None, _deep(help="Micro-batches of a step on all ranks together.")
    ] = None
    memory: Annotated[
        str | None, _deep(help="limit=B,replicated=B,sharded=B,activations=B in bytes.")
    ] = None
    log: Annotated[
        str | None,
        Parameter(help="Membership log that all nodes reach: a path, s3://..., etcd://..."),
    ] = None
    no_watch: Annotated[bool, _deep(help="Run without daemon and watcher.")] = False
    daemon: Annotated[
        str | None, _deep(help="Report to the daemon at this URL, instead of starting one.")
    ] = None
    port: Annotated[int, _deep(help="Port of the daemon; 0 picks a free one.")] = 0
    policy: Annotated[
        tuple[str, ...],
        _deep(help="CLASS=ACTION: action on incidents of a class; see ckptd serve."),
    ] = ()
    floor: Annotated[
        tuple[str, ...], _deep(help="PHASE=SECONDS: least time-out of a phase, such as train=30.")
    ] = ()
    level: Annotated[
        int | None,
        _deep(help="Highest level of recovery: 1 restarts workers, 2 launchers, 3 the job."),
    ] = None
    no_restart_on: Annotated[
        str,
        _deep(
            help="Exit codes that end the job: 2,64-78. By default also 'repeat': a code that"
            " comes twice from the same rank before the first step; 'none' turns all of it off."
        ),
    ] = "repeat"
    interrupt: Annotated[
        float | None,
        _deep(
            help="Seconds that ckptd.elastic.session has to leave a generation before its"
            " process is killed; by default 1, or 8 on a machine with accelerators."
        ),
    ] = None
    setting: Annotated[
        tuple[str, ...],
        _deep(name="--set", help="NAME=VALUE: a deadline or limit of the controller."),
    ] = ()


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the command line that several functions use."""

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
    interrupt_s: float
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
        raise UsageError("no script given", wanted="ckptd run [OPTION]... SCRIPT [ARGUMENT]...")
    torchrun, own = torchrun or TorchrunOptions(), own or JobOptions()
    if torchrun.module and torchrun.no_python:
        raise UsageError("-m and --no-python cannot be combined", found="-m --no-python")
    options = _options(command, torchrun, own, json)
    if own.floor:
        _beside().check_floors(own.floor)
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


# --- the words of the command line ---------------------------------------------------------------


def separated(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return arguments with ``--`` before the script: all behind it is the script's.

    Underscores in names become hyphens, and torchrun's variables are added where their option is
    not given.
    """
    own, rest = _split(arguments)
    given = {word.partition("=")[0] for word in own}
    short = {"module": "-m", "redirects": "-r", "tee": "-t"}
    for name in _FROM_ENVIRONMENT:
        value = environ.get(f"PET_{name.replace('-', '_').upper()}")
        if value is None or f"--{name}" in given or short.get(name) in given:
            continue
        if f"--{name}" not in SWITCHES:
            own.append(f"--{name}={value}")
        elif value.lower() in _TRUE:
            own.append(f"--{name}")
    return [*own, "--", *rest]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    own: list[str] = []
    words = list(arguments)
    while words:
        if words[0] == "--":
            return own, words[1:]
        if not words[0].startswith("-") or words[0] == "-":
            break
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        own.append(name + equals + value)
        if not equals and name not in SWITCHES and words and not _holds_value(name):
            own.append(words.pop(0))
    return own, words


def _holds_value(name: str) -> bool:
    """Whether a short option has its value in the same word, such as ``-r3``."""
    return not name.startswith("--") and len(name) > 2


def slots_of(text: str) -> int:
    """Return what ``--nproc-per-node`` says: a number, or auto, cpu, gpu.

    Raises
    ------
    UsageError
        A duration, size or rule on the command line cannot be read, or a plugin is called in a way
        that it does not serve.
    """
    found = 0
    if text.isascii() and text.isdecimal():
        found = int(text)
    elif text == "cpu":
        found = cpu_count()
    elif text == "gpu":
        found = gpu_count()
    elif text == "auto":
        found = gpu_count() or cpu_count()
    if found < 1:
        raise UsageError(
            "invalid --nproc-per-node",
            where="--nproc-per-node",
            wanted="a number from 1 up, auto, cpu, or gpu on a machine with one",
            found=text[:100],
        )
    return found


def cpu_count() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """Return the GPUs that ranks would see, without asking a driver."""
    from ckptd.base.runtime.accelerators import gpus_here

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None:
        # What is no device hides all behind it: "-1", or Slurm's "NoDevFiles".
        words = (word.strip() for word in visible.split(","))
        return len(list(itertools.takewhile(_DEVICE.match, words)))
    return gpus_here()


def ranks_filter(text: str) -> frozenset[int]:
    """Return the local ranks that ``--local-ranks-filter`` names.

    Raises
    ------
    UsageError
        A duration, size or rule on the command line cannot be read, or a plugin is called in a way
        that it does not serve.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UsageError(
            "invalid --local-ranks-filter",
            where="--local-ranks-filter",
            wanted="numbers with commas between them",
            found=text[:100],
        )
    return frozenset(int(word) for word in words)


# --- what the flags say ---------------------------------------------------------------------------


def _options(
    command: tuple[str, ...], torchrun: TorchrunOptions, own: JobOptions, json: bool
) -> _Options:
    from ckptd.elastic.launchers.nodename import claim_name

    port, alone = torchrun.master_port, torchrun.standalone
    endpoint = torchrun.rdzv_endpoint or (f"{torchrun.master_addr}:{port}" if port else "")
    low, high = _range("1" if alone else torchrun.nnodes)
    if high == 1 and endpoint.endswith(":0"):  # torchrun's way of asking for any free port
        endpoint = ""
    if high > 1 and not endpoint and own.log is None:
        raise UsageError(
            "several nodes need an endpoint to find each other",
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
        node=given or claim_name(name, socket.gethostname())[0],
        run_id=run_id,
        endpoint="" if alone else endpoint,
        log=own.log,
        local_addr=torchrun.local_addr,
        role=torchrun.role,
        max_restarts=torchrun.max_restarts,
        interrupt_s=_interrupt_s(own.interrupt),
        json=json,
    )


def _interrupt_s(given: float | None) -> float:
    """Return the time that sessions have to leave a generation.

    Raises
    ------
    UsageError
        A duration, size or rule on the command line cannot be read, or a plugin is called in a way
        that it does not serve.
    """
    from ckptd.base.runtime.accelerators import accelerators_here
    from ckptd.elastic.messages import DEVICE_INTERRUPT_S, INTERRUPT_S

    if given is None:
        return DEVICE_INTERRUPT_S if gpu_count() or accelerators_here() else INTERRUPT_S
    if not 0.0 < given <= _MOST_INTERRUPT_S:
        raise UsageError(
            "--interrupt out of range",
            where="--interrupt",
            wanted=f"more than 0 seconds, {_MOST_INTERRUPT_S:.0f} at most",
            found=f"{given:g}",
        )
    return given


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    with suppress(ValueError):
        least, most = int(low), int(high if colon else low)
        if 1 <= least <= most:
            return least, most
    raise UsageError(
        "invalid --nnodes",
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


def controller_settings(
    given: tuple[str, ...],
    *,
    level: int | None = None,
    max_restarts: int | None = None,
    no_restart_on: str = "repeat",
    interrupt_s: float | None = None,
) -> tuple[str, ...]:
    """Return what a controller is to be given by ``--set`` for options of ``ckptd run``.

    Parameters
    ----------
    given
        Of ``--set`` itself, which counts before the others.
    interrupt_s
        Seconds that sessions have to leave a generation; None where each launcher decides. A
        controller has every process killed that is not out within its ``fence_s``.

    Raises
    ------
    UsageError
        Of `no_restart_on`.
    """
    from ckptd.elastic.control.states import ControllerSettings, ExitCodes

    ExitCodes(no_restart_on)
    names = {text.partition("=")[0] for text in given}
    more: dict[str, int | str | None] = {"levels": level, "max_restarts": max_restarts}
    if no_restart_on != ControllerSettings.no_restart_on:
        more["no_restart_on"] = no_restart_on
    if interrupt_s is not None and interrupt_s + _KILL_S > ControllerSettings.fence_s:
        more["fence_s"] = f"{interrupt_s + _KILL_S:g}"
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
    settings = controller_settings(
        own.setting,
        level=own.level,
        max_restarts=options.max_restarts,
        no_restart_on=own.no_restart_on,
        interrupt_s=options.interrupt_s,
    )
    for text in settings:
        out += ["--set", text]
    return out


def _need_torch() -> None:
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
        self._supervisor: ControllerSupervisor | None = None
        self._watch: WatchSide | None = None
        self._pending: list[signal.Signals] = []

    def say(self, text: str) -> None:
        if not self._o.json:
            _print(f"ckptd: {text}")

    def run(self, mode: str, files: tuple[Path | None, str, str, str], grace_s: float) -> int:
        """Launch; return the exit code."""
        from ckptd.base.runtime.agentlink import run_folder
        from ckptd.elastic.launchers.sidecars import old_folders

        _need_torch()
        if self._o.endpoint:
            host, what = parse_address(self._o.endpoint)[0], "the controller and the daemon"
            need_secret(host, what, self._env, where=self._o.endpoint)
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
    ) -> LauncherEnding:
        from ckptd.base.net.certificates import given_files
        from ckptd.base.net.signing import checked_secret, job_secret
        from ckptd.base.net.tls import hand, identity_at
        from ckptd.base.runtime.agentlink import run_folder
        from ckptd.elastic.dial import PURPOSE
        from ckptd.elastic.launchers.node import NodeLauncher, NodeSettings
        from ckptd.elastic.launchers.output import Output, parse_streams

        o = self._o
        given = os.fsencode(self._env.get(SECRET_VARIABLE, ""))
        checked = checked_secret(given, SECRET_VARIABLE) if given else None
        secret = checked or job_secret(o.job, run_folder())
        if given_files():  # what is wrong with them is an error now
            identity_at(PURPOSE, secret, "agent", o.node, o.job).context(server=False)
        self._supervisor = self._make_supervisor(folder)
        program = self._program(mode, folder)
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
                job=o.job,
                node=o.node,
                slots=o.slots,
                address=o.local_addr,
                interrupt_s=o.interrupt_s,
                grace_s=grace_s,
            ),
            program,
            output,
            folder,
            self._supervisor.addresses,
            secret,
            self.say,
            self._turn,
            self._supervisor.still,
            self._daemon_at,
            partial(hand, self._env.get(SECRET_VARIABLE), o.node),
        )
        for number in self._pending:
            launcher.leave(number)
        return launcher.run()

    def _make_supervisor(self, folder: Path) -> ControllerSupervisor:
        from ckptd.base.net.address import is_here, loopback_of, parse_address
        from ckptd.base.runtime.host import address_towards, loopback
        from ckptd.elastic.launchers.sidecars import ControllerSupervisor
        from ckptd.elastic.places import open_places

        o = self._o
        host = parse_address(o.endpoint)[0] if o.endpoint else loopback()
        own = o.log is not None or is_here(host)
        places = open_places(o.job, o.log) if own else None
        address = o.local_addr or address_towards(host)
        if o.high > 1 and (here := loopback_of(host)):
            self.say(
                f"{host} is {here} on this machine, which other nodes cannot reach. For a job of "
                f"several nodes give this machine's address: --rdzv-endpoint "
                f"{address_towards(_ELSEWHERE)}:PORT"
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
            self._watch = _beside().start(
                o.job, self._daemon, watched, watcher, self._env, folder, self.say
            )
        return ControllerSupervisor(
            places,
            o.endpoint,
            address,
            self._controller,
            self._env,
            folder,
            self.say,
            o.node if o.high > 1 else "",
            greet=self._greet,
        )

    def _own_address(self) -> str:
        """Return where a controller listens that other nodes find by the log alone."""
        from ckptd.base.net.address import is_loopback
        from ckptd.base.runtime.host import address_towards, loopback

        if self._o.high == 1:
            return loopback()
        if self._o.local_addr or os.environ.get(SECRET_VARIABLE):
            found = self._o.local_addr or address_towards(_ELSEWHERE)
            if is_loopback(found):
                self.say(f"no other machine reaches {found}: give this one's address, --local-addr")
            return found
        self.say(f"without {SECRET_VARIABLE}, only launchers on this machine find this one")
        return loopback()

    def _program(self, mode: str, folder: Path) -> Program:
        from ckptd.elastic.launchers.environ import JobFacts, common

        o = self._o
        facts = JobFacts(
            job=o.job,
            node=o.node,
            run_id=o.run_id if o.run_id != "none" else o.job,
            role=o.role,
            max_restarts=o.max_restarts or 0,
            launcher=folder / "launcher.sock",
            lease=folder / "lease",
            interrupt_s=o.interrupt_s,
        )
        base: Mapping[str, str] = {**os.environ, **self._recording(folder)}
        if "OMP_NUM_THREADS" not in base and o.slots > 1:
            self.say("OMP_NUM_THREADS=1 for each rank, unless you set it")
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        environ = common(base, facts, o.slots)
        argv = o.command
        if mode != "exec" and python != sys.executable:
            argv = (python, "-u", *(["-m"] if mode == "module" else []), *argv)
            mode = "exec"
        plain = mode == "exec" or os.environ.get("CKPTD_ZYGOTE") == "0"
        from ckptd.elastic.launchers.workerpool import programs

        return programs({"mode": mode, "argv": argv, "environ": environ, "plain": plain})

    def _recording(self, folder: Path) -> dict[str, str]:
        """Return the variables with which ranks record themselves."""
        if self._watched is None:
            return {}
        (folder / "rings").mkdir(mode=0o700)
        try:
            more = _beside().environment(folder / "injection", os.environ)
        except OSError as error:
            self.say(f"ranks cannot be watched: {error}")
            self._watch = None
            return {}
        return {**more, "CKPTD_RINGS": str(folder / "rings")}

    def _turn(self, silent_s: float, order: int) -> bool:
        if self._supervisor is None:
            return False
        listens = self._supervisor.turn(silent_s, order)
        if self._watch is not None:
            self._watch.turn(self._supervisor)
        return listens

    def _greet(self, address: str, timeout_s: float) -> None:
        if self._launcher is not None:  # it is there when the supervisor looks
            self._launcher.greet(address, timeout_s)

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
        if self._supervisor is not None:
            self._supervisor.end(0.0)
        shutil.rmtree(folder, ignore_errors=True)
        if not self._o.named:
            self._remove_leavings()

    def _remove_leavings(self) -> None:
        """Remove the files of a job whose name will not be used again."""
        from ckptd.base.net.signing import secret_path
        from ckptd.base.runtime.agentlink import run_folder
        from ckptd.elastic.launchers.nodename import name_lock
        from ckptd.elastic.places import own_log

        secret_path(self._o.job, run_folder()).unlink(missing_ok=True)
        if self._o.log is None:
            shutil.rmtree(own_log(self._o.job), ignore_errors=True)
        if self._watched is not None:
            _beside().forget(self._o.job)
        name_lock(self._o.job, self._o.node).unlink(missing_ok=True)

    def _last_words(self, ending: LauncherEnding) -> int:
        from ckptd.elastic.launchers.sidecars import shell_code

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


def _beside() -> Watch:
    watch: Watch = part("watch")
    return watch


def _print(text: str) -> None:
    """Print for people; a reader that is gone is no reason to end a job."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _signals() -> list[signal.Signals]:
    """Return those that end the launcher: not the one that ``nohup`` has it ignore."""
    from ckptd.elastic.launchers.sidecars import SIGNALS

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]
