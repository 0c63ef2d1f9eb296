"""Suspects: ranks, or the node that holds most of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Suspect, SuspectKind


def nodes_behind(job: JobView, rows: Array) -> list[int]:
    """Return nodes of which at least half of the reporting ranks, and at least two, are `rows`."""
    every = np.bincount(job.ranks["node"], minlength=len(job.nodes))
    some = np.bincount(job.ranks["node"][rows], minlength=len(job.nodes))
    return [int(n) for n in np.flatnonzero((some >= 2) & (2 * some >= every))]


def rank_suspects(
    job: JobView, rows: Array, confidence: float, details: Sequence[str] = ()
) -> tuple[Suspect, ...]:
    """Return `rows` as suspects, preceded by the nodes that hold most of their ranks.

    In a job that has one node only, a node would say nothing.
    """
    behind = nodes_behind(job, rows) if len(job.nodes) > 1 else []
    nodes = [
        Suspect(SuspectKind.NODE, job.nodes[n], confidence, "at least half of its ranks")
        for n in behind
    ]
    texts = list(details) or [""] * len(rows)
    ranks = [
        Suspect(SuspectKind.RANK, str(job.ranks["rank"][row]), confidence, text)
        for row, text in zip(rows, texts, strict=True)
    ]
    return (*nodes, *ranks)
