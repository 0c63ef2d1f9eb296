"""Slow links while a job runs: which are probed when, what delays show; ratios, scores, limits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ckptd.monitor.report import LinkProbe, ProbeResult
from ckptd.monitor.stats import MAD_TO_SIGMA, Array, grouped_median
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

# --- what delays show -----------------------------------------------------------------------------


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
        A later effect that touches a node named before, and is less than this share of it (in
        logarithms), may be its echo, as answers share queues: it is reported as to be probed again.
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
    return np.nan_to_num(medians) > np.maximum(np.nan_to_num(least), z * error * spread)


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
            *(f"{name} may be a side effect of these: probe it again" for name in echoes),
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


# --- rounds of probes -----------------------------------------------------------------------------


ALL_PAIRS = 12
"""Nodes up to which every pair is probed."""
PARALLEL = 32
"""Of so many nodes one may probe at a time: probes of two nodes at once slow each other down."""
EXPIRES_S = 20.0
"""So long after it was handed out, a probe without a result counts for nothing."""
ROUND_S = 120.0
"""So long after its begin a round ends with what it has."""
AGAIN = 2
"""Times that links in doubt are probed again before anything is said of them."""
BATCH = 16
"""Most probes that a node is given at once."""


class LinkMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last round of probes.

    Attributes
    ----------
    nodes
        Names.
    source, to
        Index of both nodes of each link.
    seconds
        The least delay that was seen; infinite if nothing came back.
    ratio
        Times the median of all links.
    effects
        What makes links slow, the largest first.
    at
        When the round ended, monotonic seconds.
    why
        What it was asked for.
    """

    nodes: tuple[str, ...]
    source: tuple[int, ...]
    to: tuple[int, ...]
    seconds: tuple[float, ...]
    ratio: tuple[float, ...]
    effects: tuple[Effect, ...]
    at: float
    why: str

    @property
    def edges(self) -> tuple[tuple[int, int, float, float], ...]:
        """Source, destination, delay in seconds and ratio of each link."""
        return tuple(zip(self.source, self.to, self.seconds, self.ratio, strict=True))


@dataclass
class _Round:
    """A round under way: links still to probe, those handed out, and results."""

    why: str
    names: tuple[str, ...]
    begun: float
    waiting: list[tuple[str, str]]
    left: int
    out: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    results: list[ProbeResult] = field(default_factory=list)


