"""A matrix of probe delays, read by point, row, column and node; the largest effect first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median
from ckptd.monitor.verdict import Kind, Suspect, Target, Verdict

__all__ = ["Effect", "LinkLimits", "effects", "slow_links"]


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
    """

    ratio: float = 1.25
    point_ratio: float = 1.5
    z: float = 5.0
    point_z: float = 5.0
    most: int = 16
    echo: float = 0.5
    few: int = 8
    share: float = 0.55


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
        Probes that show it.
    echo
        Whether it may be the echo of a larger one.
    """

    target: Target
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
        Nodes of each probe, from 0 to `nodes` - 1; one source is to probe at a time.
    seconds
        Delay of each probe, the least of its repetitions; infinite if it did not come.
    nodes
        Nodes.
    limits
        Settings.
    usual
        Earlier delay of each probe, seconds, NaN where there is none; for links that are unequal
        by nature.
    """
    limits = limits or LinkLimits()
    logs = _logs(seconds, usual)
    open_ = ~np.isnan(logs)
    base, spread = _centre(logs[open_], nodes <= limits.few)
    found: list[Effect] = []
    while len(found) < limits.most and open_.sum() >= 3:
        rest = np.where(open_, logs - base, np.nan)
        best = _largest(source, to, rest, spread, nodes, limits)
        if best is None:
            break
        found.append(_judged(best, found, limits))
        hit = (source == best.source) if best.source >= 0 else np.zeros(len(logs), bool)
        other = to == best.to
        if best.target is Target.LINK:
            hit &= other
        elif best.target is Target.RECEIVER:
            hit = other
        elif best.target is Target.NODE:
            hit |= other
        open_ &= ~hit
    if (~open_ & ~np.isnan(logs)).sum() > limits.share * len(logs):
        return []
    return found


def _centre(logs: Array, few: bool) -> tuple[float, float]:
    """Return the usual logarithm of a delay, and its standard deviation.

    Slow links only ever lengthen delays. Of few nodes half the links may be slow at once: then
    the faster ones alone say what is usual, by two quantiles of a normal distribution.
    """
    if not len(logs):
        return 0.0, LEAST_SPREAD
    if few:
        low, high = np.quantile(logs, [0.1, 0.3])
        spread = max(float(high - low) / 0.757, LEAST_SPREAD)
        return float(high) + 0.524 * spread, spread
    base = float(np.median(logs))
    return base, max(float(np.median(np.abs(logs - base))) * MAD_TO_SIGMA, LEAST_SPREAD)


def _logs(seconds: Array, usual: Array | None) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(np.isinf(seconds), np.nan, seconds))
        # A probe that never came is as slow as a hundred of the slowest that did.
        worst = np.nanmax(logs) + np.log(100) if (~np.isnan(logs)).any() else 0.0
        logs = np.where(np.isinf(seconds), worst, logs)
        if usual is not None:
            before = np.log(usual)
            logs = logs - np.where(np.isfinite(before), before, np.nanmedian(before))
    logs[~np.isfinite(logs)] = np.nan
    return logs


def _largest(
    source: Array, to: Array, rest: Array, spread: float, nodes: int, limits: LinkLimits
) -> Effect | None:
    """Return the effect that explains most: a row or column before a point of it."""
    seen = ~np.isnan(rest)
    least = np.log(limits.ratio)
    rows = grouped_median(rest, source, nodes)
    columns = grouped_median(rest, to, nodes)
    per_row = np.bincount(source[seen], minlength=nodes)
    per_column = np.bincount(to[seen], minlength=nodes)
    row_slow = _stands_out(rows, per_row, spread, least, limits)
    column_slow = _stands_out(columns, per_column, spread, least, limits)
    both = row_slow & column_slow
    size = np.maximum(np.where(row_slow, rows, 0), np.where(column_slow, columns, 0))
    size = np.where(both, np.minimum(rows, columns) + 1e-9, size)
    node = int(np.argmax(size)) if nodes else 0
    if nodes and size[node] > 0:
        target = (
            Target.NODE if both[node] else (Target.SENDER if row_slow[node] else Target.RECEIVER)
        )
        count = (target is not Target.RECEIVER) * per_row[node]
        count += (target is not Target.SENDER) * per_column[node]
        return Effect(
            target,
            -1 if target is Target.RECEIVER else node,
            -1 if target is Target.SENDER else node,
            float(np.exp(size[node])),
            int(count),
        )
    point = int(np.nanargmax(rest))
    if rest[point] > max(np.log(limits.point_ratio), limits.point_z * spread):
        return Effect(
            Target.LINK, int(source[point]), int(to[point]), float(np.exp(rest[point])), 1
        )
    return None


def _stands_out(
    medians: Array, counts: Array, spread: float, least: float, limits: LinkLimits
) -> Array:
    """Return which medians are slow; one of few probes varies more than one of many."""
    error = spread * 1.25 / np.sqrt(np.maximum(counts, 1))
    out: Array = (counts >= 3) & (np.nan_to_num(medians) > np.maximum(least, limits.z * error))
    return out


def _judged(effect: Effect, before: Sequence[Effect], limits: LinkLimits) -> Effect:
    mine = {effect.source, effect.to} - {-1}
    for larger in before:
        touches = bool(mine & ({larger.source, larger.to} - {-1}))
        if touches and np.log(effect.ratio) < limits.echo * np.log(larger.ratio):
            return Effect(effect.target, effect.source, effect.to, effect.ratio, effect.edges, True)
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
        kind=Kind.SLOW_LINK,
        suspects=tuple(
            Suspect(e.target, _name(names, e), 0.9, f"{e.ratio:.1f} times the usual delay")
            for e in sure
        ),
        evidence=(
            *(f"{e.target} {_name(names, e)}: {e.ratio:.1f} times, {e.edges} probes" for e in sure),
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
    if effect.target is Target.LINK:
        return f"{names[effect.source]}>{names[effect.to]}"
    return names[max(effect.source, effect.to)]
