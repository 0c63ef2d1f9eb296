"""Prometheus metrics of the daemon (``/metrics``): names, labels, buckets, the most ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckptd.elastic.control.states import State
from ckptd.elastic.messages import NodeRow
from ckptd.errors import UsageError
from ckptd.monitor.collectives import BUS_BYTES, CALLS, SECONDS, SIZES, TIMES, TIMES_S, CallTable
from ckptd.monitor.daemon.lifetime import RECOVERY_BUCKETS_S, RecoveryCounts
from ckptd.monitor.daemon.rounds import STATUS, RoundResult
from ckptd.monitor.daemon.service import Service
from ckptd.monitor.stats import Array

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

MOST_RANKS = 512
"""Of a larger job only ranks that stand out have series of their own."""
_MOST_LINKS = 256
_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_COLLECTIVES = "ckptd_collectives_total"
_COLLECTIVE_SECONDS = "ckptd_collective_seconds"
_COLLECTIVE_BUS = "ckptd_collective_bus_bytes_per_second"
SIZE_LABELS = (
    *(
        f"{s >> k}{u}"
        for s in SIZES
        for k, u in ((10, "KiB"), (20, "MiB"), (30, "GiB"))
        if 1 <= s >> k < 1024
    ),
    "+Inf",
)
"""Upper bounds of the size buckets, as labels."""
_UNDECIDED = "training"
"""Becomes useful or lost with the next commit or fault; no counter may go back."""
_AGENT_COUNTS = {
    "ckptd_agent_cpu_seconds_total": "cpu_s",
    "ckptd_ring_overruns_total": "overruns",
    "ckptd_recorder_overhead_seconds_total": "recorder_s",
}
"""By the metric: the field of `ckptd.monitor.report.AgentState`."""
_NODE_STATES = ("running", "spare", "out", "gone")

NAMES = {
    "ckptd_rank_heartbeat_age_seconds": "Time since a rank's Python last ran",
    "ckptd_rank_progress_age_seconds": "Time since any counter of a rank moved",
    "ckptd_rank_self_seconds_per_step": "Median time of a step that a rank spends by itself",
    "ckptd_straggler_score": "Own time of a rank relative to its peers",
    "ckptd_ranks": "Ranks by status",
    "ckptd_world_size": "Ranks that the job has",
    "ckptd_generation": "Newest generation of the job",
    "ckptd_step": "Step of the first and of the last rank",
    _COLLECTIVES: "Collectives made, each counted once",
    _COLLECTIVE_SECONDS: "Time of a collective, that of its last member where known",
    _COLLECTIVE_BUS: "Bus bandwidth within collectives, of the last minute",
    "ckptd_link_delay_ratio": "Delay of a suspected link over the usual one",
    "ckptd_verdicts_total": "Incidents opened, by class, action and whether it was enforced",
    "ckptd_incidents_open": "Incidents that are open, by class",
    "ckptd_sdc_mismatch_total": "Sets of replicas that did not agree in a step",
    "ckptd_detection_latency_seconds": "Age of an incident's first sign when it was opened",
    "ckptd_agent_up": "Whether a node's agent reports",
    "ckptd_agent_cpu_seconds_total": "CPU time that a node's agent has used",
    "ckptd_ring_overruns_total": "Calls that were overwritten before an agent read them",
    "ckptd_recorder_overhead_seconds_total": "Time that recording has cost the ranks of a node",
    "ckptd_messages_total": "Messages received from agents",
    "ckptd_message_bytes_total": "Bytes of the messages received",
    "ckptd_messages_refused_total": "Messages that were refused, by reason",
    "ckptd_round_cpu_seconds": "CPU time of the last round of the diagnosis",
    "ckptd_round_defects_total": "Rounds that failed by a bug of ckptd",
    "ckptd_history_errors_total": "Changes that could not be written to the history file",
    "ckptd_webhook_total": "Incidents sent to the webhook, by outcome",
    "ckptd_stream_clients": "Pages that follow live",
    "ckptd_elastic_controller_up": "Whether the daemon is connected to the job's controller",
    "ckptd_elastic_state": "1 for the state that the controller is in, 0 for the others",
    "ckptd_elastic_generation": "Newest generation that the controller has begun or fenced",
    "ckptd_elastic_committed_step": "Last step that the controller knows to be committed",
    "ckptd_elastic_recoveries_total": "Recoveries, by level and by class of their cause",
    "ckptd_elastic_recovery_seconds": "Time that a part of a recovery took",
    "ckptd_elastic_steps_lost_total": "Steps that were repeated after recoveries",
    "ckptd_elastic_goodput_seconds_total": "Time of the job by what it went into",
    "ckptd_elastic_nodes": "Nodes that the controller knows, by state",
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
    """Collects the metrics of one scrape; it counts nothing itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        result = self._service.rounds.last
        yield from self._ranks()
        yield from self._job(result)
        yield from _collective_families(self._service.collectives, self._service.names.kind_word)
        yield from self._incidents(result)
        yield from self._agents(result)
        responder = self._service.responder
        if responder is not None:
            yield from _elastic_families(responder.counts, responder.controller.connected)
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
        for agent in result.agents:
            up.add_metric([agent.node], int(not agent.silent))
        yield up
        for name, count in _AGENT_COUNTS.items():
            family = _counter(name, ["node"])
            for agent in result.agents:
                family.add_metric([agent.node], getattr(agent.state, count))
            yield family

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


