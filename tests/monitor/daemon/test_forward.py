from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.base.net.address import listen_at
from ckptd.monitor.daemon.access import Access
from ckptd.monitor.daemon.forward import Forwarder, _with_rows_of
from ckptd.monitor.daemon.server import Serving, url_of
from ckptd.monitor.report import REPORT_RANK, STEP, AgentState, NodeReport, merge
from ckptd_simulated.feed import Feeder, PlantedAt, Simulation, mesh_for
from tests.monitor.daemon.daemons import JOB, SECRET, Running, quick_settings, running
from tests.processes import PATIENCE_S, free_port, until


@contextmanager
def forwarding(above: str) -> Iterator[tuple[Forwarder, str]]:
    forwarder = Forwarder(JOB, SECRET, above)
    with listen_at("127.0.0.1", 0, "the daemon") as sock:
        serving = Serving(
            forwarder.app(Access(token="t")),
            sock,
            started=lambda _: forwarder.start(),
            ending=lambda: None,
        )
        thread = threading.Thread(target=serving.run, args=(False,))
        thread.start()
        try:
            yield forwarder, url_of(sock)
        finally:
            serving.stop()
            thread.join(PATIENCE_S)
            forwarder.close()


@contextmanager
def feeding(forwarder: Forwarder, *faults: PlantedAt, ranks: int = 32) -> Iterator[None]:
    feeder = Feeder(Simulation(JOB, mesh_for(ranks), faults), forwarder.ingest.hand_in)
    try:
        yield
    finally:
        feeder.close()
        assert not feeder.failed


def silent(daemon: Running) -> list[str]:
    return [a.node for a in daemon.service.rounds.last.agents if a.silent]


def reporting(daemon: Running) -> int:
    return len(daemon.service.rounds.last.job.ranks)


def test_sheets_go_up_as_one_and_orders_and_findings_pass(tmp_path: Path) -> None:
    with running(tmp_path / "history") as root, forwarding(root.url) as (forwarder, _):
        with feeding(forwarder, PlantedAt("hang", 5, 1.0)):
            until(lambda: reporting(root) == 32)
            board = root.service.rounds.last
            assert {a.node for a in board.agents} == {f"n{k}" for k in range(8)}
            assert len({a.source for a in board.agents}) == 1
            until(lambda: len(root.service.members) > 4)
            made = forwarder._book.totals
            until(lambda: len(made.keys) and root.service.collectives.totals.keys == made.keys)
            # Stacks are ordered of one node, by way of the forwarder, and come back by it.
            incident = until(
                lambda: next((i for i in root.service.rounds.last.open if 5 in i.stacks), None)
            )
            assert incident.verdict.names()[0] == "5"
            assert 5 in incident.stacks


def test_root_that_was_away_hears_how_things_are(tmp_path: Path) -> None:
    port = free_port()
    with forwarding(f"http://127.0.0.1:{port}") as (forwarder, _), feeding(forwarder, ranks=16):
        until(lambda: forwarder.up.away)
        until(lambda: len(forwarder._below) == 4)
        with running(tmp_path / "history", port=port) as root:
            until(lambda: reporting(root) == 16)
        until(lambda: forwarder.up.away)


def test_agent_that_fell_silent_is_silent_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.forward._SILENT_S", 2.0)
    settings = replace(quick_settings(), silent_s=2.0)
    with (
        running(tmp_path / "history", settings=settings) as root,
        forwarding(root.url) as (forwarder, _),
    ):
        with feeding(forwarder, PlantedAt("silent", 9, 2.0), ranks=16):
            until(lambda: reporting(root) == 16)
            # A busy machine may make the other agent late as well, for a while.
            until(lambda: silent(root) == ["n2"] and reporting(root) == 12)


def table(ranks: list[int], steps: list[tuple[int, int]], number: int) -> NodeReport:
    rows = np.zeros(len(ranks), REPORT_RANK)
    rows["rank"] = ranks
    told = np.zeros(len(steps), STEP)
    told["row"] = [ranks.index(rank) for rank, _ in steps]
    told["step"] = [step for _, step in steps]
    return NodeReport(
        job=JOB,
        source="s",
        number=number,
        nodes=("n",),
        agents=(AgentState(),),
        ranks=rows.tobytes(),
        steps=told.tobytes(),
    )


def steps_of(sheet: NodeReport) -> list[tuple[int, int]]:
    ranks, steps = sheet.table("ranks")["rank"], sheet.table("steps")
    return [(int(ranks[s["row"]]), int(s["step"])) for s in steps]


def test_what_nobody_has_passed_on_is_not_lost() -> None:
    old = table([4, 5, 6], [(4, 1), (5, 1), (6, 1)], 1)
    new = table([6, 4], [(6, 2)], 2)  # rank 5 is gone, and the others changed places
    assert steps_of(_with_rows_of(new, old)) == [(4, 1), (6, 1), (6, 2)]
    bare = msgspec.structs.replace(new, ranks=b"", steps=b"")
    assert steps_of(_with_rows_of(bare, old)) == []


def test_a_sheet_that_cannot_be_passed_on_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [ValueError("a defect"), MemoryError()]

    def merged(*args: Any, **other: Any) -> NodeReport:
        if left:
            raise left.pop()
        return merge(*args, **other)

    monkeypatch.setattr("ckptd.monitor.daemon.forward.merge", merged)
    with running(tmp_path / "history") as root, forwarding(root.url) as (forwarder, _):
        with feeding(forwarder, ranks=16):
            until(lambda: reporting(root) == 16)
        assert forwarder.defects == 2


def test_health(tmp_path: Path) -> None:
    with forwarding("http://127.0.0.1:1") as (_, url):
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            assert msgspec.json.decode(answer.read())["forwards"]
