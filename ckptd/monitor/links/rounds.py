"""When links are probed, which ones, and what came of it: a round of probes at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ckptd.monitor.links.matrix import Effect, LinkLimits, again, effects, slow_links
from ckptd.monitor.report import LinkProbe, ProbeResult
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Verdict

__all__ = ["LinkMatrix", "LinkProber"]

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
REACHED = "refused"
"""What an error says of a node that answers, though no responder does."""


class LinkMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What the last round of probes showed.

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
        """Let two nodes each try to reach the silent ones, every few seconds."""
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
        """Take a result; one that nobody asked for is left alone."""
        asked = self._reach.pop(result.nonce, None)
        if asked is not None and asked[:2] == (result.src, result.dst):
            reached = np.isfinite(result.seconds) or REACHED in result.error
            before = self.reachable.get(result.dst, False)
            self.reachable[result.dst] = bool(before or reached)
        if self._round is None:
            return
        asked = self._round.out.pop(result.nonce, None)
        if asked is not None and asked[:2] == (result.src, result.dst):
            self._round.results.append(result)

    def advance(self, alive: set[str], now: float) -> bool:
        """Go on with the round; return whether it has just ended.

        Parameters
        ----------
        alive
            Nodes whose agents are heard.
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
    """Return whom each node probes; a node's probes follow each other."""
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
