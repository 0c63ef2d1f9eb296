"""A controller as a real process: it starts, restarts, survives its death, and ends."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from ckptd.elastic.messages import Order, OrderKind, Suspected
from ckptd.elastic.places import open_places
from tests.elastic.controlled import (
    ControllerProcess,
    PretendedNode,
    controlled,
    pretended,
    status_when,
)
from tests.processes import PATIENCE_S, until

FAST = ("--set", "settle_s=2", "--set", "grow_s=0", "--set", "flaps=100", "--set", "lease_s=2")


def test_a_job_begins_restarts_and_ends(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with (
        controlled(tmp_path, "--nodes", "1:2", "--slots", "2", "--events", str(events), *FAST) as c,
        pretended(2, c.seat, slots=2) as nodes,
    ):
        operator = c.operator()
        first = status_when(operator, lambda s: s.state == "running")
        assert (first.generation, first.world, first.step) == (1, 4, 1)
        begins = [node.begins[0] for node in nodes]
        assert [b.hosts_store for b in begins] == [True, False]
        assert [b.node_rank for b in begins] == [0, 1]
        assert [seat.rank for b in begins for seat in b.seats] == [0, 1, 2, 3]
        until(lambda: all(node.stores for node in nodes), "the store's address")
        assert {(s.generation, s.port) for node in nodes for s in node.stores} == {(1, 1001)}

        assert operator.order(Order(kind=OrderKind.EXCLUDE, nodes=("n1",), reason="hot")).ok
        smaller = status_when(operator, lambda s: s.state == "running" and s.world == 2)
        assert smaller.generation > first.generation
        row = {row.name: row for row in smaller.nodes}["n1"]
        assert (row.out_until_s, row.spare, row.running) == (None, True, 0)
        assert operator.order(Order(kind=OrderKind.ADD, nodes=("n1",))).ok
        whole = status_when(operator, lambda s: s.state == "running" and s.world == 4)
        assert len(whole.recoveries) == 2
        recovery = whole.recoveries[0]
        assert (recovery.before, recovery.after) == (first.generation, smaller.generation)
        assert ("hot" in recovery.cause, recovery.total > 0) == (True, True)

        unknown = operator.order(Order(kind=OrderKind.DRAIN, nodes=("n7",)))
        assert not unknown.ok
        assert "unknown node: n7" in unknown.text
        assert not operator.order(Order(kind=OrderKind.EXCLUDE)).ok
        until(lambda: {node.running for node in nodes} == {whole.generation}, "all run")
        for node in nodes:
            node.end(0)
        until(lambda: all(node.bye for node in nodes), "goodbye")
        assert {node.bye.code for node in nodes if node.bye} == {0}
        assert c.wait() == 0
        operator.close()
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    states = [line["state"] for line in lines if line["event"] == "moved"]
    assert states[-1] == "done"
    assert {"fence", "plan", "reshard", "running"} <= set(states)


@pytest.mark.long
def test_a_worker_that_dies_and_a_node_that_vanishes(tmp_path: Path) -> None:
    with (
        controlled(tmp_path, "--nodes", "1:3", *FAST) as c,
        pretended(3, c.seat) as nodes,
    ):
        operator = c.operator()
        status_when(operator, lambda s: s.state == "running" and s.world == 3)
        until(lambda: {node.running for node in nodes} == {1}, "all run")
        nodes[2].end(1)
        again = status_when(operator, lambda s: s.state == "running" and s.generation > 2)
        assert again.world == 3
        assert "n2" in again.recoveries[-1].cause
        nodes[1].close()
        less = status_when(operator, lambda s: s.state == "running" and s.world == 2)
        assert not {row.name: row for row in less.nodes}["n1"].up
        with pytest.raises(TimeoutError):
            # Its workers were never heard to have ended: but nobody waits for a lease, since one
            # dead rank keeps a whole generation from another step.
            until(lambda: nodes[1].begins[-1].generation == less.generation, within_s=0.1)
        operator.close()


def test_killed_at_any_instant_and_started_again_the_job_goes_on(tmp_path: Path) -> None:
    rng = random.Random(7)
    with (
        controlled(tmp_path, "--nodes", "1:3", *FAST) as c,
        pretended(3, c.seat) as nodes,
    ):
        operator = c.operator()
        status_when(operator, lambda s: s.state == "running" and s.world == 3)
        end = time.monotonic() + PATIENCE_S
        for turn in range(4):
            before = max(node.running for node in nodes)
            if turn % 2:
                operator.order(Order(kind=OrderKind.RESTART))
            time.sleep(rng.uniform(0.0, 0.1))
            c.kill()
            nodes[turn % 3].train()
            c.start()
            until(lambda: all(node.link.connected for node in nodes), "connected")
            while (after := operator.status()).state != "running" or after.world < 3:
                nodes[turn % 3].train()
                assert time.monotonic() < end, after
                time.sleep(0.02)
            until(lambda: len({node.running for node in nodes}) == 1, "one generation")
            if not turn % 2:
                # Nothing was wrong but the controller: nobody was stopped.
                assert after.generation == before, c.errors()
        records = open_places("j", c.log).log.read()
        assert [r.generation for r in records] == sorted({r.generation for r in records})
        for node in nodes:
            begun = [b.generation for b in node.begins]
            assert begun == sorted(set(begun))
            assert set(begun) <= {r.generation for r in records}
        operator.close()


@pytest.mark.long
def test_what_ended_while_no_controller_was_there_is_heard(tmp_path: Path) -> None:
    with controlled(tmp_path, *FAST) as c, pretended(1, c.seat) as nodes:
        operator = c.operator()
        status_when(operator, lambda s: s.state == "running")
        c.kill()
        nodes[0].end(0)
        c.start()
        until(lambda: nodes[0].bye, "goodbye")
        assert c.wait() == 0
        operator.close()


def test_a_zombie_says_nothing_any_more(tmp_path: Path) -> None:
    """A controller that was stopped while another took over ends when it goes on."""
    with controlled(tmp_path, *FAST) as old, pretended(1, old.seat) as nodes:
        operator = old.operator()
        status_when(operator, lambda s: s.state == "running")
        assert old.process is not None
        old.process.send_signal(signal.SIGSTOP)
        (tmp_path / "other").mkdir()
        with controlled(tmp_path / "other", *FAST, log=old.log) as new:
            until(lambda: old.seat() == new.address)
            other = new.operator()
            until(lambda: nodes[0].train() or other.status().state == "running")
            assert other.order(Order(kind=OrderKind.RESTART)).ok
            now = status_when(other, lambda s: s.state == "running" and s.generation > 1)
            begun = len(nodes[0].orders)
            old.process.send_signal(signal.SIGCONT)
            assert old.wait() == 5
            assert "another controller" in old.errors()
            assert nodes[0].link.alive
            # What comes is of the new one, which has not said yet where the store is, perhaps.
            assert {o.generation for o in nodes[0].orders[begun:]} <= {now.generation}
            other.close()
        operator.close()


def test_a_controller_that_was_followed_does_not_end_its_nodes(tmp_path: Path) -> None:
    """The next one has no record yet, and trains on: one node was sent away, the others went on."""
    with controlled(tmp_path, "--nodes", "1", *FAST) as c, pretended(1, c.seat) as nodes:
        with c.operator() as operator:
            status_when(operator, lambda s: s.state == "running")
        open_places("j", c.log).leader.take(1, "127.0.0.1:9", "another")
        nodes[0].end(0)  # it would have been all: the job is done
        assert c.wait() == 5
        assert nodes[0].bye is None
        assert "another controller registered first" in c.errors()


@pytest.mark.long
def test_of_many_that_stand_in_one_gets_the_seat(tmp_path: Path) -> None:
    many = [
        ControllerProcess(_made(tmp_path / str(k)), log=str(tmp_path / "log")) for k in range(3)
    ]
    try:
        for one in many:
            one.launch("--after", "-1")
        ended = until(lambda: [m for m in many if m.process and m.process.poll() is not None][1:])
        assert ended
        codes = sorted(str(m.process.poll()) for m in many if m.process)
        assert codes == ["5", "5", "None"]
        assert all("another controller registered first" in m.errors() for m in many if _ended(m))
    finally:
        for one in many:
            one.close()


@pytest.mark.long
def test_an_empty_log_and_nodes_that_run_is_refused(tmp_path: Path) -> None:
    with controlled(tmp_path, *FAST) as c, pretended(1, c.seat) as nodes:
        operator = c.operator()
        status_when(operator, lambda s: s.state == "running")
        c.kill()
        address = _made(tmp_path / "new")
        with controlled(address, *FAST, log=str(tmp_path / "lost")) as wrong:
            stray = PretendedNode("n0", lambda: wrong.address)
            stray.running = 5
            assert wrong.wait() == 5
            assert "the membership log lacks generations that nodes have reported" in wrong.errors()
            assert stray.running == 5
            assert stray.bye is None
            stray.close()
        assert nodes[0].running == 1
        operator.close()


def test_who_is_cut_off_and_reaches_the_log_renews_no_lease_beside_its_follower(
    tmp_path: Path,
) -> None:
    with controlled(tmp_path, "--nodes", "1", "--set", "silent_s=1", *FAST) as c:
        line = [True]
        seat = open_places("j", c.log).leader
        node = PretendedNode("n0", lambda: c.seat() if line else "", seated=seat.still)
        spare = PretendedNode("n1", lambda: "" if line else c.seat())
        try:
            until(lambda: node.running, "n0 runs")
            line.clear()
            connection = node.link._connection
            assert connection is not None
            connection._sock.shutdown(socket.SHUT_RDWR)
            until(lambda: spare.running, "n1 runs")
            assert node.link.lease_until < time.monotonic()
        finally:
            node.close()
            spare.close()


def test_orders_of_all_kinds(tmp_path: Path) -> None:
    with controlled(tmp_path, "--nodes", "2", *FAST) as c, pretended(2, c.seat) as nodes:
        operator = c.operator()
        status_when(operator, lambda s: s.state == "running")
        assert operator.order(Order(kind=OrderKind.PAUSE)).ok
        status_when(operator, lambda s: s.state == "parked", "parked")
        assert {node.running for node in nodes} == {0}
        assert operator.order(Order(kind=OrderKind.RESUME)).ok
        status_when(operator, lambda s: s.state == "running", "running again")
        assert operator.order(Suspected(nodes=(), reason="slow")).ok
        status_when(operator, lambda s: any(r.cause == "slow" for r in s.recoveries), "slow")
        seen = next(iter(operator.statuses()))
        assert seen.job == "j"
        assert operator.order(Order(kind=OrderKind.STOP, reason="enough")).ok
        until(lambda: all(node.bye for node in nodes), "goodbye")
        assert {(n.bye.kind, n.bye.code) for n in nodes if n.bye} == {("stopped", 130)}
        assert c.wait() == 130
        operator.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _ended(controller: ControllerProcess) -> bool:
    return controller.process is not None and controller.process.poll() is not None
