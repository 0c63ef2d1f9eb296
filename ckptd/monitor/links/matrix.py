"""A matrix of probe delays, read by point, row, column and node; the largest effect first.

A link may be probed several times: its delays count as one, which varies less than each of them.
`again` says which links are worth that: there are too many to probe all of them
often, and one round alone cannot tell a link of one and a half times the usual delay from chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

__all__ = ["Effect", "LinkLimits", "again", "effects", "slow_links"]


LEAST_SPREAD = 0.02
"""Delays vary by two in a hundred at least, whatever few probes show."""


@dataclass(frozen=True)
class LinkLimits:
    """Settings of the search for slow links.

    Attributes
    ----------
    ratio
        How many times the usual delay counts, of a row, a column or a node.
    point_ratio
        The same of a single link.
    z
        Robust standard deviations that a row, a column or a node must stand out by.
    point_z
        The same of a single link: there are many more of them.
    most
        Most effects taken from one matrix.
    echo
        A later effect that touches a node named before, and is not this share of it (in
        logarithms), may be its echo, as answers share queues: it is told as to be probed again.
    few
        Up to so many nodes, one slow node makes half of all links slow.
    share
        If more than this share of probes stands out, links are unequal by nature and nothing is
        said without `usual`.
    doubt
        Robust standard deviations above which a single link is worth another probe.
    doubt_line
        The same of a row or a column: all its links are.
    again
        Most links worth another probe.
    noise_s
        Added to all delays before they are compared, in seconds: what a node's own scheduler
        makes of a probe is no ratio. Real probes take it; 256 KiB between the cores of one machine
        take 90 us or 180 us, by chance.
    """

    ratio: float = 1.15
    point_ratio: float = 1.3
    z: float = 5.0
    point_z: float = 5.0
    most: int = 16
    echo: float = 0.5
    few: int = 8
    share: float = 0.55
    doubt: float = 2.0
    doubt_line: float = 3.0
    again: int = 256
    noise_s: float = 0.0


@dataclass(frozen=True)
class Effect:
    """One thing that makes delays longer.

    Attributes
    ----------
    target
        SENDER (a row), RECEIVER (a column), NODE (both) or LINK (a point).
    source, to
        Index of the node; -1 where it is not meant.
    ratio
        Times the usual delay.
    edges
        Links that show it.
    echo
        Whether it may be the echo of a larger one.
    """

    target: SuspectKind
    source: int
    to: int
    ratio: float
    edges: int
    echo: bool = False


def effects(
    source: Array,
    to: Array,
    seconds: Array,
    nodes: int,
    limits: LinkLimits | None = None,
    usual: Array | None = None,
) -> list[Effect]:
    """Return what makes links slow, largest first.

    Parameters
    ----------
    source, to
        Nodes of each probe, from 0 to `nodes` - 1; one source is to probe at a time. A link may
        occur several times.
    seconds
        Delay of each probe, the least of its repetitions; infinite if it did not come.
    nodes
        Nodes.
    limits
        Settings.
    usual
        Earlier delay of each probe's link, seconds, NaN where there is none; for links that are
        unequal by nature.
    """
    limits = limits or LinkLimits()
    links = _pooled(source, to, _logs(seconds, usual, limits.noise_s), nodes)
    base, spread = _centre(links, nodes <= limits.few)
    open_ = np.ones(len(links.logs), bool)
    found: list[Effect] = []
    while len(found) < limits.most and open_.sum() >= 3:
        rest = np.where(open_, links.logs - base, np.nan)
        best = _largest(links, rest, spread, nodes, limits)
        if best is None:
            break
        found.append(_judged(best, found, limits))
        open_ &= ~_hit(links, best)
    return [] if (~open_).sum() > limits.share * len(open_) else found


def again(
    source: Array,
    to: Array,
    seconds: Array,
    nodes: int,
    limits: LinkLimits | None = None,
    usual: Array | None = None,
) -> tuple[Array, Array]:
    """Return sources and targets of links to probe once more, likeliest first.

    What is found is to be given to `effects` together with the probes given here.
    """
    limits = limits or LinkLimits()
    links = _pooled(source, to, _logs(seconds, usual, limits.noise_s), nodes)
    if not len(links.logs):
        return links.source, links.to
    base, spread = _centre(links, nodes <= limits.few)
    rest = links.logs - base
    z = rest * np.sqrt(links.probes) / spread
    lines = [
        _stands_out(*_lines(rest, end, links.probes, nodes), spread, 0.0, limits.doubt_line)[end]
        for end in (links.source, links.to)
    ]
    # All links of a suspected line: of those that look well too, or it would look worse than it is.
    place = np.where(lines[0] | lines[1], np.inf, z)
    rows = np.argsort(-place, kind="stable")
    rows = rows[place[rows] > limits.doubt][: limits.again]
    return links.source[rows], links.to[rows]


@dataclass(frozen=True)
class _Links:
    """One element a link: its ends, the usual logarithm of its delays, and how many.

    The smaller of mean and median: one probe that was held up does not move the median, and the
    median of three is high already if the two were that made the link one to probe again.
    """

    source: Array
    to: Array
    logs: Array
    probes: Array


def _pooled(source: Array, to: Array, logs: Array, nodes: int) -> _Links:
    known = ~np.isnan(logs)
    link = source[known].astype(np.int64) * max(nodes, 1) + to[known]
    ids, codes, probes = np.unique(link, return_inverse=True, return_counts=True)
    usual = np.bincount(codes, logs[known], len(ids)) / probes
    if len(ids) < len(link):
        usual = np.minimum(usual, grouped_median(logs[known], codes, len(ids)))
    return _Links(ids // max(nodes, 1), ids % max(nodes, 1), usual, probes)


def _hit(links: _Links, effect: Effect) -> Array:
    """Return the links that an effect explains."""
    source, to = links.source == effect.source, links.to == effect.to
    if effect.target is SuspectKind.LINK:
        both: Array = source & to
        return both
    out: Array = {SuspectKind.SENDER: source, SuspectKind.RECEIVER: to}.get(
        effect.target, source | to
    )
    return out


def _centre(links: _Links, few: bool) -> tuple[float, float]:
    """Return the usual logarithm of a delay, and the standard deviation of one probe.

    Slow links only ever lengthen delays. Of few nodes half the links may be slow at once: then
    the faster ones alone say what is usual, by two quantiles of a normal distribution.
    """
    logs = links.logs
    if not len(logs):
        return 0.0, LEAST_SPREAD
    if few:
        low, high = np.quantile(logs, [0.1, 0.3])
        spread = max(float(high - low) / 0.757, LEAST_SPREAD)
        return float(high) + 0.524 * spread, spread
    base = float(np.median(logs))
    away = np.abs(logs - base) * np.sqrt(links.probes)
    return base, max(float(np.median(away)) * MAD_TO_SIGMA, LEAST_SPREAD)


def _logs(seconds: Array, usual: Array | None, noise_s: float) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(np.isinf(seconds), np.nan, seconds + noise_s))
        # A probe that never came is as slow as a hundred of the slowest that did.
        worst = np.nanmax(logs) + np.log(100) if (~np.isnan(logs)).any() else 0.0
        logs = np.where(np.isinf(seconds), worst, logs)
        if usual is not None:
            before = np.log(usual + noise_s)
            logs = logs - np.where(np.isfinite(before), before, np.nanmedian(before))
    logs[~np.isfinite(logs)] = np.nan
    return logs


def _largest(
    links: _Links, rest: Array, spread: float, nodes: int, limits: LinkLimits
) -> Effect | None:
    """Return the effect that explains most: a row or column before a point of it."""
    least = np.log(limits.ratio)
    rows, row_error = _lines(rest, links.source, links.probes, nodes)
    columns, column_error = _lines(rest, links.to, links.probes, nodes)
    row_slow = _stands_out(rows, row_error, spread, least, limits.z)
    column_slow = _stands_out(columns, column_error, spread, least, limits.z)
    # The other direction of a slow node may miss the bar by chance; it is not half as slow by it.
    likely_row = _stands_out(rows, row_error, spread, 0.5 * columns, limits.doubt_line)
    likely_column = _stands_out(columns, column_error, spread, 0.5 * rows, limits.doubt_line)
    both = (row_slow & likely_column) | (column_slow & likely_row)
    size = np.maximum(np.where(row_slow, rows, 0), np.where(column_slow, columns, 0))
    size = np.where(both, (np.nan_to_num(rows) + np.nan_to_num(columns)) / 2, size)
    node = int(np.argmax(size)) if nodes else 0
    if nodes and size[node] > 0:
        target = (
            SuspectKind.NODE
            if both[node]
            else (SuspectKind.SENDER if row_slow[node] else SuspectKind.RECEIVER)
        )
        source = -1 if target is SuspectKind.RECEIVER else node
        to = -1 if target is SuspectKind.SENDER else node
        effect = Effect(target, source, to, float(np.exp(size[node])), 0)
        return replace(effect, edges=int((_hit(links, effect) & ~np.isnan(rest)).sum()))
    error = spread / np.sqrt(links.probes)
    over = np.nan_to_num(rest) > np.maximum(np.log(limits.point_ratio), limits.point_z * error)
    if not over.any():
        return None
    point = int(np.argmax(np.where(over, rest, -np.inf)))
    ends = int(links.source[point]), int(links.to[point])
    return Effect(SuspectKind.LINK, *ends, float(np.exp(rest[point])), 1)


def _lines(rest: Array, end: Array, probes: Array, nodes: int) -> tuple[Array, Array]:
    """Return the median of each row or column, and its error in spreads of one probe."""
    seen = ~np.isnan(rest)
    links = np.bincount(end[seen], minlength=nodes)
    count = np.bincount(end[seen], probes[seen], minlength=nodes)
    error = np.where(links >= 3, 1.25 / np.sqrt(np.maximum(count, 1)), np.inf)
    return grouped_median(rest, end, nodes), error


def _stands_out(
    medians: Array, error: Array, spread: float, least: float | Array, z: float
) -> Array:
    """Return which medians are slow; one of few probes varies more than one of many."""
    out: Array = np.nan_to_num(medians) > np.maximum(np.nan_to_num(least), z * error * spread)
    return out


def _judged(effect: Effect, before: Sequence[Effect], limits: LinkLimits) -> Effect:
    mine = {effect.source, effect.to} - {-1}
    for larger in before:
        touches = bool(mine & ({larger.source, larger.to} - {-1}))
        if touches and np.log(effect.ratio) < limits.echo * np.log(larger.ratio):
            return replace(effect, echo=True)
    return effect


def slow_links(
    names: Sequence[str],
    source: Array,
    to: Array,
    seconds: Array,
    limits: LinkLimits | None = None,
    usual: Array | None = None,
) -> Iterator[Verdict]:
    """Yield a verdict on a matrix of delays, naming nodes by `names`; see `effects`."""
    found = effects(source, to, seconds, len(names), limits, usual)
    sure = [e for e in found if not e.echo]
    if not sure:
        return
    echoes = [_name(names, e) for e in found if e.echo]
    yield Verdict(
        kind=VerdictKind.SLOW_LINK,
        suspects=tuple(
            Suspect(e.target, _name(names, e), 0.9, f"{e.ratio:.1f} times the usual delay")
            for e in sure
        ),
        evidence=(
            *(f"{e.target} {_name(names, e)}: {e.ratio:.1f} times, links: {e.edges}" for e in sure),
            *(f"{name} may be an echo of these: probe it again" for name in echoes),
        ),
        rules_out=("a slow rank: probes do not pass through the trainer",),
        refuted_by="a second round of probes, one source at a time, shows usual delays",
        action="warn, probe again, then replace the node",
        numbers={
            "probes": len(seconds),
            "effects": len(sure),
            "echoes": len(echoes),
            "ratio": sure[0].ratio,
        },
    )


def _name(names: Sequence[str], effect: Effect) -> str:
    if effect.target is SuspectKind.LINK:
        return f"{names[effect.source]}>{names[effect.to]}"
    return names[max(effect.source, effect.to)]
