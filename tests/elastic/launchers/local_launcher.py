"""`LocalLauncher`: launchers as processes of this machine, each taken for a node of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ckptd.elastic.launchers.base import Command, Hint, Launcher, Machine, MachineState
from ckptd.errors import DeadlineError, NotFoundError, StoreError, UsageError

_POLL_S = 0.01


class LocalLauncher(Launcher):
    """Starts launchers here, for a job on one machine.

    Parameters
    ----------
    nodes
        Names of the nodes.
    command
        Makes a launcher's command line from a node's name.
    spares
        Names that `replace` may give.
    environ
        Added to this process's environment.
    logs
        Folder for what launchers print, a file a node, appended to; None: this process's output.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        command: Command,
        *,
        spares: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        self._states = dict.fromkeys(nodes, MachineState.UP)
        self._reasons: dict[str, str] = {}
        self._command, self._spares = command, list(spares)
        self._environ = {**os.environ, **(environ or {})}
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._hints: list[Hint] = []

    def pid(self, node: str) -> int | None:
        """Return the process of a node's launcher; None where none runs."""
        process = self._processes.get(node)
        return process.pid if process is not None and process.poll() is None else None

    def drain(self, node: str, seconds: float, reason: str) -> None:
        """Mark a node as one that will be taken away in `seconds`: `hints` reports it."""
        self._known([node])
        self._states[node], self._reasons[node] = MachineState.DRAINING, reason
        self._hints.append(Hint(node=node, seconds=seconds, reason=reason))

    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self._known(nodes)
        for node in nodes:
            if self.pid(node) is None:
                if time.monotonic() >= end:
                    raise _late(f"start {node}", timeout_s)
                self._processes[node] = self._spawn(node)

    def stop(self, nodes: Sequence[str] | None, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        names = list(self._states) if nodes is None else list(nodes)
        self._known(names)
        for node in names:
            process = self._processes.get(node)
            if process is not None:
                _kill_tree(process, end, timeout_s)
                del self._processes[node]

    def machines(self, timeout_s: float) -> tuple[Machine, ...]:
        return tuple(
            Machine(
                name=node,
                state=state,
                running=self.pid(node) is not None,
                reason=self._reasons.get(node, ""),
                code=self._code(node),
            )
            for node, state in sorted(self._states.items())
        )

    def replace(self, node: str, timeout_s: float) -> str:
        self._known([node])
        if not self._spares:
            raise NotFoundError("no spare node is left", kind="no-spare", where=node)
        self.stop([node], timeout_s)
        new = self._spares.pop(0)
        del self._states[node]
        self._reasons.pop(node, None)
        self._states[new] = MachineState.UP
        return new

    def hints(self, timeout_s: float) -> tuple[Hint, ...]:
        told, self._hints = tuple(self._hints), []
        return told

    def close(self) -> None:
        self.stop(None, 30.0)

    def _code(self, node: str) -> int | None:
        process = self._processes.get(node)
        return process.poll() if process is not None else None

    def _known(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            if node not in self._states:
                raise UsageError(
                    "unknown node of this job",
                    kind="unknown-node",
                    where=node,
                    wanted=", ".join(sorted(self._states)[:20]),
                )

    def _spawn(self, node: str) -> subprocess.Popen[bytes]:
        argv = list(self._command(node))
        log = self._logs / f"{node}.log" if self._logs is not None else None
        try:
            with open(log or os.devnull, "ab") as file:
                return subprocess.Popen(
                    argv,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file if log else None,
                    stderr=file if log else None,
                    start_new_session=True,
                )
        except OSError as error:
            raise StoreError("a launcher could not be started", where=node, found=error) from error


def _kill_tree(process: subprocess.Popen[bytes], end: float, timeout_s: float) -> None:
    """Kill a launcher and what it has started, which has sessions of its own."""
    left: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        left.add(root)
        # A stopped parent starts nothing while its children are counted.
        root.suspend()
        left.update(root.children(recursive=True))
    for one in left:
        with suppress(psutil.NoSuchProcess):
            left = left | set(one.children(recursive=True))
            one.kill()
    process.kill()
    while any(_lives(one) for one in left):
        if time.monotonic() >= end:
            raise _late(f"kill {process.pid}", timeout_s)
        process.poll()
        time.sleep(_POLL_S)
    process.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _late(what: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(
        "launchers were not started or stopped in time",
        where=what,
        wanted=f"within {timeout_s:g} s",
    )
