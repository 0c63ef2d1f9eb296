"""What metrics tell of a controller: counters that outlive the list of its last recoveries."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptd.elastic.states import State
from ckptd.elastic.wire import NodeRow, Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["ELASTIC", "PARTS", "Meter", "elastic_families", "node_state", "part_of"]

ELASTIC = {
    "ckptd_elastic_controller_up": "Whether the daemon is connected to the job's controller",
    "ckptd_elastic_state": "1 for the state that the controller is in, 0 for the others",
    "ckptd_elastic_generation": "Newest generation that the controller has begun or fenced",
    "ckptd_elastic_committed_step": "Last step that the controller knows to be committed",
    "ckptd_elastic_recoveries_total": "Recoveries, by level and by class of their cause",
    "ckptd_elastic_recovery_seconds": "Time that a part of a recovery took",
    "ckptd_elastic_steps_lost_total": "Steps that recoveries had to make again",
    "ckptd_elastic_goodput_seconds_total": "Time of the job by what it went into",
    "ckptd_elastic_nodes": "Nodes that the controller knows, by state",
}
"""Every metric of a job with a controller, with its help text."""

PARTS = (
    "detect",
    "fence",
    "plan",
    "spawn",
    "import",
    "init",
    "load",
    "first_step",
    "again",
    "parked",
    "total",
)
"""Parts of a recovery, in their order, and all of it."""

_BUCKETS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_UNDECIDED = "training"
"""Becomes useful or lost with the next commit or fault; no counter may go back."""
_NODE_STATES = ("running", "spare", "out", "gone")
_MOST_KNOWN = 1 << 12
_SETTLED_S = 1.0
"""Marks of the slowest node may still come so long after a recovery."""
_CLASSES = (
    ("ended with", "crash"),
    ("is gone", "node"),
    ("nothing is heard", "node"),
    ("came back", "node"),
    ("lost", "node"),
    ("hang", "hang"),
    ("deadlock", "deadlock"),
    ("desync", "desync"),
    ("mismatch", "mismatch"),
    ("slow", "slow"),
    ("corruption", "corruption"),
    ("growing", "growth"),
    ("collective", "broken"),
    ("no step was", "no-step"),
    ("controller", "controller"),
    ("order", "order"),
    ("notice", "notice"),
    ("taken away", "notice"),
)


def cause_class(text: str) -> str:
    """Return the class of a recovery's cause: its words name nodes, which labels must not."""
    lowered = text.lower()
    return next((word for sign, word in _CLASSES if sign in lowered), "other")


def part_of(recovery: Mapping[str, Any], part: str) -> float | None:
    """Return the seconds of a part of a recovery; None where they are not known."""
    value = recovery.get(part)
    return float(value) if isinstance(value, int | float) else None


def node_state(row: NodeRow) -> str:
    """Return the word for a node's state: ``running``, ``spare``, ``out`` or ``gone``."""
    if not row.up:
        return "gone"
    if row.out_until_s is None or row.out_until_s > 0:
        return "out"
    return "spare" if row.spare else "running"


class Meter:
    """Counts what statuses tell; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Any, None] = {}
        self.recoveries: Counter[tuple[str, str]] = Counter()
        self.parts: dict[str, list[float]] = {}
        """By part: how many took up to each bound, then how many more; last the sum."""
        self.steps_lost = 0
        self.status: Status | None = None

    def take(self, status: Status) -> None:
        """Take a status; a recovery counts once, when nothing is told of it any more."""
        with self._lock:
            self.status = status
            for recovery in status.recoveries:
                key = recovery.get("to")
                young = status.at - (part_of(recovery, "at") or 0.0) < _SETTLED_S
                if key in self._seen or (young and not status.ended):
                    continue
                self._seen[key] = None
                self._count(recovery)
            while len(self._seen) > _MOST_KNOWN:
                del self._seen[next(iter(self._seen))]

    def _count(self, recovery: Mapping[str, Any]) -> None:
        cause = cause_class(str(recovery.get("cause", "")))
        self.recoveries[str(recovery.get("level", "")), cause] += 1
        self.steps_lost += int(recovery.get("steps_lost") or 0)
        for part in PARTS:
            seconds = part_of(recovery, part)
            if seconds is not None:
                counts = self.parts.setdefault(part, [0.0] * (len(_BUCKETS_S) + 2))
                counts[bisect_left(_BUCKETS_S, seconds)] += 1
                counts[-1] += seconds


def elastic_families(meter: Meter, connected: bool) -> Iterator[Metric]:
    """Yield the metrics of a job with a controller; those of its status once there is one."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    def gauge(name: str, labels: list[str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, ELASTIC[name], labels=labels)

    def counter(name: str, labels: list[str]) -> CounterMetricFamily:
        return CounterMetricFamily(name.removesuffix("_total"), ELASTIC[name], labels=labels)

    up = gauge("ckptd_elastic_controller_up", [])
    up.add_metric([], int(connected))
    yield up
    status = meter.status
    if status is None:
        return
    states = gauge("ckptd_elastic_state", ["state"])
    for state in State:
        states.add_metric([str(state)], int(str(state) == status.state))
    yield states
    for name, value in (
        ("ckptd_elastic_generation", status.generation),
        ("ckptd_elastic_committed_step", status.step),
    ):
        family = gauge(name, [])
        family.add_metric([], value)
        yield family
    nodes = gauge("ckptd_elastic_nodes", ["state"])
    counts = Counter(node_state(row) for row in status.nodes)
    for word in _NODE_STATES:
        nodes.add_metric([word], counts[word])
    yield nodes
    goodput = counter("ckptd_elastic_goodput_seconds_total", ["kind"])
    for kind, seconds in sorted(status.goodput.items()):
        if kind != _UNDECIDED:
            goodput.add_metric([kind], seconds)
    yield goodput
    recoveries = counter("ckptd_elastic_recoveries_total", ["level", "cause"])
    for labels, count in sorted(meter.recoveries.copy().items()):
        recoveries.add_metric(list(labels), count)
    yield recoveries
    lost = counter("ckptd_elastic_steps_lost_total", [])
    lost.add_metric([], meter.steps_lost)
    yield lost
    name = "ckptd_elastic_recovery_seconds"
    took = HistogramMetricFamily(name, ELASTIC[name], labels=["part"])
    for part, told in sorted(meter.parts.copy().items()):
        bounds = [*map(str, _BUCKETS_S), "+Inf"]
        buckets = [(bound, sum(told[: i + 1])) for i, bound in enumerate(bounds)]
        took.add_metric([part], buckets, told[-1])
    yield took
