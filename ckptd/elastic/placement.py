"""Gives ranks their places in the mesh: survivors stay, spares fill, groups near in the network.

What replicas of one pipeline stage add up is most of what crosses the network, and what stages pass
on is little. So a stage stays within a domain (a rack, a block), and the pipeline crosses them.
Nodes with slow links share stages as well, the last ones, whose gradients are ready first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

_SPARE = -1
Domains = tuple[str, ...]
"""Where a node is in the network, from the widest to the narrowest; empty where nobody says."""


class Coordinate(NamedTuple):
    """A place in the mesh."""

    pp: int
    dp: int
    tp: int


class NodeSlot(msgspec.Struct, frozen=True, order=True):
    """A place for one rank.

    Attributes
    ----------
    node
        Its node's name.
    number
        Which of the node's slots.
    held
        The place whose state it has in memory; None for a spare or a newcomer.
    domains
        Of its node.
    pace
        How many times the links of its node are half as fast as the fastest node's; 0 where nobody
        measured them.
    """

    node: str
    number: int
    held: Coordinate | None = None
    domains: Domains = ()
    pace: int = 0


class SlotPosition(msgspec.Struct, frozen=True):
    """A slot's new place.

    Attributes
    ----------
    slot
        The slot.
    at
        Where.
    stays
        Whether it holds the parameters of this place already: those of one stage and tensor rank
        are the same in all replicas.
    """

    slot: NodeSlot
    at: Coordinate
    stays: bool


class _Unit(NamedTuple):
    """Slots of one node that become one tensor-parallel group."""

    slots: tuple[NodeSlot, ...]
    home: tuple[int, int] | None
    """Stage and replica that they were together."""
    domains: Domains
    """Of the node; if paces count, behind its pace."""


def units(slots: Sequence[NodeSlot], tp: int) -> int:
    """Return how many tensor-parallel groups fit, each on one node."""
    sizes: dict[str, int] = defaultdict(int)
    for slot in slots:
        sizes[slot.node] += 1
    return sum(size // tp for size in sizes.values())


def place(
    slots: Sequence[NodeSlot],
    pp: int,
    dp: int,
    tp: int,
    *,
    keep: bool,
    paced: bool = False,
    again: bool = False,
) -> tuple[tuple[SlotPosition, ...], tuple[NodeSlot, ...]]:
    """Return which slot takes which place, in the order of ranks, and which slots are left over.

    Whole groups keep their stage and replica where those still exist; groups of replicas that are
    gone fill the holes of their own stage next, since they hold its parameters; then spares. Of
    those the nearest to the others of the stage; a stage of none begins where it fits best.

    Parameters
    ----------
    slots
        At least ``pp * dp`` groups of `tp` must fit: see `units`.
    keep
        Whether the places that slots held mean the same now: pipeline and groups are of equal size.
    paced
        Whether nodes with links of one pace are kept together before those of one domain: the
        fastest in the first stages.
    again
        Whether slots that held a place may get another one.
    """
    wanted = [(p, d) for p in range(pp) for d in range(dp)]
    taken: dict[tuple[int, int], _Unit] = {}
    free: dict[int, _Pool] = defaultdict(lambda: _Pool(paced))
    near: dict[int, Counter[Domains]] = defaultdict(Counter)
    for group in _units(slots, tp, keep and not again, paced):
        if group.home is not None and group.home[0] < pp and group.home[1] < dp:
            taken[group.home] = group
            near[group.home[0]].update(_within(group.domains))
        else:
            free[group.home[0] if group.home is not None else _SPARE].add(group)
    missing = Counter(p for p, d in wanted if (p, d) not in taken)
    for hole in wanted:
        if hole not in taken:
            stage = hole[0]
            # A rank that holds the stage comes first; one that holds another comes last, since a
            # hole of its own stage may follow.
            others = (other for other in free if other not in (stage, _SPARE))
            source = next(f for f in (stage, _SPARE, *others) if free[f].size)
            taken[hole] = free[source].take(near[stage], missing[stage])
            near[stage].update(_within(taken[hole].domains))
            missing[stage] -= 1
    places = [
        SlotPosition(slot, Coordinate(p, d, t), keep and _holds(slot, p, t))
        for p, d in wanted
        for t, slot in enumerate(taken[p, d].slots)
    ]
    used = {p.slot for p in places}
    return tuple(places), tuple(s for s in sorted(slots, key=_order) if s not in used)


def stages_within(places: Iterable[SlotPosition]) -> int | None:
    """Return how many stages have all replicas in one domain; None where no node says where."""
    stages: dict[int, set[Domains]] = defaultdict(set)
    for place in places:
        stages[place.at.pp].add(place.slot.domains)
    if not any(any(found) for found in stages.values()):
        return None
    return sum(len(found) == 1 for found in stages.values())


class _Pool:
    """Groups that have no place yet, by domains."""

    def __init__(self, paced: bool) -> None:
        self.size, self._paced = 0, paced
        self._groups: dict[Domains, deque[_Unit]] = defaultdict(deque)

    def add(self, group: _Unit) -> None:
        self.size += 1
        self._groups[group.domains].append(group)

    def take(self, near: Mapping[Domains, int], wanted: int) -> _Unit:
        """Return the group that is nearest to others, or the first of so many for which it fits."""
        if near:
            # Most of the others in the widest domain first, then within it.
            at = max(
                self._groups,
                key=lambda d: ([near.get(w, 0) for w in _within(d)], self._haste(d), self._room(d)),
            )
        else:
            at = self._fitting(wanted)
        group = self._groups[at].popleft()
        self.size -= 1
        if not self._groups[at]:
            del self._groups[at]
        return group

    def _fitting(self, wanted: int) -> Domains:
        """Return a place in the smallest domain that has so many; else in the largest there is."""
        room = Counter[Domains]()
        for domains, groups in self._groups.items():
            room.update(dict.fromkeys(_within(domains), len(groups)))
        enough = [d for d in room if room[d] >= wanted]
        if self._paced:  # not where all faster ones together have room
            classes = {d[0]: room[d[:1]] for d in room}
            enough = [d for d in enough if sum(n for c, n in classes.items() if c < d[0]) < wanted]
        if enough:
            within = min(enough, key=lambda d: (-self._haste(d), -len(d), room[d]))
        else:
            within = max(room, key=lambda d: (len(d) == 1, self._haste(d), room[d]), default=())
        return max((d for d in self._groups if d[: len(within)] == within), key=self._room)

    def _haste(self, domains: Domains) -> int:
        """Return how fast links are, if that counts: the more, the faster."""
        return -int(domains[0]) if self._paced else 0

    def _room(self, domains: Domains) -> int:
        return len(self._groups[domains])


def _within(domains: Domains) -> Iterator[Domains]:
    """Yield the domains that hold others, from the widest to the narrowest."""
    return (domains[:depth] for depth in range(1, len(domains) + 1))


def _units(slots: Sequence[NodeSlot], tp: int, keep: bool, paced: bool) -> list[_Unit]:
    """Return groups: those that were one first, then what else fits on each node."""
    nodes: dict[str, list[NodeSlot]] = defaultdict(list)
    for slot in sorted(slots, key=_order):
        nodes[slot.node].append(slot)
    whole, mixed = [], []
    for here in nodes.values():
        domains = (f"{here[0].pace}", *here[0].domains) if paced else here[0].domains
        homes: dict[tuple[int, int], list[NodeSlot]] = defaultdict(list)
        for slot in here:
            if keep and slot.held is not None:
                homes[slot.held.pp, slot.held.dp].append(slot)
        rest = list(here)
        for home, members in homes.items():
            if len(members) == tp:
                whole.append(_Unit(tuple(sorted(members, key=_tensor_rank)), home, domains))
                rest = [s for s in rest if s not in members]
        whole_groups = range(0, len(rest) - tp + 1, tp)
        mixed += [_Unit(tuple(rest[k : k + tp]), None, domains) for k in whole_groups]
    return whole + mixed


def _order(slot: NodeSlot) -> tuple[str, int]:
    return slot.node, slot.number


def _tensor_rank(slot: NodeSlot) -> int:
    return slot.held.tp if slot.held is not None else -1


def _holds(slot: NodeSlot, stage: int, tensor: int) -> bool:
    return slot.held is not None and (slot.held.pp, slot.held.tp) == (stage, tensor)
