"""The processes of the demo: verbs of ckptd, a run of the training job, nodes of an elastic job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import psutil

from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, DeadlineError
from ckptd_demo.spec import ProcessRow, RunSpec

__all__ = [
    "Life",
    "Nodes",
    "environment",
    "free_port",
    "read_rows",
    "run_ckptd",
    "started",
    "wait_until",
]

_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"


def run_ckptd(
    arguments: list[str],
    deadline_s: float,
    fine: tuple[int, ...] = (0,),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, as a user would, with `env` besides its own.

    Raises
    ------
    CkptdError
        It ended with an exit code that is not in `fine`, or printed nothing.
    DeadlineError
        It took longer than `deadline_s` seconds.
    """
    command = [sys.executable, "-c", _CLI, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=deadline_s,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"ckptd {arguments[0]} did not end", wanted=f"{deadline_s:g} s"
        ) from None
    if done.returncode not in fine or not done.stdout:
        raise CkptdError(
            f"ckptd {arguments[0]} failed",
            where=" ".join(arguments[1:3]),
            found=done.stderr.decode(errors="replace"),
        )
    return done


R = TypeVar("R", bound=msgspec.Struct)

_POLL_S = 0.02
_TERM_WAIT_S = 5.0
_TAIL_LINES = 25


class Life:
    """A started run. `started` makes one and ends every process of it."""

    def __init__(self, name: str, spec: RunSpec) -> None:
        self.name = name
        self.spec = spec
        self.begun = time.monotonic()
        self._ended: float | None = None
        spec.files.logs.mkdir(parents=True)
        spec.files.spec.write_bytes(msgspec.json.encode(spec))
        with (spec.files.logs / "torchrun.log").open("wb") as log:
            self.process = psutil.Popen(
                _command(spec),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                # An interrupt from the terminal reaches the demo alone, which then ends this.
                start_new_session=True,
            )
        self._known: dict[int, psutil.Process] = {}

    def workers(self) -> dict[int, psutil.Process]:
        """Return the processes that write for the ranks, by rank, as far as they live."""
        found = {}
        for row in read_rows(self.spec.files.processes, ProcessRow):
            process = None if row.writer_pid is None else self._identify(row.writer_pid)
            if process is not None:
                found[row.rank] = process
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the rank processes that reported, as far as they live."""
        rows = read_rows(self.spec.files.processes, ProcessRow)
        found = {row.rank: self._identify(row.pid) for row in rows}
        return {rank: process for rank, process in found.items() if process is not None}

    @property
    def seconds(self) -> float:
        """From the start of the processes to their end, or to now."""
        return (self._ended or time.monotonic()) - self.begun

    @property
    def trained_seconds(self) -> float:
        """From the start of the processes to the last step; tells of a run that ended unwatched."""
        steps = self.spec.files.steps
        return steps.stat().st_mtime - self.process.create_time() if steps.exists() else 0.0

    def _identify(self, pid: int) -> psutil.Process | None:
        """Return the process if it is one of this life, not a later one under its number."""
        if pid not in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() >= self.process.create_time():
                    self._known[pid] = process
        process = self._known.get(pid)
        return process if process is not None and _lives(process) else None

    def wait(self, deadline_s: float) -> int:
        """Return torchrun's exit code.

        Raises
        ------
        DeadlineError
            It still runs after `deadline_s` seconds.
        """
        try:
            code: int = self.process.wait(timeout=deadline_s)
        except psutil.TimeoutExpired:
            raise self.failed(
                DeadlineError(f"{self.name} did not end in time", wanted=f"{deadline_s:g} s")
            ) from None
        self._ended = self._ended or time.monotonic()
        return code

    def finish(self, deadline_s: float) -> None:
        """Wait for the planned end; anything else is an error that shows the logs."""
        code = self.wait(deadline_s)
        if code != 0:
            raise self.failed(CkptdError(f"{self.name} failed", wanted="exit code 0", found=code))

    def failed(self, error: CkptdError) -> CkptdError:
        """Return `error` with the end of the logs and where they are."""
        error.add_note(f"logs: {self.spec.files.logs}")
        for path in sorted(self.spec.files.logs.rglob("*")):
            if path.is_file() and (text := path.read_text(errors="replace").strip()):
                tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
                error.add_note(f"--- {path.relative_to(self.spec.files.logs)}\n{tail}")
        return error

    def end(self) -> None:
        """End what still runs of this life; does nothing after a planned end."""
        running: list[psutil.Process] = []
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                running = self.process.children(recursive=True)
            with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
                self.process.terminate()
                self.process.wait(timeout=_TERM_WAIT_S)
            running.append(self.process)
        running += [*self.ranks().values(), *self.workers().values()]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=_TERM_WAIT_S)


@contextlib.contextmanager
def started(name: str, spec: RunSpec) -> Iterator[Life]:
    """Start a life of the job; on leaving, none of its processes is left."""
    life = Life(name, spec)
    try:
        yield life
    finally:
        life.end()


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """Return the lines of a report as far as they are whole; none when there is no file yet."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = raw[: raw.rfind(b"\n") + 1]
    return [json_decoder(kind).decode(line) for line in whole.splitlines()]


