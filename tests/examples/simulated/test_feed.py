from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptd.monitor.daemon.lifetime import RecordedSaves
from ckptd.monitor.daemon.trace import calls_of
from ckptd.monitor.incidents import Incident
from ckptd.monitor.report import EvidenceReport, NodeReport, unpack_evidence, unpack_report
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.watch import JobWatch
from ckptd_simulated.feed import EVERY_STEPS, PlantedAt, SimulatedSaves, Simulation, mesh_for

JOB = "j"


def watched(simulation: Simulation, seconds: int) -> tuple[JobWatch, list[Incident]]:
    """Feed a watch as a daemon does, without waiting; return what opened too."""
    watch = JobWatch(JOB, replace(WatchSettings(), settle_s=0.0))
    opened: list[Incident] = []
    for second in range(seconds):
        now = float(second)
        for source, body in simulation.sheets(now):
            watch.take(unpack_report(body), now)
            orders = watch.orders(source, now)
            found = simulation.found(source, orders, now)
            if found is not None:
                answer: EvidenceReport = unpack_evidence(found)
                watch.take_found(answer, now)
        opened += watch.round(now).opened
    return watch, opened


@pytest.mark.parametrize("ranks", [16, 128])
def test_slow_links_are_probed_and_named_within_twenty_seconds(ranks: int) -> None:
    mesh = mesh_for(ranks)
    simulation = Simulation(JOB, mesh, [PlantedAt("wire", 5, 10.0)])
    watch, opened = watched(simulation, 20)
    named = [(i.kind, [s.name for s in i.verdict.suspects]) for i in opened]
    assert named == [("slow link", [f"n{5 // mesh.per_node}"])]
    assert watch.links is not None
    assert len(watch.links.nodes) == mesh.nodes


def test_a_job_without_faults_has_no_incident() -> None:
    watch, opened = watched(Simulation(JOB, mesh_for(128)), 30)
    assert opened == []
    assert watch.links is None


def test_calls_that_were_open_end_in_the_next_sheet() -> None:
    simulation = Simulation(JOB, mesh_for(128))
    sheets: list[list[NodeReport]] = [
        [unpack_report(body) for _, body in simulation.sheets(float(second))] for second in range(3)
    ]
    ranks = np.arange(128)
    first, second = (
        np.concatenate([calls_of(sheet, ranks) for sheet in each]) for each in sheets[:2]
    )
    keys = ("row", "group", "seq")
    was_open = {tuple(c[k] for k in keys) for c in first[np.isnan(first["end"])]}
    ended = {tuple(c[k] for k in keys) for c in second[np.isfinite(second["end"])]}
    assert was_open
    assert was_open <= ended
    assert (np.isnan(second["end"]) | (second["end"] >= second["start"])).all()


def test_after_a_restart_the_job_goes_on_from_its_last_save() -> None:
    simulation = Simulation(JOB, mesh_for(16), [PlantedAt("restart", 5, 5.0)])
    watch, opened = watched(simulation, 15)
    assert [i.kind for i in opened] == ["crash"]
    assert watch.generation == 1
    steps = watch.job(15.0).ranks["step"]
    assert (steps >= 2 * EVERY_STEPS).all()
    assert (steps < 2 * EVERY_STEPS + 15).all()


def test_saves_are_recorded_once_each(tmp_path: Path) -> None:
    saves = SimulatedSaves(tmp_path, 16)
    for step in range(100, 260, 4):
        saves.reach(step, 0)
    saves.close()
    document = RecordedSaves([str(tmp_path)]).document()
    assert document.problems == []
    assert [(s.step, s.outcome) for s in document.saves] == [
        (100, "durable"),
        (150, "durable"),
        (200, "durable"),
        (250, "durable"),
    ]
    newest = {t.tier: t.last_step for t in document.tiers}
    assert newest == {"local": 250, "remote": 200}
    assert set(document.saves[0].stalls_s) == {"call", "gate_wait"}
