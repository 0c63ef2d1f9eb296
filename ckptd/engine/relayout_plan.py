"""What one process gives to, and takes from, every other one when live tensors change layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.engine.relayout_memory import Memory
from ckptd.engine.relayout_stream import Segment
from ckptd.layout.block import Block
from ckptd.layout.lay.live import LiveCopy, Transfers
from ckptd.layout.lay.local import LocalTensor, local_tensors
from ckptd.layout.lay.regions import Fill
from ckptd.layout.lay.values import Values

__all__ = ["Filling", "Incoming", "MovePlan", "Outgoing", "Roles", "make_plan"]


@dataclass(frozen=True)
class Roles:
    """Which process is which rank of the two layouts.

    Attributes
    ----------
    source, target
        Process by rank of the layout.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]

    def source_rank(self, process: int) -> int | None:
        """Return the rank of a process in the source's layout, if it is in it."""
        return self.source.index(process) if process in self.source else None

    def target_rank(self, process: int) -> int | None:
        """Return the rank of a process in the target's layout, if it is in it."""
        return self.target.index(process) if process in self.target else None


@dataclass(frozen=True, eq=False)
class Outgoing:
    """What one own tensor has for one tensor of another rank; without memory it is not there."""

    segment: Segment
    tensor: LocalTensor
    memory: Memory | None


@dataclass(frozen=True, eq=False)
class Incoming:
    """What one own tensor gets from one tensor of another rank.

    Attributes
    ----------
    segment
        The copies, by part.
    tensor
        The own tensor.
    memory
        Where it is; None when the state has no place for it.
    parts
        For each part of the segment what happens to its values, and how many ranks give theirs.
    """

    segment: Segment
    tensor: LocalTensor
    memory: Memory | None
    parts: tuple[tuple[Values | None, int], ...]


@dataclass(frozen=True, eq=False)
class Filling:
    """Fills of an own tensor; `alone`: it is nothing but fills."""

    name: str
    memory: Memory
    fills: tuple[Fill, ...]
    alone: bool


@dataclass(eq=False)
class MovePlan:
    """Everything that one process does, by the other process.

    Attributes
    ----------
    outgoing, incoming
        In the order of the streams.
    fills
        Own tensors, and what no element of the source stands for in each.
    """

    outgoing: dict[int, list[Outgoing]] = field(default_factory=dict)
    incoming: dict[int, list[Incoming]] = field(default_factory=dict)
    fills: list[Filling] = field(default_factory=list)


def make_plan(
    transfers: Transfers,
    roles: Roles,
    process: int,
    *,
    states: frozenset[str],
    sources: Mapping[str, Memory],
    targets: Mapping[str, Memory],
) -> MovePlan:
    """Plan the part of one process, without a word to any other.

    Parameters
    ----------
    transfers
        The two layouts.
    roles
        Who is who.
    process
        This one.
    states
        Short names of the states that are moved; parameters are the empty one.
    sources, targets
        Memory of this process's tensors, by the names that the layouts give them.

    Raises
    ------
    MismatchError
        The source does not hold all that the target wants.
    """
    plan = MovePlan()
    giver, taker = roles.source_rank(process), roles.target_rank(process)
    if giver is not None:
        _give(plan, transfers, roles, giver, states, sources)
    if taker is not None:
        _take(plan, transfers, roles, taker, states, targets)
    for outgoing in plan.outgoing.values():
        outgoing.sort(key=lambda o: (o.segment.target, o.segment.source))
    for incoming in plan.incoming.values():
        incoming.sort(key=lambda i: (i.segment.target, i.segment.source))
    return plan


def _give(
    plan: MovePlan,
    transfers: Transfers,
    roles: Roles,
    rank: int,
    states: frozenset[str],
    sources: Mapping[str, Memory],
) -> None:
    mine = {t.name: t for t in local_tensors(transfers.composition.source, rank)}
    for sent in transfers.sent(rank):
        tensor = mine[sent.source]
        if tensor.state in states:
            segment = Segment(sent.source, sent.target, (sent.blocks,))
            found = Outgoing(segment, tensor, sources.get(sent.source))
            plan.outgoing.setdefault(roles.target[sent.rank], []).append(found)


def _take(
    plan: MovePlan,
    transfers: Transfers,
    roles: Roles,
    rank: int,
    states: frozenset[str],
    targets: Mapping[str, Memory],
) -> None:
    for tensor in local_tensors(transfers.composition.target, rank):
        if tensor.state not in states:
            continue
        live = transfers.local_tensor(rank, tensor)
        memory = targets.get(tensor.name)
        if live.fills and memory is not None:
            plan.fills.append(Filling(tensor.name, memory, live.fills, not live.copies))
        by_giver: dict[tuple[int, str], list[LiveCopy]] = {}
        for copy in live.copies:
            by_giver.setdefault((copy.rank, copy.name), []).append(copy)
        for (giver, name), copies in by_giver.items():
            blocks: Sequence[tuple[Block, ...]] = [c.blocks for c in copies]
            found = Incoming(
                Segment(name, tensor.name, tuple(blocks)),
                tensor,
                targets.get(tensor.name),
                tuple((c.values, c.of) for c in copies),
            )
            plan.incoming.setdefault(roles.source[giver], []).append(found)