T = TypeVar("T")


def wait_until(look: Callable[[], T | None], deadline_s: float) -> T | None:
    """Return what `look` finds, polling; None when it found nothing in `deadline_s` seconds."""
    deadline = time.monotonic() + deadline_s
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(spec: RunSpec) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={spec.cut.ranks}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={spec.files.logs}",
        "--redirects=3",
        "--module",
        "ckptd_demo.trainer",
        str(spec.files.spec),
    ]


def environment() -> dict[str, str]:
    """Return the environment of ranks of this machine."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if sys.platform == "linux":
        # Host names need not resolve, and a firewall need not let the machine talk to itself by
        # any other address.
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


_END_S = 20.0


def free_port() -> int:
    """Return a port of loopback that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Nodes:
    """Starts and ends launchers; on leaving the block, all of them with what they started.

    Parameters
    ----------
    folder
        Output of each goes to ``NAME.log`` in it.
    flags
        Of ``ckptd run``, for all that are started from then on.
    command
        The script and its arguments.
    env
        Variables besides those of this process.

    Attributes
    ----------
    cli
        Python that runs the command line, for launchers started from then on.
    under
        Words before the command of a node's launcher, by name: what puts it on a machine.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self.flags = list(flags)
        self._command = list(command)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._seen: list[psutil.Process] = []
        self._beside: list[psutil.Popen] = []
        self.processes: dict[str, psutil.Popen] = {}
        self.cli = _CLI
        self.under: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self, name: str) -> None:
        """Start a launcher under a name, again if it was there before."""
        with self.log(name).open("ab") as log:
            self.processes[name] = psutil.Popen(
                [
                    *self.under.get(name, ()),
                    sys.executable,
                    "-c",
                    self.cli,
                    "run",
                    *self.flags,
                    "--node",
                    name,
                    *self._command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def beside(self, *words: Sequence[str]) -> None:
        """Start a verb of ckptd that serves the nodes; its output goes to ``VERB.log``."""
        command = [word for some in words for word in some]
        with self.log(command[0]).open("wb") as log:
            self._beside.append(
                psutil.Popen(
                    [sys.executable, "-c", _CLI, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.DEVNULL,
                    env=self._env,
                    start_new_session=True,
                )
            )

    def log(self, name: str) -> Path:
        """Return the file with what a node's launcher and ranks have said."""
        return self._folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill a node: its launcher, by SIGKILL, and with it all that it started."""
        self.look()
        self.processes[name].kill()
        self.processes[name].wait(_END_S)

    def alive(self) -> list[str]:
        """Return the names of nodes whose launcher runs."""
        return [name for name, process in self.processes.items() if process.poll() is None]

    def codes(self) -> dict[str, int | None]:
        """Return exit codes; None while one runs."""
        return {name: process.poll() for name, process in self.processes.items()}

    def wait(self, deadline_s: float) -> bool:
        """Return whether all launchers ended in time."""
        end = time.monotonic() + deadline_s
        while self.alive() and time.monotonic() < end:
            self.look()
            time.sleep(0.05)
        return not self.alive()

    def look(self) -> None:
        """Note what the launchers have started, so that nothing of it stays."""
        known = set(self._seen)
        for process in list(self.processes.values()):
            try:
                new = [p for p in process.children(recursive=True) if p not in known]
            except psutil.NoSuchProcess:
                continue
            self._seen += new

    def end(self) -> None:
        """End all launchers, and whatever they started."""
        self.look()
        mine = [*self.processes.values(), *self._beside]
        for process in mine:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        _, there = psutil.wait_procs(mine, timeout=_END_S)
        for process in there:
            process.kill()
        # The number of one that is gone may be another process's, or a thread's, by now.
        _, left = psutil.wait_procs([p for p in self._seen if p.is_running()], timeout=2.0)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([*there, *left], timeout=_END_S)
