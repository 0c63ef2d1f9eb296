"""The check before a job over nodes that are threads here: who is missed, lost and let in."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from ckptd.base.net.connection import Connection, greet_server
from ckptd.elastic.linkspeed import measured
from ckptd.errors import CkptdError, DeadlineError, StoreError
from ckptd.monitor.agent import preflight
from ckptd.monitor.agent.preflight import (
    ORDER_S,
    PURPOSE,
    ClockReading,
    NodeHello,
    Preflight,
    PreflightNode,
    PreflightOutcome,
    PreflightPlan,
    Probed,
    coordinate,
    take_part,
)
from ckptd.monitor.preflight import PairProbe, rates
from tests.monitor.test_preflight_machines import GOOD

SECRET = b"0123456789abcdef"
END_S = 60.0
Part = Callable[[tuple[str, int]], object]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener


def node(folder: Path, name: str, rank: int = -1, secret: bytes = SECRET) -> Part:
    return lambda address: take_part(
        address, secret, PreflightNode(name, rank, folder), END_S, END_S
    )


@contextmanager
def beside(listener: socket.socket, parts: Sequence[Part]) -> Iterator[list[object]]:
    """Run parts of nodes in threads; give what each returns or raises, complete at the end."""
    results: list[object] = [None] * len(parts)

    def run(number: int) -> None:
        try:
            results[number] = parts[number](listener.getsockname())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[number] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(parts))]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(END_S)
        assert not thread.is_alive()


def check(
    listener: socket.socket, parts: Sequence[Part], plan: PreflightPlan
) -> tuple[Preflight, list[object]]:
    said: list[str] = []
    with beside(listener, parts) as results:
        found = coordinate(listener, SECRET, plan, said.append)
    assert said[0].startswith(f"{len(found.nodes)} of {plan.nodes} nodes")
    return found, results


def failures(found: Preflight) -> list[tuple[str, str]]:
    """Return what failed; on a busy machine threads that share it may seem slow."""
    kinds = ("absent", "extra", "lost", "reach", "arithmetic")
    return [(f.name, f.what) for f in found.findings if f.what in kinds]


def test_all_come_and_learn_what_came_of_it(listener: socket.socket, tmp_path: Path) -> None:
    folders = [tmp_path / f"{k}" for k in range(3)]
    for folder in folders:
        folder.mkdir()
    parts = [node(folder, f"n{k}", k) for k, folder in enumerate(folders)]
    found, results = check(listener, parts, PreflightPlan(nodes=3, wait_s=END_S, probe_bytes=50000))
    assert found.nodes == ("n0", "n1", "n2")
    assert failures(found) == []
    assert set(found.machines) == set(found.skews_s) == {"n0", "n1", "n2"}
    assert (found.links.pairs, found.links.of) == (3, 3)
    assert set(found.seconds) == {"gather", "test", "probe", "confirm"}
    best = rates(found.probes, 50000)
    assert results == [PreflightOutcome(found.healthy, found.findings, best[k]) for k in range(3)]
    assert [measured(folder) for folder in folders] == [int(best[k]) for k in range(3)]


def test_a_slow_peer_makes_no_node_slow() -> None:
    probes = [
        PairProbe(source=source, to=to, latency_s=1e-5, out_s=out_s, in_s=in_s)
        for source, to, out_s, in_s in (
            (0, 1, 1.0, 2.0),
            (1, 2, 10.0, 1.0),
            (0, 3, math.inf, math.inf),
            (0, 4, 0.0, 0.0),
        )
    ]
    assert rates(probes, 100) == {0: 50.0, 1: 50.0, 2: 10.0, 3: 0.0}


def test_nobody_comes(listener: socket.socket) -> None:
    found, _ = check(listener, [], PreflightPlan(nodes=2, wait_s=0.1))
    assert failures(found) == [("rank 0", "absent"), ("rank 1", "absent")]
    assert found.links.latency_s is None


def test_strangers_and_other_secrets_are_not_let_in_and_who_is_missing_is_named(
    listener: socket.socket, tmp_path: Path
) -> None:
    def stranger(address: tuple[str, int]) -> object:
        with socket.create_connection(address) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            while sock.recv(1000):
                pass
        return None

    parts = [node(tmp_path, "n0", 0), node(tmp_path, "n1", 1, b"another secret.."), stranger]
    found, results = check(listener, parts, PreflightPlan(nodes=2, wait_s=3.0, probe_bytes=1000))
    assert ("rank 1", "absent") in failures(found)
    assert any("connections refused" in f.message for f in found.findings)
    assert isinstance(results[0], PreflightOutcome)
    assert not results[0].healthy
    assert isinstance(results[1], StoreError)
    assert results[1].kind == "permission"


def test_silent_connections_keep_no_node_out(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GREETED_S", END_S)
    with ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection(listener.getsockname()))
        plan = PreflightPlan(nodes=1, wait_s=END_S, probe_bytes=1000)
        found, _ = check(listener, [node(tmp_path, "n0", 0)], plan)
    assert found.nodes == ("n0",)


def test_one_that_comes_and_ends_is_told_as_lost(listener: socket.socket, tmp_path: Path) -> None:
    def leaving(address: tuple[str, int]) -> object:
        wire = Connection(socket.create_connection(address), "coordinator", ORDER_S)
        greet_server(wire, SECRET, PURPOSE, role="agent", wait_s=END_S)
        wire.send(NodeHello("gone", 1, "127.0.0.1", 1))
        wire.release()
        return None

    parts = [node(tmp_path, "n0", 0), leaving, node(tmp_path, "n2", 2)]
    found, results = check(listener, parts, PreflightPlan(nodes=3, wait_s=END_S, probe_bytes=1000))
    assert failures(found) == [("gone", "lost")]
    assert set(found.machines) == {"n0", "n2"}
    assert isinstance(results[2], PreflightOutcome)


def saying(name: str, rank: int, *answers: msgspec.Struct) -> Part:
    """Return a node that answers each order with the next of these, and then ends."""

    def part(address: tuple[str, int]) -> object:
        wire = Connection(socket.create_connection(address), "coordinator", ORDER_S)
        with ExitStack() as until, suppress(CkptdError):  # the coordinator may end it first
            until.callback(wire.release)
            greet_server(wire, SECRET, PURPOSE, role="agent", wait_s=END_S)
            wire.send(NodeHello(name, rank, "127.0.0.1", 1))
            for answer in answers:
                wire.receive(preflight._ORDER, END_S)
                wire.send(answer)
            wire.receive(preflight._ORDER, END_S)
        return None

    return part


CLOCKS = [ClockReading(time.time())] * 3


def probed(source: int, to: int) -> Probed:
    return Probed(PairProbe(source=source, to=to, latency_s=1e-4, out_s=1e-3, in_s=1e-3))


@pytest.mark.parametrize("named", [(1, 0), (7, -9), (0, 2)], ids=["its own", "unknown", "others'"])
def test_one_that_ends_after_its_first_probe_is_told_as_lost(
    listener: socket.socket, tmp_path: Path, named: tuple[int, int]
) -> None:
    gone = saying("gone", 1, preflight.Tested(GOOD), *CLOCKS, probed(*named))
    parts = [gone, *[node(tmp_path, f"n{k}", k) for k in (0, 2, 3, 4)]]
    found, results = check(listener, parts, PreflightPlan(nodes=5, wait_s=END_S, probe_bytes=1000))
    assert ("gone", "lost") in failures(found)
    assert {(p.source, p.to) for p in found.probes} <= set(itertools.permutations(range(5), 2))
    assert isinstance(results[2], PreflightOutcome)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
def test_a_clock_that_cannot_be_does_not_hide_another_one_that_is_off(
    listener: socket.socket, tmp_path: Path, seconds: float
) -> None:
    late = [ClockReading(time.time() + 900.0)] * 3
    parts = [
        saying("wild", 0, preflight.Tested(GOOD), ClockReading(seconds)),
        saying("late", 1, preflight.Tested(GOOD), *late),
        *[node(tmp_path, f"n{k}", k) for k in (2, 3)],
    ]
    found, _ = check(listener, parts, PreflightPlan(nodes=4, wait_s=END_S, probe_bytes=1000))
    assert ("wild", "lost") in failures(found)
    assert ("late", "clock") in [(f.name, f.what) for f in found.findings]
    assert "wild" not in found.skews_s


def test_names_that_two_nodes_share_are_told_apart(listener: socket.socket, tmp_path: Path) -> None:
    parts = [node(tmp_path, "same", 0), node(tmp_path, "same", 1)]
    found, _ = check(listener, parts, PreflightPlan(nodes=2, wait_s=END_S, probe_bytes=1000))
    assert found.nodes == ("same", "same#2")


def test_no_coordinator(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(DeadlineError) as caught:
        take_part(address, SECRET, PreflightNode("n", 0, tmp_path), 0.1, END_S)
    assert "the coordinator cannot be reached" in caught.value.message