class LinkProber:
    """Rounds of probes, at most one at a time; no clock and no I/O.

    Attributes
    ----------
    matrix
        Of the last round; None before the first.
    verdicts
        What the last round found.
    reachable
        Whether silent nodes were reached by others, where that was tried.
    """

    def __init__(self, limits: LinkLimits, *, every_s: float, peers: int) -> None:
        self.matrix: LinkMatrix | None = None
        self.verdicts: tuple[Verdict, ...] = ()
        self.reachable: dict[str, bool] = {}
        self._limits, self._every_s, self._peers = limits, every_s, peers
        self._round: _Round | None = None
        self._rounds = 0
        self._nonce = 0
        self._usual: dict[tuple[str, str], float] = {}
        self._reach: dict[int, tuple[str, str, float]] = {}
        self._tried: dict[str, float] = {}
        self._asked_reach: list[tuple[str, str]] = []

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self._round is not None

    @property
    def results(self) -> tuple[ProbeResult, ...]:
        """Results of the round under way, or none."""
        return tuple(self._round.results) if self._round is not None else ()

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, why: str, addresses: Mapping[str, str], now: float, first: Sequence[str]) -> bool:
        """Begin a round unless one is under way or was lately; return whether it began.

        Parameters
        ----------
        why
            For people.
        addresses
            Where nodes answer probes.
        now
            The moment.
        first
            Nodes concerned; some others are taken along, to compare with.
        """
        last = self.matrix.at if self.matrix is not None else -np.inf
        if self._round is not None or now - last < self._every_s:
            return False
        names = _chosen(sorted(addresses), first, random.Random(self._rounds))
        if len(names) < 3:
            return False
        pairs = _pairs(names, self._peers, random.Random(self._rounds))
        self._round = _Round(why, names, now, pairs, AGAIN)
        self._rounds += 1
        return True

    def ask_reach(self, silent: Iterable[str], addresses: Mapping[str, str], now: float) -> None:
        """Have two nodes each try to reach the silent ones, every few seconds."""
        silent = set(silent)
        for node in self.reachable.keys() - silent:
            del self.reachable[node]
        others = sorted(addresses.keys() - silent)
        for node in sorted(silent & addresses.keys()):
            if now - self._tried.get(node, -np.inf) < EXPIRES_S / 4:
                continue
            self._tried[node] = now
            near = random.Random(f"{node} {self._nonce}").sample(others, min(2, len(others)))
            self._asked_reach += [(source, node) for source in near]

    def probes(
        self, nodes: Iterable[str], addresses: Mapping[str, str], now: float
    ) -> list[LinkProbe]:
        """Return what these nodes are to probe now."""
        if self._round is None and not self._asked_reach:
            return []
        mine = set(nodes)
        out = []
        for pair in [p for p in self._asked_reach if p[0] in mine]:
            self._asked_reach.remove(pair)
            out.append(self._probe(pair, addresses, self._reach, now, 1 << 10))
        if self._round is not None:
            out += self._of_round(self._round, mine, addresses, now)
        return out

    def _of_round(
        self, current: _Round, mine: set[str], addresses: Mapping[str, str], now: float
    ) -> list[LinkProbe]:
        busy = {source for source, _, _ in current.out.values()}
        free = max(len(current.names) // PARALLEL, 1) - len(busy)
        chosen: dict[str, int] = {}
        out = []
        for pair in list(current.waiting):
            source = pair[0]
            if source not in mine or source in busy or chosen.get(source, 0) >= BATCH:
                continue
            if source not in chosen and len(chosen) >= free:
                continue
            chosen[source] = chosen.get(source, 0) + 1
            current.waiting.remove(pair)
            if pair[1] in addresses:
                out.append(self._probe(pair, addresses, current.out, now, 1 << 17))
        return out

    def _probe(
        self,
        pair: tuple[str, str],
        addresses: Mapping[str, str],
        out: dict[int, tuple[str, str, float]],
        now: float,
        size: int,
    ) -> LinkProbe:
        self._nonce += 1
        out[self._nonce] = (*pair, now)
        return LinkProbe(
            nonce=self._nonce,
            from_node=pair[0],
            to_node=pair[1],
            address=addresses[pair[1]],
            size=size,
        )

    # --- what comes back ------------------------------------------------------------------------

    def take(self, result: ProbeResult) -> None:
        """Take a result; one that was not asked for is ignored."""
        asked = self._reach.pop(result.nonce, None)
        shows = result.shows
        if asked is not None and asked[:2] == (result.src, result.dst) and shows != "nothing":
            reached = np.isfinite(result.seconds) or shows == "node"
            before = self.reachable.get(result.dst, False)
            self.reachable[result.dst] = bool(before or reached)
        if self._round is None:
            return
        asked = self._round.out.pop(result.nonce, None)
        # Only a probe that was greeted, or that found no way there, measures the link.
        if asked is not None and asked[:2] == (result.src, result.dst) and shows == "link":
            self._round.results.append(result)

    def advance(self, alive: set[str], now: float) -> bool:
        """Go on with the round; return whether it has just ended.

        Parameters
        ----------
        alive
            Nodes whose agents report.
        now
            The moment.
        """
        current = self._round
        for out in (self._reach, current.out if current else {}):
            for nonce in [n for n, (_, _, at) in out.items() if now - at > EXPIRES_S]:
                del out[nonce]
        if current is None:
            return False
        current.waiting = [p for p in current.waiting if p[0] in alive]
        if now - current.begun > ROUND_S:
            current.waiting.clear()
            current.out.clear()
            current.left = 0
        if current.out or current.waiting:
            return False
        if current.left and self._doubt(current):
            return False
        self._end(current, now)
        return True

    def _doubt(self, current: _Round) -> bool:
        """Put links in doubt on the list once more; return whether there are any."""
        current.left -= 1
        source, to, seconds = _columns(current)
        more = again(source, to, seconds, len(current.names), self._limits)
        names = current.names
        current.waiting = [
            (names[a], names[b]) for a, b in zip(*(m.tolist() for m in more), strict=True)
        ]
        return bool(current.waiting)

    def _end(self, current: _Round, now: float) -> None:
        source, to, seconds = _columns(current)
        usual = self._usual_of(current)
        names = current.names
        self.verdicts = tuple(slow_links(names, source, to, seconds, self._limits, usual))
        found = effects(source, to, seconds, len(names), self._limits, usual)
        self.matrix = _matrix(current, source, to, seconds, found, now)
        self._round = None
        if not self.verdicts:
            # Only what was well is usual: a fault that lasts must not become so.
            for r in current.results:
                if np.isfinite(r.seconds):
                    known = self._usual.get((r.src, r.dst), np.inf)
                    self._usual[r.src, r.dst] = min(known, r.seconds)

    def _usual_of(self, current: _Round) -> Array | None:
        usual = np.array([self._usual.get((r.src, r.dst), np.nan) for r in current.results])
        return usual if len(usual) and np.isfinite(usual).mean() > 0.5 else None


def _chosen(names: list[str], first: Sequence[str], dice: random.Random) -> tuple[str, ...]:
    """Return the nodes of a round: those concerned, and others to compare with."""
    mine = [n for n in dict.fromkeys(first) if n in set(names)]
    if not mine:
        return tuple(names)
    others = sorted(set(names) - set(mine))
    extra = max(ALL_PAIRS - len(mine), min(len(mine), 4))
    return tuple(mine + dice.sample(others, min(extra, len(others))))


def _pairs(names: Sequence[str], peers: int, dice: random.Random) -> list[tuple[str, str]]:
    """Return the pairs to probe; those of one source follow each other."""
    count = len(names)
    if count <= ALL_PAIRS:
        return [(a, b) for a in names for b in names if a != b]
    # The same shifts for all, so that each node is probed as often as it probes: a receiver that
    # few had probed was taken for so many slow links.
    shifts = dice.sample(range(1, count), min(peers, count - 1))
    return [(name, names[(i + s) % count]) for i, name in enumerate(names) for s in shifts]


def _columns(current: _Round) -> tuple[Array, Array, Array]:
    place = {name: i for i, name in enumerate(current.names)}
    results = current.results
    source = np.array([place[r.src] for r in results], np.int64)
    to = np.array([place[r.dst] for r in results], np.int64)
    return source, to, np.array([r.seconds for r in results])


def _matrix(
    current: _Round, source: Array, to: Array, seconds: Array, found: Sequence[Effect], now: float
) -> LinkMatrix:
    best: dict[tuple[int, int], float] = {}
    for a, b, s in zip(source.tolist(), to.tolist(), seconds.tolist(), strict=True):
        best[a, b] = min(best.get((a, b), np.inf), s)
    finite = [s for s in best.values() if np.isfinite(s)]
    middle = float(np.median(finite)) if finite else 1.0
    return LinkMatrix(
        nodes=current.names,
        source=tuple(a for a, _ in best),
        to=tuple(b for _, b in best),
        seconds=tuple(best.values()),
        ratio=tuple(s / middle for s in best.values()),
        effects=tuple(found),
        at=now,
        why=current.why,
    )
