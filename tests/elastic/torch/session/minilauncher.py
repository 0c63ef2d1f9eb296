"""A launcher of several nodes on this machine, with a worker each, ordered by a test.

What a controller and the launchers of nodes do for a job, without deciding anything: a test says
who dies and who goes on.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from ckptd.elastic.lease import LeaseFile
from ckptd.elastic.messages import (
    Attach,
    Broken,
    Done,
    FenceNow,
    FromWorker,
    Go,
    Loaded,
    Out,
    Progress,
    Welcome,
)
from ckptd.elastic.workerend import LauncherEnd, WorkerEnd
from tests.processes import PATIENCE_S, agents_in, until
from tests.programs import zygote


class Forked:
    """A script in a process forked from one that has torch; it is asked as `subprocess.Popen` is.

    To import torch costs more than all that most scripts do.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self.args = command
        made: Any = zygote()
        self._process = made.Process(target=_run, args=(command[1:], dict(environ), str(output)))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its server has not told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(argv: Sequence[str], environ: Mapping[str, str], output: str) -> None:
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [*argv]
    runpy.run_path(argv[0], run_name="__main__")


class MiniNode:
    """One node with one worker."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.heard: queue.Queue[tuple[float, FromWorker | None]] = queue.Queue()
        self.log: list[tuple[float, FromWorker | None]] = []
        self.end: WorkerEnd | None = None
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.output = folder / f"{name}.out"
        self.lease = LeaseFile(folder / f"{name}.lease")
        self.lease.extend(time.monotonic() + 3600.0)
        self.launcher = LauncherEnd(folder / f"{name}.s", self._hear)

    def _hear(self, worker: WorkerEnd, message: FromWorker | None) -> None:
        if isinstance(message, Attach):
            self.end = worker
            worker.send(Welcome(message.generation, 2.0, 3600.0))
        self.log.append((time.monotonic(), message))
        self.heard.put((time.monotonic(), message))

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], *, forked: bool = False
    ) -> None:
        if forked:
            self.process = Forked(command, {**os.environ, **environ}, self.output)
            return
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=out, stderr=out
            )

    def until(self, kind: type[FromWorker], generation: int) -> tuple[float, Any]:
        """Return the first message of a kind of a generation, also one that came already."""
        end = time.monotonic() + PATIENCE_S
        seen = 0
        while time.monotonic() < end:
            log = list(self.log)
            for at, message in log[seen:]:
                if isinstance(message, kind) and message.generation == generation:
                    return at, message
            seen = len(log)
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended: {self.output.read_text()[-3000:]}")
            time.sleep(0.002)
        if self.process is not None:
            self.process.send_signal(signal.SIGABRT)  # it writes the stacks of its threads
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
        raise AssertionError(
            f"{self.name} did not say {kind.__name__}: {self.log[-8:]}"
            f" {self.output.read_text()[-12000:]}"
        )

    def committed(self, generation: int, step: int) -> float:
        """Wait until a step, or a later one, is committed; return when that was."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for at, message in list(self.log):
                if (
                    isinstance(message, Progress)
                    and message.generation == generation
                    and message.step >= step
                ):
                    return at
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended: {self.output.read_text()[-3000:]}")
            time.sleep(0.002)
        raise AssertionError(f"no step {step}: {self.log[-8:]} {self.output.read_text()[-3000:]}")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait(PATIENCE_S)
        self.launcher.close()
        self.lease.close()


class MiniJob:
    """Nodes, and the store of the generation."""

    forks = False
    """Whether workers are forks of a process that has torch."""

    def __init__(self, folder: Path, script: Path, args: Sequence[str], **environ: str) -> None:
        self.folder = folder
        self.command = [sys.executable, str(script), *args]
        self.environ = environ
        self.nodes: dict[str, MiniNode] = {}
        self.generation = 0
        self.members: list[str] = []
        self._store: TCPStore | None = None

    def begin(self, *members: str, shape: tuple[int, int, int] | None = None) -> None:
        """Begin the next generation with these nodes, by rank; starts who does not run."""
        self.generation += 1
        self.members = list(members)
        shape = shape or (1, len(members), 1)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, name in enumerate(members):
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = MiniNode(name, self.folder)
            environ = self._environ(name, rank, shape)
            if node.process is not None and node.process.poll() is None:
                assert node.end is not None
                assert node.end.send(Go(self.generation, environ))
            else:
                node.start(self.command, {**self.environ, **environ}, forked=self.forks)

    def _environ(self, name: str, rank: int, shape: tuple[int, int, int]) -> dict[str, str]:
        assert self._store is not None
        _, dp, tp = shape
        place = rank // (dp * tp), rank // tp % dp, rank % tp
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.members)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "mini",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "CKPTD_NODE": name,
            "CKPTD_INTERRUPT_S": self.environ.get("CKPTD_INTERRUPT_S", "1"),
            "CKPTD_GENERATION": str(self.generation),
            "CKPTD_SHAPE": ",".join(map(str, shape)),
            "CKPTD_PLACE": ",".join(map(str, place)),
            "CKPTD_LAUNCHER": str(self.nodes[name].launcher.path),
            "CKPTD_LEASE": str(self.nodes[name].lease.path),
        }

    def kill(self, name: str) -> float:
        """Kill a worker, and what its node's memory holds with it; return when."""
        node = self.nodes.pop(name)
        assert node.process is not None
        at = time.monotonic()
        node.process.kill()
        for pid in agents_in(Path(os.environ["CKPTD_RUN_DIR"])):
            with suppress(FileNotFoundError, ProcessLookupError):
                if f"\0{name}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        node.close()
        self.members.remove(name)
        return at

    def interrupt(self) -> float:
        """Have everybody leave, kill who does not within a second; return when all are out."""
        for name in self.members:
            node = self.nodes[name]
            until(lambda node=node: node.end is not None, name)  # a program may be faster
            assert node.end is not None
            node.end.send(FenceNow(self.generation + 1, 0))
        return max(self.nodes[n].until(Out, self.generation)[0] for n in self.members)

    def loaded(self) -> dict[str, tuple[float, int]]:
        """Wait until all have their state; return when, and of which step, by node."""
        found = {n: self.nodes[n].until(Loaded, self.generation) for n in self.members}
        return {n: (at, message.step) for n, (at, message) in found.items()}

    def broken(self, name: str) -> bool:
        """Whether a worker said of this generation that a call failed."""
        return any(
            isinstance(m, Broken) and m.generation == self.generation
            for _, m in list(self.nodes[name].log)
        )

    def done(self) -> list[str]:
        """Wait until all have ended well; return what each printed."""
        for name in self.members:
            self.nodes[name].until(Done, self.generation)
        found = []
        for name in self.members:
            process = self.nodes[name].process
            assert process is not None
            assert process.wait(PATIENCE_S) == 0, self.nodes[name].output.read_text()[-3000:]
            found.append(self.nodes[name].output.read_text())
        return found

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
