"""A real controller process, and nodes whose workers are pretended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptd.elastic.link import NodeLink
from ckptd.elastic.messages import (
    Begin,
    Ended,
    Fenced,
    FenceNow,
    Hosting,
    Loaded,
    NodeUp,
    Progress,
    Saved,
    SaveNow,
    Shutdown,
    Status,
    StoreAt,
    ToNode,
)
from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places
from tests.cli.running import COMMAND
from tests.processes import LEASE_S, PATIENCE_S

SECRET = "0123456789abcdef0123456789abcdef"


class ControllerProcess:
    """``ckptd controller`` of one job, which can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        job: str = "j",
        log: str | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.folder, self.job, self.command = folder, job, command
        self.log = log or str(folder / "log")
        self.options = ("--set", f"lease_s={LEASE_S:g}", *options)
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.environ = {**os.environ, "CKPTD_SECRET": SECRET, "CKPTD_RUN_DIR": str(folder / "run")}

    def start(self, *more: str) -> ControllerProcess:
        """Start it and wait until it listens."""
        self.launch(*more)
        self.listening()
        return self

    def launch(self, *more: str) -> None:
        """Start it."""
        command = [*self.command, "controller", "--job", self.job]
        command += ["--log", self.log, "--json", *self.options, *more]
        with open(self.folder / "controller.err", "ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=self.environ
            )

    def listening(self) -> None:
        """Wait until it listens."""
        assert self.process is not None
        assert self.process.stdout is not None
        lines = b""
        while not lines.rstrip().endswith(b"}"):
            line = self.process.stdout.readline()
            assert line, self.errors()
            lines += line
        self.address = json.loads(lines)["address"]

    def errors(self) -> str:
        """Return what it has written for people."""
        return (self.folder / "controller.err").read_text()

    def kill(self) -> None:
        """Kill it at once."""
        assert self.process is not None
        self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and return its exit code."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.wait()

    def seat(self) -> str:
        """Return where the newest controller is."""
        newest = open_places(self.job, self.log).leader.newest()
        return newest.address if newest is not None else ""

    def operator(self) -> OperatorLink:
        """Return an operator's link to whatever controller is there."""
        return OperatorLink(self.seat, self.job, SECRET.encode(), timeout_s=PATIENCE_S)


@contextlib.contextmanager
def controlled(folder: Path, *options: str, **more: Any) -> Iterator[ControllerProcess]:
    """Give a controller process that listens; see `ControllerProcess`."""
    controller = ControllerProcess(folder, *options, **more)
    try:
        yield controller.start()
    finally:
        controller.close()


class PretendedNode:
    """A launcher whose workers are a number: it starts, fences and trains without any process."""

    def __init__(
        self,
        name: str,
        addresses: Callable[[], str],
        *,
        slots: int = 1,
        job: str = "j",
        secret: str = SECRET,
        beat_s: float = 0.1,
        seated: Callable[[str], bool] | None = None,
    ) -> None:
        self.name, self.slots = name, slots
        self.life = uuid.uuid4().hex
        self.lock = threading.RLock()
        self.running = self.fenced = 0
        self.orders: list[ToNode] = []
        self.begins: list[Begin] = []
        self.stores: list[StoreAt] = []
        self.bye: Shutdown | None = None
        self.step = 0
        self.link = NodeLink(
            addresses, job, secret.encode(), self.up, self.take, beat_s=beat_s, seated=seated
        ).start()

    def up(self) -> NodeUp:
        with self.lock:
            return NodeUp(
                node=self.name,
                life=self.life,
                slots=self.slots,
                fenced=self.fenced,
                running=self.running,
                host="127.0.0.1",
            )

    def take(self, order: ToNode) -> None:
        with self.lock:
            self.orders.append(order)
            if isinstance(order, FenceNow):
                self._fence(order)
            elif isinstance(order, Begin):
                self._begin(order)
            elif isinstance(order, StoreAt):
                self.stores.append(order)
            elif isinstance(order, SaveNow) and order.generation == self.running:
                self.link.tell(Saved(generation=order.generation, step=self.step))
            elif isinstance(order, Shutdown):
                self.bye = order

    def _fence(self, order: FenceNow) -> None:
        self.fenced = max(self.fenced, order.generation)
        if self.running < order.generation:
            self.running = 0
        self.link.tell(Fenced(node=self.name, generation=order.generation))

    def _begin(self, order: Begin) -> None:
        if order.generation <= max(self.running, self.fenced - 1):
            return
        self.begins.append(order)
        self.running, self.step = order.generation, order.step
        if order.hosts_store:
            self.link.tell(Hosting(order.generation, "127.0.0.1", 1000 + order.generation))
        self.link.tell(Loaded(node=self.name, generation=order.generation))
        self.train()

    def train(self, steps: int = 1) -> None:
        """Commit steps."""
        with self.lock:
            self.step += steps
            self.link.tell(Progress(generation=self.running, step=self.step))

    def end(self, code: int) -> None:
        """Let the workers end by themselves."""
        with self.lock:
            generation, self.running = self.running, 0
        self.link.tell(Ended(node=self.name, generation=generation, code=code))

    def close(self) -> None:
        self.link.close(0.0)


@contextlib.contextmanager
def pretended(
    count: int, addresses: Callable[[], str], **options: Any
) -> Iterator[list[PretendedNode]]:
    """Give nodes n0, n1, ..."""
    nodes: list[PretendedNode] = []
    try:
        nodes += [PretendedNode(f"n{k}", addresses, **options) for k in range(count)]
        yield nodes
    finally:
        for node in nodes:
            node.close()


def status_when(operator: OperatorLink, true: Callable[[Status], bool], what: str = "") -> Status:
    """Return the first status for which `true` holds."""
    end = time.monotonic() + PATIENCE_S
    while True:
        status = operator.status()
        if true(status):
            return status
        assert time.monotonic() < end, f"{what}: {status}"
        time.sleep(0.02)
