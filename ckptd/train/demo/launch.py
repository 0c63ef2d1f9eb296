"""A life of the training job as processes: torchrun, its ranks, and the ranks' writers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, DeadlineError
from ckptd.train.demo.spec import ProcessRow, RunSpec

__all__ = ["Life", "read_rows", "started", "wait_until"]

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
                env=_environment(),
                # An interrupt from the terminal reaches the demo alone, which then ends this.
                start_new_session=True,
            )
        self._known: dict[int, psutil.Process] = {}

    def workers(self) -> dict[int, psutil.Process]:
        """Return the processes that write for the ranks, by rank, as far as they live."""
        found = {}
        for row in read_rows(self.spec.files.processes, ProcessRow):
            process = None if row.worker_pid is None else self._identify(row.worker_pid)
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
            raise self.failed(
                CkptdError(f"{self.name} failed", kind="demo-run", wanted="exit code 0", found=code)
            )

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
        "ckptd.train.demo.trainer",
        str(spec.files.spec),
    ]


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if sys.platform == "linux":
        # Host names need not resolve, and a firewall need not let the machine talk to itself by
        # any other address.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
