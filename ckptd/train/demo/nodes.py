"""Nodes of a job on this machine: each is a ``ckptd run`` of its own, with its own name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

__all__ = ["Nodes", "free_port"]

_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"
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
        """Let a node be gone: its launcher, by SIGKILL, and with it whatever it started."""
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
        _, left = psutil.wait_procs(self._seen, timeout=2.0)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([*there, *left], timeout=_END_S)
