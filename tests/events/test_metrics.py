"""Metrics: the page and the code agree, and figures are those of the events."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd import events
from ckptd.errors import UsageError
from ckptd.events import (
    LoadDone,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    Span,
    VersionApplied,
    VersionPublished,
)
from ckptd.events import metrics as module
from ckptd.events.metrics import BUCKETS_S, NAMES, Metrics

PAGE = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
PAGE = PAGE.partition("## Of a daemon")[0]  # tests.monitor.daemon.test_metrics.py has the rest
ROWS = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)))
    for name, kind, labels in re.findall(
        r"^\| `(ckptd_\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE
    )
}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    yield made
    made.close()


def span(name: str, seconds: float, tier: str = "local") -> Span:
    took = int(seconds * 1e9)
    return Span(
        name=name,
        step=1,
        generation=1,
        rank=0,
        tier=tier,
        start_ns=0,
        duration_ns=2 * took,
        busy_ns=took,
    )


def durable(step: int, tier: str = "local", nbytes: int = 100) -> SaveDurable:
    return SaveDurable(step=step, generation=1, rank=0, at_ns=step * 10**9, tier=tier, bytes=nbytes)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return values by name and sorted label values."""
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(metrics.text())
        for s in family.samples
    }


def everything() -> None:
    for name, seconds in (("call", 0.25), ("gate_wait", 0.5), ("write", 2.0), ("fetch", 3.0)):
        events.emit(span(name, seconds))
    events.emit(msgspec.structs.replace(span("part", 0.125), referred=40))
    events.emit(durable(7))
    events.emit(SaveFailed(step=8, generation=1, rank=0, at_ns=1, tier="local"))
    events.emit(SaveSkipped(step=9, generation=1, rank=0, at_ns=1))
    events.emit(LoadDone(step=7, generation=1, rank=0, at_ns=1, duration_ns=1, bytes=30))
    events.emit(VersionPublished(step=5, generation=0, rank=0, at_ns=1, number=1, bytes=20))
    events.emit(VersionPublished(step=6, generation=0, rank=0, at_ns=1, number=2, skipped="full"))
    events.emit(
        VersionApplied(
            step=5, generation=0, rank=0, at_ns=1, number=1, bytes=12, lag_ns=250_000_000
        )
    )


def test_the_page_lists_what_there_is(metrics: Metrics) -> None:
    everything()
    found = {}
    for family in metrics.collect():
        name = family.name + "_total" * (family.type == "counter")
        labels = {label for s in family.samples for label in s.labels} - {"le"}
        found[name] = (family.type, labels)
    assert found == ROWS
    assert set(NAMES) == set(ROWS)


def test_figures(metrics: Metrics) -> None:
    everything()
    events.emit(durable(9, nbytes=11))
    events.emit(durable(3, tier="remote"))
    found = samples(metrics)
    assert found["ckptd_saves_total", "durable", "local"] == 2
    assert found["ckptd_saves_total", "durable", "remote"] == 1
    assert found["ckptd_saves_total", "failed", "local"] == 1
    assert found["ckptd_saves_total", "skipped", ""] == 1
    assert found["ckptd_saved_bytes_total", "local"] == 111
    assert found["ckptd_referred_bytes_total", "local"] == 40
    assert found[("ckptd_stall_seconds_total",)] == 0.75
    assert found["ckptd_last_durable_step", "local"] == 9
    assert found["ckptd_last_durable_timestamp_seconds", "local"] == 9
    assert found[("ckptd_loads_total",)] == 1
    assert found[("ckptd_loaded_bytes_total",)] == 30
    for outcome, step, nbytes in (("published", 5, 20), ("skipped", 6, 0), ("applied", 5, 12)):
        assert found["ckptd_versions_total", outcome] == 1
        assert found["ckptd_version_bytes_total", outcome] == nbytes
        assert found["ckptd_last_version_step", outcome] == step
    assert found[("ckptd_version_lag_seconds",)] == 0.25
    assert found["ckptd_save_seconds_sum", "write", "local"] == 2.0
    assert found["ckptd_load_seconds_count", "fetch", "local"] == 1


def test_buckets_are_cumulative(metrics: Metrics) -> None:
    for seconds in (0.001, 0.0011, 5.0, 9999.0):
        events.emit(span("write", seconds))
    found = samples(metrics)
    counts = [found["ckptd_save_seconds_bucket", str(b), "write", "local"] for b in BUCKETS_S]
    assert counts[:2] == [1, 2]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert found["ckptd_save_seconds_bucket", "+Inf", "write", "local"] == 4


def test_events_of_other_processes_count(metrics: Metrics) -> None:
    events.relay(durable(4))
    assert samples(metrics)["ckptd_last_durable_step", "local"] == 4


def test_nobody_waits_while_figures_are_read(metrics: Metrics) -> None:
    with metrics._lock:  # as a signal handler finds it that interrupts a scrape
        for i in range(3000):
            events.emit(durable(i))
    assert samples(metrics)["ckptd_saves_total", "durable", "local"] == 3000


def test_memory_is_bounded_and_what_is_lacking_is_counted(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 50)
    monkeypatch.setattr(module, "_FOLD_AT", 1000)
    for i in range(80):
        events.emit(durable(i))
    found = samples(metrics)
    assert found["ckptd_saves_total", "durable", "local"] == 50
    assert found[("ckptd_events_dropped_total",)] == 30


def test_threads_lose_nothing(metrics: Metrics) -> None:
    def emit_many() -> None:
        for _ in range(2000):
            events.emit(durable(1))

    threads = [threading.Thread(target=emit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = samples(metrics)
    dropped = found[("ckptd_events_dropped_total",)]
    assert found["ckptd_saves_total", "durable", "local"] + dropped == 8000


def test_without_the_package_the_error_names_the_extra(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"ckptd\[metrics\]") as caught:
        metrics.text()
    assert caught.value.kind == "missing-package"
