from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd.errors import UsageError
from ckptd.monitor.daemon import metrics as module
from ckptd.monitor.daemon.metrics import NAMES, exposition
from ckptd_simulated.feed import PlantedAt
from tests.monitor.daemon.daemons import Running, fed, running
from tests.processes import until

PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()


def samples(daemon: Running) -> dict[str, dict[tuple[str, ...], float]]:
    answer = daemon.ask("GET", "/metrics", token=False)
    assert answer.headers["content-type"].startswith("text/plain")
    out: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = tuple(sample.labels.values())
            assert labels not in out.setdefault(sample.name, {}), "told twice"
            out[sample.name][labels] = sample.value
    return out


def test_figures_of_a_job_with_an_incident(tmp_path: Path) -> None:
    with running(tmp_path / "history") as daemon:
        with fed(daemon, 8, PlantedAt("crash", 5, 1.0)):
            until(lambda: daemon.service.rounds.last.open)
            told = samples(daemon)
    assert told["ckptd_world_size"][()] == 8
    assert told["ckptd_verdicts_total"] == {("log", "crash", "false"): 1}
    assert told["ckptd_incidents_open"] == {("crash",): 1}
    assert told["ckptd_detection_latency_seconds_bucket"][("+Inf",)] == 1
    assert told["ckptd_ranks"]["dead",] == 1
    assert sum(told["ckptd_ranks"].values()) == 8
    assert set(told["ckptd_agent_up"].values()) == {1}
    assert told["ckptd_messages_total"]["sheet",] > 0
    made = told["ckptd_collectives_total"]
    assert {("tp", "all_reduce"), ("dp", "all_reduce")} <= made.keys()
    timed = told["ckptd_collective_seconds_count"]
    assert timed["tp", "all_reduce", "64MiB"] == made["tp", "all_reduce"] > 0
    buckets = told["ckptd_collective_seconds_bucket"]
    ends = {(kind, *rest): n for (kind, le, *rest), n in buckets.items() if le == "+Inf"}
    assert ends == timed
    assert told["ckptd_collective_bus_bytes_per_second"]["dp", "all_reduce"] > 1e6
    assert told["ckptd_sdc_mismatch_total"] == {(): 0}
    assert set(told["ckptd_recorder_overhead_seconds_total"].values()) == {0}
    assert len(told["ckptd_rank_heartbeat_age_seconds"]) == 8


def test_a_large_job_has_series_of_those_alone_that_stand_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_RANKS", 4)
    with running(tmp_path / "history") as daemon:
        with fed(daemon, 16, PlantedAt("crash", 5, 1.0)):
            until(lambda: daemon.service.rounds.last.open)
            told = until(lambda: (now := samples(daemon))["ckptd_ranks"]["dead",] and now)
    ages = told["ckptd_rank_heartbeat_age_seconds"]
    assert len(ages) <= 4
    assert any("5" in labels for labels in ages)


def test_names_are_on_the_page() -> None:
    said = set(re.findall(r"^\| `(ckptd_\w+)`", PAGE.split("## Of a daemon")[1], re.MULTILINE))
    assert said == set(NAMES)


def test_every_name_is_told(daemon: Running) -> None:
    text = exposition(daemon.service)[0].decode()
    told = set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE))
    assert told | {"ckptd_webhook_total"} | {
        n for n in NAMES if n.startswith("ckptd_elastic_")
    } == set(NAMES)


def test_without_the_package(daemon: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(UsageError) as caught:
        exposition(daemon.service)
    assert caught.value.kind == "missing-package"
