"""A node of torchrun says what is so, whenever a fence, a fault or the end of the job comes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.elastic.messages import (
    Begin,
    Ended,
    Fenced,
    FenceNow,
    Hosting,
    JobEvent,
    Left,
    Saved,
    SaveNow,
    Shutdown,
    StoreAt,
    Timed,
)
from ckptd.elastic.policy import Shape
from ckptd.errors import NotFoundError, TransientStoreError
from ckptd_torchrun.node import JobOver, Joined, TorchrunNode
from tests.processes import PATIENCE_S, until

_SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class _Link:
    """What was told; nobody listens."""

    def __init__(self) -> None:
        self.told: list[JobEvent | Hosting | Timed] = []
        self.lease_until = 0.0
        self.silent_s = 0.0

    def tell(self, event: JobEvent | Hosting | Timed) -> None:
        self.told.append(event)

    def has(self, *events: JobEvent) -> bool:
        return [e for e in self.told if not isinstance(e, Hosting | Timed)] == list(events)


@pytest.fixture
def link() -> _Link:
    return _Link()


@pytest.fixture
def node(link: _Link) -> Iterator[TorchrunNode]:
    with tempfile.TemporaryDirectory() as folder:
        found = TorchrunNode("n", "", Path(folder) / "w")
        found.start(link)
        yield found
        found.workers.kill(PATIENCE_S)
        found.leave(0.0)


def _begin(generation: int, *, hosts: bool = True) -> Begin:
    return Begin(
        generation=generation,
        level=1,
        shape=Shape(1, 1, 1),
        step=0,
        reason="",
        nodes=1,
        node_rank=0,
        seats=(),
        world=1,
        hosts_store=hosts,
    )


def _join(node: TorchrunNode, within_s: float = PATIENCE_S) -> Joined:
    return node.join(lambda _: ("here", 7), lambda host, port: None, within_s)


def _worker(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command or _SLEEP, start_new_session=True)


def test_a_fence_ends_workers_where_the_agent_does_not_count_it(
    node: TorchrunNode, link: _Link
) -> None:
    node.take(_begin(1))
    assert _join(node).port == 7
    worker = _worker()
    assert not node.changed()
    assert node.up().running == 1
    node.take(FenceNow(generation=2))
    assert worker.poll() is None  # frozen at most: only `changed` may let the agent see a death
    assert node.changed()
    assert worker.wait(PATIENCE_S) == -9
    assert link.has(Fenced(node="n", generation=2))
    assert (node.up().running, node.up().fenced) == (0, 2)


def test_a_fence_before_workers_are_there_is_only_said_once_they_are_dead(
    node: TorchrunNode, link: _Link
) -> None:
    node.take(_begin(1))
    _join(node)
    node.take(FenceNow(generation=2))
    assert node.over()
    worker = _worker()
    assert link.has()
    assert node.changed()
    assert worker.wait(PATIENCE_S) == -9
    assert link.has(Fenced(node="n", generation=2))


def test_a_fence_holds_where_the_agent_does_not_look(node: TorchrunNode, link: _Link) -> None:
    node.take(_begin(1))
    _join(node)
    worker = _worker()
    assert not node.changed()
    node.take(FenceNow(generation=2))
    until(lambda: link.has(Fenced(node="n", generation=2)))
    assert worker.wait(PATIENCE_S) == -9


def test_a_waiting_node_is_fenced_at_once(node: TorchrunNode, link: _Link) -> None:
    node.take(FenceNow(generation=4))
    assert link.has(Fenced(node="n", generation=4))


def test_how_workers_end_is_said_once(node: TorchrunNode, link: _Link) -> None:
    node.take(_begin(1))
    _join(node)
    worker = _worker()
    assert not node.changed()
    worker.kill()
    ended = Ended(node="n", generation=1, code=-9, program=True)
    until(lambda: link.has(ended))
    worker.wait(PATIENCE_S)
    node.take(FenceNow(generation=2))
    node.take(_begin(3))
    assert _join(node).begin.generation == 3
    assert link.has(ended, Fenced(node="n", generation=2))
    good = _worker(sys.executable, "-S", "-c", "")
    assert not node.changed()
    good.wait(PATIENCE_S)
    node.succeeded()
    assert link.has(ended, Fenced(node="n", generation=2), Ended(node="n", generation=3, code=0))


def test_a_generation_is_begun_once(node: TorchrunNode, link: _Link) -> None:
    node.take(_begin(1))
    _join(node)
    node.take(_begin(1))
    with pytest.raises(NotFoundError) as caught:
        link.silent_s = 1000.0
        _join(node, 0.1)
    assert "no controller answers" in caught.value.message
    assert link.has(Ended(node="n", generation=1, code=1))


def test_a_generation_that_is_fenced_before_its_store_is_there_is_left(node: TorchrunNode) -> None:
    node.take(_begin(1, hosts=False))
    node.take(StoreAt(generation=0, host="old", port=1))

    def others_go_on() -> None:
        node.take(FenceNow(generation=2))
        node.take(_begin(3))

    timer = threading.Timer(0.1, others_go_on)
    timer.start()
    assert _join(node).begin.generation == 3
    timer.join()


def test_a_store_that_cannot_be_reached_is_told_of(node: TorchrunNode, link: _Link) -> None:
    node.take(_begin(1, hosts=False))
    node.take(StoreAt(generation=1, host="gone", port=1))
    calls = []

    def connect(host: str, port: int) -> None:
        calls.append(host)
        if host == "gone":
            node.take(FenceNow(generation=2))
            node.take(_begin(3))
            raise TransientStoreError("nobody listens", kind="link-lost")

    assert node.join(lambda _: ("here", 7), connect, PATIENCE_S).begin.generation == 3
    assert calls == ["gone", "here"]
    assert Ended(node="n", generation=1, code=1) in link.told


def test_workers_end_with_the_lease(node: TorchrunNode, link: _Link) -> None:
    node.take(_begin(5))
    _join(node)
    worker = _worker()
    assert not node.changed()
    link.lease_until = time.monotonic() - 1.0
    until(lambda: node.up().fenced == 5)
    assert worker.wait(PATIENCE_S) == -9
    assert node.up().running == 0
    assert node.changed()


def test_a_save_that_nobody_can_be_asked_for_is_not_waited_for(
    node: TorchrunNode, link: _Link
) -> None:
    node.take(_begin(1))
    _join(node)
    node.take(SaveNow(generation=1))
    until(lambda: link.has(Saved(generation=1, step=0)))


def test_a_job_that_is_over_lets_go_of_a_waiting_node(node: TorchrunNode, link: _Link) -> None:
    node.take(Shutdown(kind="no-progress", text="why", code=77))
    with pytest.raises(JobOver) as caught:
        _join(node)
    assert (caught.value.code, caught.value.text) == (77, "why")
    node.leave(0.0)
    assert Left(node="n") not in link.told
