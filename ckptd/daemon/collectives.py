"""Collectives as metrics: how many, how long, how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckptd.monitor.collectives import BUS_BYTES, CALLS, SECONDS, SIZES, TIMES, TIMES_S, Book
from ckptd.monitor.stats import Array

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["COLLECTIVES", "SIZE_LABELS", "collective_families"]

_TOTAL = "ckptd_collectives_total"
_SECONDS = "ckptd_collective_seconds"
_BUS = "ckptd_collective_bus_bytes_per_second"
COLLECTIVES = {
    _TOTAL: "Collectives made, each counted once",
    _SECONDS: "Time of a collective, that of its last member where known",
    _BUS: "Bus bandwidth within collectives, of the last minute",
}
"""Help texts by name."""
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


def collective_families(book: Book, kind_word: Callable[[str], str]) -> Iterator[Metric]:
    """Yield the metrics of what `book` has added up.

    Parameters
    ----------
    book
        As the daemon filled it.
    kind_word
        Returns the word for a kind of group as a program says it.
    """
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    keys, values, recent = book.read()
    # Different words of programs may be one kind here.
    labels = [(op.decode(), kind_word(kind.decode()), SIZE_LABELS[size]) for op, kind, size in keys]
    total = CounterMetricFamily(
        _TOTAL.removesuffix("_total"), COLLECTIVES[_TOTAL], labels=["op", "group_kind"]
    )
    for label, row in _summed([label[:2] for label in labels], values):
        total.add_metric(label, row[CALLS])
    yield total
    times = HistogramMetricFamily(
        _SECONDS, COLLECTIVES[_SECONDS], labels=["op", "group_kind", "size"]
    )
    for label, row in _summed(labels, values):
        counts = np.cumsum(row[TIMES:]).tolist()
        if counts[-1] > 0:
            bounds = (*(f"{b:g}" for b in TIMES_S), "+Inf")
            times.add_metric(label, list(zip(bounds, counts, strict=True)), row[SECONDS])
    yield times
    bus = GaugeMetricFamily(_BUS, COLLECTIVES[_BUS], labels=["op", "group_kind"])
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
