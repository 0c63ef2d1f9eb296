"""Assignment of ranks to the mesh: survivors stay where they are, and groups stay on one node."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_SPARE = -1


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
    """

    node: str
    number: int
    held: Coordinate | None = None


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


def units(slots: Sequence[NodeSlot], tp: int) -> int:
    """Return how many tensor-parallel groups fit, each on one node."""
    sizes: dict[str, int] = defaultdict(int)
    for slot in slots:
        sizes[slot.node] += 1
    return sum(size // tp for size in sizes.values())


def place(
    slots: Sequence[NodeSlot], pp: int, dp: int, tp: int, *, keep: bool
) -> tuple[tuple[SlotPosition, ...], tuple[NodeSlot, ...]]:
    """Return which slot takes which place, in the order of ranks, and which slots are left over.

    Whole groups keep their stage and replica where those still exist; groups of replicas that are
    gone fill the holes of their own stage next, since they hold its parameters; then spares.

    Parameters
    ----------
    slots
        At least ``pp * dp`` groups of `tp` must fit: see `units`.
    keep
        Whether the places that slots held mean the same now: pipeline and groups are of equal size.
    """
    wanted = [(p, d) for p in range(pp) for d in range(dp)]
    taken: dict[tuple[int, int], _Unit] = {}
    free: dict[int, deque[_Unit]] = defaultdict(deque)
    for group in _units(slots, tp, keep):
        if group.home is not None and group.home[0] < pp and group.home[1] < dp:
            taken[group.home] = group
        else:
            free[group.home[0] if group.home is not None else _SPARE].append(group)
    for hole in wanted:
        if hole not in taken:
            # A rank that holds the stage comes first; one that holds another comes last, since a
            # hole of its own stage may follow.
            others = (stage for stage in free if stage not in (hole[0], _SPARE))
            source = next(stage for stage in (hole[0], _SPARE, *others) if free[stage])
            taken[hole] = free[source].popleft()
    places = [
        SlotPosition(slot, Coordinate(p, d, t), keep and _holds(slot, p, t))
        for p, d in wanted
        for t, slot in enumerate(taken[p, d].slots)
    ]
    used = {p.slot for p in places}
    return tuple(places), tuple(s for s in sorted(slots, key=_order) if s not in used)


def _units(slots: Sequence[NodeSlot], tp: int, keep: bool) -> list[_Unit]:
    """Return groups: those that were one first, then what else fits on each node."""
    nodes: dict[str, list[NodeSlot]] = defaultdict(list)
    for slot in sorted(slots, key=_order):
        nodes[slot.node].append(slot)
    whole, mixed = [], []
    for here in nodes.values():
        homes: dict[tuple[int, int], list[NodeSlot]] = defaultdict(list)
        for slot in here:
            if keep and slot.held is not None:
                homes[slot.held.pp, slot.held.dp].append(slot)
        rest = list(here)
        for home, members in homes.items():
            if len(members) == tp:
                whole.append(_Unit(tuple(sorted(members, key=_tensor_rank)), home))
                rest = [s for s in rest if s not in members]
        mixed += [_Unit(tuple(rest[k : k + tp]), None) for k in range(0, len(rest) - tp + 1, tp)]
    return whole + mixed


def _order(slot: NodeSlot) -> tuple[str, int]:
    return slot.node, slot.number


def _tensor_rank(slot: NodeSlot) -> int:
    return slot.held.tp if slot.held is not None else -1


def _holds(slot: NodeSlot, stage: int, tensor: int) -> bool:
    return slot.held is not None and (slot.held.pp, slot.held.tp) == (stage, tensor)
