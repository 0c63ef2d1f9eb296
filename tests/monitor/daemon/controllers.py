"""A real controller as a process of its own, and nodes that speak to it and run nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptd.elastic.link import NodeLink
from ckptd.elastic.messages import (
    Begin,
    Fenced,
    FenceNow,
    Hosting,
    Loaded,
    NodeUp,
    Progress,
    Saved,
    SaveNow,
    ToNode,
)
from tests.monitor.daemon.daemons import JOB, SECRET
from tests.processes import PATIENCE_S

CONTROLLER = """
import socket, sys
from ckptd.elastic.places import open_places
from ckptd.elastic.policy import JobSpec, Shape
from ckptd.elastic.control.running import Setup, run_controller
from ckptd.elastic.control.states import ControllerSettings

name, secret, place, replicas, port = sys.argv[1:]
sock = socket.create_server(("127.0.0.1", int(port)))
address = f"127.0.0.1:{sock.getsockname()[1]}"
job = JobSpec(microbatches=8, planned=Shape(1, int(replicas), 1))
settings = ControllerSettings(gather_s=30.0, grow_s=3600.0, silent_s=60.0, settle_s=30.0)
setup = Setup(name, secret.encode(), job, settings, open_places(name, place), sock, address)
run_controller(setup, lambda: print(address, flush=True))
"""


@contextmanager
def controller(place: Path, replicas: int, port: int = 0) -> Iterator[str]:
    """Run a controller while the block runs; its address."""
    arguments = [JOB, SECRET.decode(), str(place), str(replicas), str(port)]
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, "the controller does not start"
        yield line
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


class Node:
    """One node with its launcher's side of the protocol; its workers are words."""

    def __init__(self, name: str, slots: int, address: str) -> None:
        self.name, self.slots = name, slots
        self.generation = self.fenced = self.running = 0
        self.begun: list[int] = []
        self._step = 0
        self.link = NodeLink(lambda: address, JOB, SECRET, self._up, self._obey, beat_s=0.2)
        self.link.start()

    def _up(self) -> NodeUp:
        return NodeUp(
            node=self.name,
            life=f"{self.name}-1",
            slots=self.slots,
            fenced=self.fenced,
            running=self.running,
            host="127.0.0.1",
        )

    def _obey(self, order: ToNode) -> None:
        if isinstance(order, FenceNow):
            self.fenced, self.running = order.generation, 0
            self.link.tell(Fenced(node=self.name, generation=order.generation))
        elif isinstance(order, Begin) and order.generation not in self.begun:
            self.running = order.generation
            self.begun.append(order.generation)
            self._step = order.step
            if order.hosts_store:
                self.link.tell(Hosting(generation=order.generation, host="127.0.0.1", port=9))
            self.link.tell(Loaded(node=self.name, generation=order.generation))
            self.link.tell(Progress(generation=order.generation, step=order.step + 1))
        elif isinstance(order, SaveNow):
            self.link.tell(Saved(generation=order.generation, step=self._step + 2))


@contextmanager
def nodes(address: str, names: list[str], slots: int = 2) -> Iterator[list[Node]]:
    """Have nodes there while the block runs."""
    with ExitStack() as stack:
        here = []
        for name in names:
            node = Node(name, slots, address)
            stack.callback(node.link.close)
            here.append(node)
        yield here