# --- collectives ----------------------------------------------------------------------------------


def _collective_families(book: CallTable, kind_word: Callable[[str], str]) -> Iterator[Metric]:
    """Yield the metrics of what `book` has added up.

    Parameters
    ----------
    book
        As the daemon filled it.
    kind_word
        Returns the word for a kind of group as a program says it.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    keys, values, recent = book.read()
    # Different words of programs may be one kind here.
    labels = [(op.decode(), kind_word(kind.decode()), SIZE_LABELS[size]) for op, kind, size in keys]
    total = CounterMetricFamily(
        _COLLECTIVES.removesuffix("_total"), NAMES[_COLLECTIVES], labels=["op", "group_kind"]
    )
    for label, row in _summed([label[:2] for label in labels], values):
        total.add_metric(label, row[CALLS])
    yield total
    times = HistogramMetricFamily(
        _COLLECTIVE_SECONDS, NAMES[_COLLECTIVE_SECONDS], labels=["op", "group_kind", "size"]
    )
    for label, row in _summed(labels, values):
        counts = np.cumsum(row[TIMES:]).tolist()
        if counts[-1] > 0:
            bounds = (*(f"{b:g}" for b in TIMES_S), "+Inf")
            times.add_metric(label, list(zip(bounds, counts, strict=True)), row[SECONDS])
    yield times
    bus = GaugeMetricFamily(_COLLECTIVE_BUS, NAMES[_COLLECTIVE_BUS], labels=["op", "group_kind"])
    for label, row in _summed([label[:2] for label in labels], recent):
        if row[BUS_BYTES] > 0 and row[SECONDS] > 0:
            bus.add_metric(label, row[BUS_BYTES] / row[SECONDS])
    yield bus


def _summed(
    labels: Sequence[tuple[str, ...]], values: Array
) -> Iterator[tuple[tuple[str, ...], Array]]:
    """Yield each label once, sorted, with the sum of its rows."""
    sums: dict[tuple[str, ...], Array] = {}
    for label, row in zip(labels, values, strict=True):
        sums[label] = sums[label] + row if label in sums else row
    yield from sorted(sums.items(), key=lambda item: item[0])


# --- a job with a controller ----------------------------------------------------------------------


def _node_state(row: NodeRow) -> str:
    """Return the word for a node's state: ``running``, ``spare``, ``out`` or ``gone``."""
    if not row.up:
        return "gone"
    if row.out_until_s is None or row.out_until_s > 0:
        return "out"
    return "spare" if row.spare else "running"


def _elastic_families(counts: RecoveryCounts, connected: bool) -> Iterator[Metric]:
    """Yield the metrics of a job with a controller; those of its status once there is one."""
    from prometheus_client.core import HistogramMetricFamily

    up = _gauge("ckptd_elastic_controller_up", [])
    up.add_metric([], int(connected))
    yield up
    status = counts.status
    if status is None:
        return
    states = _gauge("ckptd_elastic_state", ["state"])
    for state in State:
        states.add_metric([str(state)], int(str(state) == status.state))
    yield states
    for name, value in (
        ("ckptd_elastic_generation", status.generation),
        ("ckptd_elastic_committed_step", status.step),
    ):
        family = _gauge(name, [])
        family.add_metric([], value)
        yield family
    nodes = _gauge("ckptd_elastic_nodes", ["state"])
    states_of = Counter(_node_state(row) for row in status.nodes)
    for word in _NODE_STATES:
        nodes.add_metric([word], states_of[word])
    yield nodes
    goodput = _counter("ckptd_elastic_goodput_seconds_total", ["kind"])
    for kind, seconds in sorted(status.goodput.items()):
        if kind != _UNDECIDED:
            goodput.add_metric([kind], seconds)
    yield goodput
    recoveries = _counter("ckptd_elastic_recoveries_total", ["level", "cause"])
    for labels, count in sorted(counts.recoveries.copy().items()):
        recoveries.add_metric(list(labels), count)
    yield recoveries
    lost = _counter("ckptd_elastic_steps_lost_total", [])
    lost.add_metric([], counts.steps_lost)
    yield lost
    name = "ckptd_elastic_recovery_seconds"
    took = HistogramMetricFamily(name, NAMES[name], labels=["part"])
    for part, spread in sorted(counts.parts.copy().items()):
        bounds = [*map(str, RECOVERY_BUCKETS_S), "+Inf"]
        buckets = [(bound, sum(spread[: i + 1])) for i, bound in enumerate(bounds)]
        took.add_metric([part], buckets, spread[-1])
    yield took
