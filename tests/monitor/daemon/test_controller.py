"""A daemon before a real controller: what it tells, orders, and does about incidents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.monitor.daemon.response import RUN_POLICY
from ckptd.monitor.job import RankView
from ckptd.monitor.recording import replay
from ckptd.monitor.report import RankNote, from_views, pack
from tests.monitor import jobs
from tests.monitor.daemon.controllers import controller, nodes
from tests.monitor.daemon.daemons import JOB, Running, quick_settings, running
from tests.monitor.daemon.test_metrics import samples
from tests.processes import until

SETTINGS = replace(quick_settings(), policy=dict(RUN_POLICY))


class Ranks:
    """Four ranks of two nodes, of whom an agent tells ten times a second."""

    def __init__(self, daemon: Running) -> None:
        self._daemon = daemon
        self._numbers = itertools.count(1)
        self._ended = threading.Event()
        self.age = 0.0
        self.generation = 1
        self.stopped: int | None = None
        self.killed = False
        self.nodes = ("n0", "n1")
        self._thread = threading.Thread(target=self._run, name="ranks")
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self._tell()

    def _tell(self) -> None:
        self.age = self.age + 0.1 if self.stopped is not None else 0.0
        number = next(self._numbers)
        sheet = from_views(
            [self._view(rank, 1000 * self.generation + number) for rank in range(4)],
            job=JOB,
            source="agents",
            number=number,
            notes={r: RankNote(generation=self.generation, lived=10.0) for r in range(4)},
        )
        self._daemon.post("sheet", pack(sheet))

    def _view(self, rank: int, seq: int) -> RankView:
        if self.stopped is not None:
            seq = 1000 * self.generation
        if rank == self.stopped:
            one = jobs.outside(rank, 7, seq - 1, self.age, 4, process_state="T")
        else:
            one = jobs.inside(rank, 7, seq, self.age, 4, process_state="S")
        pid = 100 * self.generation + rank
        one = jobs.changed(one, node=self.nodes[rank // 2], pid=pid)
        if self.killed:
            one = jobs.changed(one, alive=False, exit_code=-9, process_state="Z")
        return one

    def restart(self, generation: int, nodes: Sequence[str]) -> None:
        """Go on as another life."""
        self.stopped, self.killed = None, False
        self.generation, self.nodes = generation, (nodes[0], nodes[1])

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def ranks(daemon: Running) -> Iterator[Ranks]:
    told = Ranks(daemon)
    try:
        yield told
    finally:
        told.close()


def elastic(daemon: Running) -> dict[str, Any]:
    found: dict[str, Any] = daemon.ask("GET", "/api/v1/elastic").document
    return found


def state(daemon: Running) -> tuple[str, int]:
    status = elastic(daemon)["status"]
    return (status["state"], status["generation"]) if status else ("", 0)


def order(daemon: Running, body: object, **how: Any) -> Any:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return daemon.ask("POST", "/api/v1/elastic/orders", raw, **how)


def test_orders_reach_the_controller_and_what_it_does_is_told(tmp_path: Path) -> None:
    with (
        controller(tmp_path / "log", 4) as address,
        running(tmp_path / "history", controller=lambda: address) as daemon,
        nodes(address, ["n0", "n1"]),
    ):
        until(lambda: state(daemon)[0] == "running", "the job does not begin")
        first = state(daemon)[1]
        found = elastic(daemon)
        assert found["controller"] == {"connected": True, "address": address}
        assert [n["name"] for n in found["status"]["nodes"]] == ["n0", "n1"]
        events = daemon.client.events("")
        told = next(body for _, name, body in events if name == "elastic")
        assert told["status"]["generation"] == first
        answer = order(daemon, {"kind": "restart", "reason": "for a test"})
        assert (answer.status, answer.document["ok"]) == (200, True)
        until(lambda: state(daemon)[0] == "running" and state(daemon)[1] > first)
        until(lambda: elastic(daemon)["status"]["recoveries"], "no recovery is told")
        assert "for a test" in elastic(daemon)["status"]["recoveries"][-1]["cause"]
        until(lambda: samples(daemon).get("ckptd_elastic_recoveries_total"), "not counted")
        metrics = samples(daemon)
        assert metrics["ckptd_elastic_state"]["running",] == 1
        assert metrics["ckptd_elastic_nodes"]["running",] == 2
        assert metrics["ckptd_elastic_controller_up"] == {(): 1}
        assert metrics["ckptd_elastic_recovery_seconds_count"]["total",] == 1
        refused = order(daemon, {"kind": "exclude", "nodes": ["n7"]})
        assert refused.status == 409
        assert "unknown node: n7" in refused.message


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("daemon") / "history") as it:
        yield it


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        {"kind": "burn"},
        {"kind": "exclude"},
        {"kind": "restart", "nodes": ["n0"]},
        {"kind": "add", "nodes": [""]},
        {"kind": "restart", "reason": "x" * 501},
        {"kind": "restart", "nodes": "n0"},
    ],
)
def test_what_is_no_order_is_refused(without: Running, body: object) -> None:
    refused = order(without, body)
    assert refused.status == 400
    assert refused.message in ("the body is not an order", "invalid request")


def test_orders_need_the_token_and_come_from_the_page(without: Running) -> None:
    good = {"kind": "restart"}
    assert order(without, good, token=False).kind == "no-token"
    foreign = {"Origin": "http://elsewhere.example"}
    assert (
        "the request comes from a page of another site"
        in order(without, good, headers=foreign).message
    )
    assert (
        "the daemon does not accept requests for that host name"
        in order(without, good, headers={"Host": "elsewhere.example"}).message
    )


def test_without_a_controller_there_is_nothing_to_order(without: Running) -> None:
    assert "this daemon has no controller" in order(without, {"kind": "restart"}).message
    assert (
        "this daemon has no controller"
        in without.ask("POST", "/api/v1/incidents/job-1/enforce", b"{}").message
    )
    assert elastic(without) == {"generations": [], "controller": None, "status": None}


def test_a_stopped_rank_has_its_node_left_out_and_what_follows_is_no_incident(
    tmp_path: Path,
) -> None:
    recording = tmp_path / "recording"
    with (
        controller(tmp_path / "log", 4) as address,
        running(
            tmp_path / "history",
            settings=SETTINGS,
            controller=lambda: address,
            recording=recording,
        ) as daemon,
        nodes(address, ["n0", "n1", "n2"]),
        ranks(daemon) as told,
    ):
        until(lambda: state(daemon)[0] == "running", "the job does not begin")
        first = state(daemon)[1]
        here = _members(daemon)
        told.restart(first, here)
        until(lambda: daemon.service.rounds.last.job.nodes == tuple(here))
        told.stopped = 3
        until(lambda: state(daemon)[1] > first, "nobody acts")
        told.killed = True
        incident = until(lambda: _closed(daemon), "the incident stays open")
        assert (incident["kind"], incident["enforced"]) == ("non-communication hang", True)
        assert incident["response"] == f"exclude {here[1]} and restart"
        assert incident["consequences"][-1].startswith("the generation was fenced")
        until(lambda: state(daemon)[0] == "running", "the job does not come back")
        spare = _members(daemon)
        assert here[1] not in spare
        told.restart(state(daemon)[1], spare)
        until(lambda: daemon.service.rounds.last.job.nodes == tuple(spare))
        until(lambda: daemon.service.rounds.last.revision > 0)
        assert len(daemon.client.get("/incidents")["incidents"]) == 1
        metrics = samples(daemon)
        assert metrics["ckptd_verdicts_total"]["act", "non-communication hang", "true"] == 1
    again = replay(recording, SETTINGS)
    assert [(i.kind, i.state) for i in again.incidents] == [("non-communication hang", "closed")]


def _members(daemon: Running) -> list[str]:
    generation = state(daemon)[1]
    rows = elastic(daemon)["status"]["nodes"]
    return [row["name"] for row in rows if row["running"] == generation]


def _closed(daemon: Running) -> dict[str, Any] | None:
    found = daemon.client.get("/incidents")["incidents"]
    # The fence may be heard of before the answer to what led to it was noted.
    done = bool(found) and found[0]["state"] == "closed" and bool(found[0]["response"])
    return found[0] if done else None


def test_what_is_asked_is_done_when_a_person_says_so(tmp_path: Path) -> None:
    asks = replace(SETTINGS, policy=dict.fromkeys(RUN_POLICY, "ask"))
    with (
        controller(tmp_path / "log", 4) as address,
        running(tmp_path / "history", settings=asks, controller=lambda: address) as daemon,
        nodes(address, ["n0", "n1"]),
        ranks(daemon) as told,
    ):
        until(lambda: state(daemon)[0] == "running", "the job does not begin")
        first = state(daemon)[1]
        told.restart(first, ["n0", "n1"])
        told.stopped = 3
        incident = until(lambda: _proposed(daemon), "nothing is proposed")
        assert incident["proposal"] == {"text": "exclude n1 and restart", "nodes": ["n1"]}
        assert (incident["enforced"], state(daemon)) == (False, ("running", first))
        path = f"/api/v1/incidents/{incident['id']}/enforce"
        assert daemon.ask("POST", path, b"{}", token=False).kind == "no-token"
        assert daemon.ask("POST", path, b"{}").document["ok"] is True
        until(lambda: state(daemon)[1] > first, "nothing is done")
        told.killed = True
        closed = until(lambda: _closed(daemon), "the incident stays open")
        assert (closed["enforced"], closed["proposal"]) == (True, None)
        assert "this incident needs no action now" in daemon.ask("POST", path, b"{}").message


def _proposed(daemon: Running) -> dict[str, Any] | None:
    found = daemon.client.get("/incidents", state="open")["incidents"]
    return found[0] if found and found[0]["proposal"] else None


def test_a_controller_that_comes_back_is_followed_again(tmp_path: Path) -> None:
    place, where = tmp_path / "log", [""]
    with running(tmp_path / "history", controller=lambda: where[0]) as daemon:
        with controller(place, 2) as address:
            where[0] = address
            until(lambda: elastic(daemon)["controller"]["connected"])
        until(lambda: not elastic(daemon)["controller"]["connected"], "its end is not seen")
        assert elastic(daemon)["status"]["state"] == "plan"  # as it was then
        with controller(place, 2) as address:
            where[0] = address
            until(lambda: elastic(daemon)["controller"]["connected"])
            assert elastic(daemon)["controller"]["address"] == address
