"""Prometheus metrics of a process from its events: names, buckets, labels.

The names, with what they count: ``docs/reference/metrics.md``. Events are kept as they come and
added up when metrics are read, so that the training loop pays for an append and nothing else.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptd import events
from ckptd.errors import UsageError
from ckptd.events.event import (
    LOAD_PHASES,
    STALL_PHASES,
    AnyEvent,
    LoadDone,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    Span,
    VersionApplied,
    VersionPublished,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
NAMES = {
    "ckptd_save_seconds": "Time of a phase of a save in the activity itself",
    "ckptd_load_seconds": "Time of a phase of a load in the activity itself",
    "ckptd_saves_total": "Saves that ended, by outcome",
    "ckptd_loads_total": "Loads that filled the live state",
    "ckptd_saved_bytes_total": "Bytes of this rank in saves that became durable",
    "ckptd_referred_bytes_total": "Bytes of this rank that older checkpoints held already",
    "ckptd_loaded_bytes_total": "Bytes that loads wrote to this rank's buffers",
    "ckptd_stall_seconds_total": "Time that the training loop waited for saves",
    "ckptd_last_durable_step": "Step of the last save that became durable",
    "ckptd_last_durable_timestamp_seconds": "When that was, in seconds since 1970",
    "ckptd_versions_total": "Versions of the weights that were published, skipped or applied",
    "ckptd_version_bytes_total": "Bytes of this rank in them: copied into slots, or pulled",
    "ckptd_last_version_step": "Step of the last of them",
    "ckptd_version_lag_seconds": "From its publishing until it was applied, of the last one",
    "ckptd_events_dropped_total": "Events that these figures lack",
}
"""Every metric, with its help text."""

_FOLD_AT = 1024
_MOST_WAITING = 16384
_MOST_LABELS = 256


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        total, out = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


class Metrics:
    """Adds up events from when it is made until `close`; a collector for ``prometheus_client``.

    Its own process's events, and those that other processes hand on to it.
    """

    def __init__(self) -> None:
        self._waiting: deque[AnyEvent] = deque()
        self._lock = threading.Lock()
        self._dropped = 0
        self._phases: dict[tuple[str, str, str], _Histogram] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._saved: Counter[tuple[str]] = Counter()
        self._referred: Counter[tuple[str]] = Counter()
        self._last: dict[str, SaveDurable] = {}
        self._versions: Counter[tuple[str]] = Counter()
        self._version_bytes: Counter[tuple[str]] = Counter()
        self._version_steps: dict[tuple[str], int] = {}
        self._lag: dict[tuple[()], float] = {}
        self._stall_ns = 0
        self._loads = 0
        self._loaded = 0
        self._subscription = events.subscribe(self.observe, inline=True, relayed=True)

    def close(self) -> None:
        """Hear no more. Idempotent."""
        self._subscription.close()

    def observe(self, event: AnyEvent) -> None:
        """Take an event; never waits, also when called while these figures are being read."""
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(event)
        if len(self._waiting) >= _FOLD_AT and self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def registry(self) -> CollectorRegistry:
        """Return a registry of ``prometheus_client`` that holds these figures alone.

        Raises
        ------
        UsageError
            kind ``missing-package``: the extra ``metrics`` is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as error:
            raise UsageError(
                "metrics need prometheus-client, which is not installed",
                kind="missing-package",
                hint="pip install 'ckptd[metrics]'",
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def text(self) -> str:
        """Return all metrics in Prometheus's text format; raises as `registry`."""
        registry = self.registry()
        from prometheus_client import generate_latest

        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; what ``prometheus_client`` calls."""
        with self._lock:
            self._fold()
            found = [*self._histograms(), *self._counters(), *self._gauges()]
        yield from found

    # -- adding up -------------------------------------------------------------------------------

    def _fold(self) -> None:
        while self._waiting:
            self._add(self._waiting.popleft())

    def _add(self, event: AnyEvent) -> None:
        if isinstance(event, Span):
            self._add_span(event)
        elif isinstance(event, SaveDurable):
            self._outcomes["durable", event.tier] += 1
            self._saved[event.tier,] += event.bytes
            self._last[event.tier] = event
        elif isinstance(event, SaveFailed):
            self._outcomes["failed", event.tier] += 1
        elif isinstance(event, SaveSkipped):
            self._outcomes["skipped", ""] += 1
        elif isinstance(event, LoadDone):
            self._loads += 1
            self._loaded += event.bytes
        elif isinstance(event, VersionPublished):
            self._add_version("skipped" if event.skipped else "published", event)
        elif isinstance(event, VersionApplied):
            self._add_version("applied", event)
            self._version_bytes["received",] += event.received
            self._lag[()] = event.lag_ns / 1e9

    def _add_version(self, outcome: str, event: VersionPublished | VersionApplied) -> None:
        self._versions[outcome,] += 1
        self._version_bytes[outcome,] += event.bytes
        self._version_steps[outcome,] = event.step

    def _add_span(self, span: Span) -> None:
        kind = "load" if span.name in LOAD_PHASES else "save"
        key = (kind, span.name, span.tier)
        if key in self._phases or len(self._phases) < _MOST_LABELS:
            self._phases.setdefault(key, _Histogram()).add(span.busy_ns / 1e9)
        if span.name == "part":
            self._referred[span.tier,] += span.referred
        if span.name in STALL_PHASES:
            self._stall_ns += span.busy_ns

    # -- giving out ------------------------------------------------------------------------------

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        for kind in ("save", "load"):
            name = f"ckptd_{kind}_seconds"
            family = HistogramMetricFamily(name, NAMES[name], labels=["phase", "tier"])
            for (of, phase, tier), histogram in sorted(self._phases.items(), key=lambda i: i[0]):
                if of == kind:
                    family.add_metric([phase, tier], histogram.buckets(), histogram.sum)
            yield family

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counted

        yield _family(Counted, "ckptd_saves_total", self._outcomes, "outcome", "tier")
        yield _family(Counted, "ckptd_saved_bytes_total", self._saved, "tier")
        yield _family(Counted, "ckptd_referred_bytes_total", self._referred, "tier")
        yield _family(Counted, "ckptd_versions_total", self._versions, "outcome")
        yield _family(Counted, "ckptd_version_bytes_total", self._version_bytes, "outcome")
        for name, value in (
            ("ckptd_stall_seconds_total", self._stall_ns / 1e9),
            ("ckptd_loads_total", self._loads),
            ("ckptd_loaded_bytes_total", self._loaded),
            ("ckptd_events_dropped_total", self._dropped),
        ):
            yield _family(Counted, name, {(): value})

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        steps = {(t,): e.step for t, e in self._last.items()}
        yield _family(GaugeMetricFamily, "ckptd_last_durable_step", steps, "tier")
        times = {(t,): e.at_ns / 1e9 for t, e in self._last.items()}
        yield _family(GaugeMetricFamily, "ckptd_last_durable_timestamp_seconds", times, "tier")
        found = self._version_steps
        yield _family(GaugeMetricFamily, "ckptd_last_version_step", found, "outcome")
        yield _family(GaugeMetricFamily, "ckptd_version_lag_seconds", self._lag)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Metric:
    family = kind(name, NAMES[name], labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
