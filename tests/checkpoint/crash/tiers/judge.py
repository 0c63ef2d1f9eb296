"""Which promises survive which deaths, and whether each life found what it had to find."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.checkpoint.save.peers import partners
from tests.checkpoint.crash.tiers.ledger import (
    Begun,
    Claiming,
    Closed,
    Fact,
    Held,
    Killed,
    Promised,
    Raised,
    Refused,
    Restored,
    Started,
)

__all__ = ["Verdict", "judge"]

_Key = tuple[int, int, str]
"""Step, generation, attempt."""
_Place = tuple[int, frozenset[int]]
"""A node and its agent (processes that must all live); without any: the node's folder."""


@dataclass
class Verdict:
    """What came of one schedule."""

    faults: list[str] = field(default_factory=list)
    kills: list[Killed] = field(default_factory=list)
    restored_from: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    promises: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)


@dataclass
class _Life:
    number: int
    nodes: tuple[int, ...]
    clean: bool
    restored: dict[int, Restored] = field(default_factory=dict)
    closed: dict[int, Closed] = field(default_factory=dict)
    held: dict[_Key, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))
    promised: dict[_Key, dict[str, set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    killed: bool = False


@dataclass(frozen=True)
class _Promise:
    key: _Key
    tier: str
    life: int
    copies: tuple[tuple[_Place, ...], ...]
    """For each rank's share the places, any of which suffices."""


class _Judge:
    def __init__(self, local_keep: int) -> None:
        self.verdict = Verdict()
        self._lives: dict[int, _Life] = {}
        self._digests: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._train: dict[int, str] = {}
        self._dead: set[int] = set()
        self._lost: dict[int, int] = {}
        """The life in which a node's folder went."""
        self._promises: list[_Promise] = []
        self._floor = 0

    def fault(self, life: int, what: str) -> None:
        self.verdict.faults.append(f"life {life}: {what}")

    def hear(self, fact: Fact) -> None:
        life = self._lives.get(fact.life)
        match fact:
            case Started():
                self._begin(fact)
            case Killed():
                self.verdict.kills.append(fact)
                self._dead |= set(fact.pids.values())
                self._lost |= dict.fromkeys(fact.folders, fact.life)
                if life is not None:
                    life.killed = True
            case Claiming():
                self._promises = [p for p in self._promises if p.key[0] <= fact.step]
            case Begun():
                self._digests[fact.step, fact.life].add(fact.digest)
                if self._train.setdefault(fact.step, fact.train) != fact.train:
                    self.fault(fact.life, f"training went another way at step {fact.step}")
            case Refused():
                self.verdict.refused[f"{fact.tier}: {fact.kind}"] += 1
            case Raised():
                self.verdict.raised[f"{fact.call}: {fact.kind}"] += 1
            case _:
                if life is not None:
                    self._hear_of(life, fact)

    def _hear_of(self, life: _Life, fact: Fact) -> None:
        match fact:
            case Restored():
                self._restored(life, fact)
            case Held():
                life.held[fact.step, fact.generation, fact.attempt][fact.rank] = fact
            case Promised():
                self.verdict.promises[fact.tier] += 1
                key = (fact.step, fact.generation, fact.attempt)
                life.promised[key][fact.tier].add(fact.rank)
            case Closed():
                life.closed[fact.rank] = fact
                if fact.pending:
                    self.fault(life.number, f"handles never ended: {fact.pending}")

    # -- what must be there ------------------------------------------------------------------------

    def _begin(self, fact: Started) -> None:
        for life in self._lives.values():
            self._settle(life)
        self._lives[fact.life] = _Life(fact.life, fact.nodes, fact.clean)
        self.verdict.lives += 1

    def _settle(self, life: _Life) -> None:
        """Take what a life was promised, once it is over."""
        for key, tiers in life.promised.items():
            for tier in tiers:
                self._promises.append(
                    _Promise(key, tier, life.number, self._copies(life, key, tier))
                )
        life.promised.clear()

    @staticmethod
    def _copies(life: _Life, key: _Key, tier: str) -> tuple[tuple[_Place, ...], ...]:
        if tier == "root":
            return ()
        if tier == "local":
            return tuple(((node, frozenset()),) for node in life.nodes)
        held = life.held[key]
        partner = partners({f"n{n}": f"n{n}" for n in life.nodes})
        found = []
        for rank, node in enumerate(life.nodes):
            places: list[_Place] = [(node, frozenset({held[rank].agent}))]
            if tier == "peer" and (name := partner.get(f"n{node}")) is not None:
                other = int(name[1:])
                agents = (h.agent for r, h in held.items() if life.nodes[r] == other)
                places.append((other, frozenset(agents)))
            found.append(tuple(places))
        return tuple(found)

    def _survives(self, promise: _Promise, nodes: Iterable[int]) -> bool:
        """Tell whether a life on `nodes` must find it; it starts agents on these."""

        def stands(place: _Place) -> bool:
            node, agents = place
            if node not in nodes:
                return False
            if not agents:
                return self._lost.get(node, -1) < promise.life
            return not agents & self._dead

        return all(any(map(stands, places)) for places in promise.copies)

    def _required(self, life: _Life) -> _Promise | None:
        there = [p for p in self._promises if self._survives(p, set(life.nodes))]
        return max(there, key=lambda p: p.key, default=None)

    def _restored(self, life: _Life, fact: Restored) -> None:
        first = not life.restored
        life.restored[fact.rank] = fact
        if not first:
            one = next(iter(life.restored.values()))
            same = (one.step, one.generation, one.digest) == (
                fact.step,
                fact.generation,
                fact.digest,
            )
            if not same:
                self.fault(life.number, f"ranks loaded {one} and {fact}")
            return
        wanted = self._required(life)
        # Another node's folder is read through its agent, which may have died meanwhile.
        excused = wanted is not None and life.killed and wanted.tier == "local"
        if wanted is not None and fact.step < wanted.key[0] and not excused:
            self.fault(
                life.number,
                f"loaded step {fact.step}, but {wanted.key} was promised on {wanted.tier}",
            )
        if fact.step and fact.digest not in self._digests[fact.step, fact.writer]:
            self.fault(life.number, f"step {fact.step} of life {fact.writer} is not what was saved")
        tier = "nothing" if not fact.step else "snapshot" if fact.snapshot else "commit"
        self.verdict.restored_from[tier] += 1
        # What was later is on no line any more.
        self._promises = [p for p in self._promises if p.key[0] <= fact.step]

    def end(self) -> Verdict:
        """Return the verdict; each life that nobody harmed must have kept all it began."""
        for life in self._lives.values():
            if life.killed:
                continue
            if len(life.restored) < len(life.nodes) or len(life.closed) < len(life.nodes):
                self.fault(life.number, "did not come to its end, though nobody harmed it")
            for key, held in life.held.items():
                there = {p.tier for p in self._promises if p.key == key} | {*life.promised[key]}
                one = next(iter(held.values()))
                missing = {*one.near, *(["root"] if one.root else [])} - there
                if len(set(life.nodes)) == 1:
                    missing.discard("peer")  # there is none, which the handle says
                if missing:
                    self.fault(life.number, f"{key} never reached {sorted(missing)}")
        return self.verdict


def judge(facts: Iterable[Fact], local_keep: int = 1) -> Verdict:
    """Go through a ledger."""
    court = _Judge(local_keep)
    for fact in facts:
        court.hear(fact)
    return court.end()
