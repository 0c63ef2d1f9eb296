"""``/metrics`` of the daemon: a custom collector over the last round."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ckptd.daemon.collectives import COLLECTIVES, collective_families
from ckptd.daemon.elastic.meter import ELASTIC, elastic_families
from ckptd.daemon.rounds import STATUS, RoundResult
from ckptd.daemon.service import Service
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["MOST_RANKS", "NAMES", "exposition"]

MOST_RANKS = 512
"""Of a larger job only ranks that stand out have series of their own."""
_MOST_LINKS = 256
_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

NAMES = {
    "ckptd_rank_heartbeat_age_seconds": "Time since a rank's Python last ran",
    "ckptd_rank_progress_age_seconds": "Time since any counter of a rank moved",
    "ckptd_rank_self_seconds_per_step": "Median time of a step that a rank spends by itself",
    "ckptd_straggler_score": "Own time of a rank over that of its like",
    "ckptd_ranks": "Ranks by status",
    "ckptd_world_size": "Ranks that the job has",
    "ckptd_generation": "Newest generation of the job",
    "ckptd_step": "Step of the first and of the last rank",
    **COLLECTIVES,
    "ckptd_link_delay_ratio": "Delay of a suspected link over the usual one",
    "ckptd_verdicts_total": "Incidents opened, by class, action and whether it was enforced",
    "ckptd_incidents_open": "Incidents that are open, by class",
    "ckptd_sdc_mismatch_total": "Sets of replicas that did not agree in a step",
    "ckptd_detection_latency_seconds": "Age of an incident's first sign when it was opened",
    "ckptd_agent_up": "Whether a node's agent is heard of",
    "ckptd_agent_cpu_seconds_total": "CPU time that a node's agent has used",
    "ckptd_ring_overruns_total": "Calls that were overwritten before an agent read them",
    "ckptd_recorder_overhead_seconds_total": "Time that recording has cost the ranks of a node",
    "ckptd_messages_total": "Messages taken from agents",
    "ckptd_message_bytes_total": "Bytes of the messages taken",
    "ckptd_messages_refused_total": "Messages that were refused, by reason",
    "ckptd_round_cpu_seconds": "CPU time of the last round of the diagnosis",
    "ckptd_round_defects_total": "Rounds that failed by a defect of ckptd",
    "ckptd_history_errors_total": "Changes that the history file could not take",
    "ckptd_webhook_total": "Incidents sent to the webhook, by outcome",
    "ckptd_stream_clients": "Pages that follow live",
    **ELASTIC,
}
"""Every metric, with its help text."""


def exposition(service: Service) -> tuple[bytes, str]:
    """Return all metrics in Prometheus's text format, and the media type of that.

    Raises
    ------
    UsageError
        kind ``missing-package``: the extra ``monitor`` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST
    except ModuleNotFoundError as error:
        raise UsageError(
            "metrics need prometheus-client, which is not installed",
            kind="missing-package",
            hint="pip install 'ckptd[monitor]'",
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """What one scrape tells; it counts nothing itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        result = self._service.rounds.last
        yield from self._ranks()
        yield from self._job(result)
        yield from collective_families(self._service.collectives, self._service.names.kind_word)
        yield from self._incidents(result)
        yield from self._agents(result)
        elastic = self._service.elastic
        if elastic is not None:
            yield from elastic_families(elastic.meter, elastic.controller.connected)
        yield from self._self()

    def _ranks(self) -> Iterator[Metric]:
        with self._service.rounds.ranks_lock:
            ranks = self._service.rounds.ranks
            table, nodes = ranks.rows, list(ranks.nodes)
        counts = np.bincount(table["status"], minlength=len(STATUS))
        status = _gauge("ckptd_ranks", ["status"])
        for name, count in zip(STATUS, counts.tolist(), strict=True):
            status.add_metric([name], count)
        yield status
        if len(table) > MOST_RANKS:
            table = table[table["status"] != STATUS.index("ok")]
            table = table[np.argsort(table["status"] == STATUS.index("waiting"), kind="stable")]
            table = table[:MOST_RANKS]
        columns = {
            "ckptd_rank_heartbeat_age_seconds": "heartbeat_age_s",
            "ckptd_rank_progress_age_seconds": "progress_age_s",
            "ckptd_rank_self_seconds_per_step": "self_s",
            "ckptd_straggler_score": "score",
        }
        labels = [[str(r), nodes[n]] for r, n in table[["rank", "node"]].tolist()]
        for name, column in columns.items():
            family = _gauge(name, ["rank", "node"])
            for label, value in zip(labels, table[column].tolist(), strict=True):
                if value == value:
                    family.add_metric(label, value)
            yield family

    def _job(self, result: RoundResult) -> Iterator[Metric]:
        service = self._service
        yield _one("ckptd_world_size", result.job.world)
        yield _one("ckptd_generation", service.generations.newest)
        steps = result.steps
        family = _gauge("ckptd_step", ["of"])
        if len(steps):
            family.add_metric(["first"], int(steps.max()))
            family.add_metric(["last"], int(steps.min()))
        yield family
        links = _gauge("ckptd_link_delay_ratio", ["src", "dst"])
        if result.links is not None:
            nodes = result.links.nodes
            slowest = sorted(result.links.edges, key=lambda e: -e[3])[:_MOST_LINKS]
            for source, to, _, ratio in slowest:
                if ratio >= 1.5:
                    links.add_metric([nodes[source], nodes[to]], ratio)
        yield links

    def _incidents(self, result: RoundResult) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        service = self._service
        verdicts = _counter("ckptd_verdicts_total", ["class", "action", "enforced"])
        for labels, count in sorted(service.verdicts.items()):
            verdicts.add_metric(list(labels), count)
        yield verdicts
        open_ = _gauge("ckptd_incidents_open", ["class"])
        for kind, count in sorted(Counter(str(i.kind) for i in result.open).items()):
            open_.add_metric([kind], count)
        yield open_
        mismatches = _counter("ckptd_sdc_mismatch_total", [])
        mismatches.add_metric([], result.mismatches)
        yield mismatches
        latencies = service.latencies
        counts = [0] * (len(_BUCKETS_S) + 1)
        for seconds in latencies:
            counts[bisect_left(_BUCKETS_S, seconds)] += 1
        buckets = [
            (bound, float(sum(counts[: i + 1])))
            for i, bound in enumerate((*map(str, _BUCKETS_S), "+Inf"))
        ]
        name = "ckptd_detection_latency_seconds"
        yield HistogramMetricFamily(name, NAMES[name], buckets=buckets, sum_value=sum(latencies))

    def _agents(self, result: RoundResult) -> Iterator[Metric]:
        up = _gauge("ckptd_agent_up", ["node"])
        cpu = _counter("ckptd_agent_cpu_seconds_total", ["node"])
        overruns = _counter("ckptd_ring_overruns_total", ["node"])
        recorder = _counter("ckptd_recorder_overhead_seconds_total", ["node"])
        for agent in result.agents:
            up.add_metric([agent.node], int(not agent.silent))
            cpu.add_metric([agent.node], agent.state.cpu_s)
            overruns.add_metric([agent.node], agent.state.overruns)
            recorder.add_metric([agent.node], agent.state.recorder_s)
        yield from (up, cpu, overruns, recorder)

    def _self(self) -> Iterator[Metric]:
        service = self._service
        counts = service.ingest.counts
        tables = (
            ("ckptd_messages_total", "kind", counts.taken),
            ("ckptd_message_bytes_total", "kind", counts.bytes),
            ("ckptd_messages_refused_total", "reason", counts.refused),
        )
        for name, label, values in tables:
            family = _counter(name, [label])
            for key, count in sorted(values.copy().items()):
                family.add_metric([key], count)
            yield family
        yield _one("ckptd_round_cpu_seconds", service.rounds.last.round_ms / 1e3)
        for name, count in (
            ("ckptd_round_defects_total", service.rounds.defects),
            ("ckptd_history_errors_total", service.history.errors),
        ):
            family = _counter(name, [])
            family.add_metric([], count)
            yield family
        if service.webhook is not None:
            family = _counter("ckptd_webhook_total", ["outcome"])
            sent = service.webhook.sent
            for outcome in ("done", "failed", "dropped"):
                family.add_metric([outcome], getattr(sent, outcome))
            yield family
        yield _one("ckptd_stream_clients", len(service.hub))


def _one(name: str, value: float) -> GaugeMetricFamily:
    family = _gauge(name, [])
    family.add_metric([], value)
    return family


def _gauge(name: str, labels: list[str]) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, NAMES[name], labels=labels)


def _counter(name: str, labels: list[str]) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name.removesuffix("_total"), NAMES[name], labels=labels)
