"""What the layout policy would do on what is left, told in full: for people, before it happens.

Pure functions on plain data. Throughput is compared by `JobSpec.step_cost`: ranks are taken to be
equally fast, and communication to cost the same in every layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ckptd.checkpoint.data.schedule import share
from ckptd.elastic.placement import Coordinate, NodeSlot, Place
from ckptd.elastic.policy import Choice, JobSpec, Shape, choose
from ckptd.errors import RefusedError, UsageError

__all__ = [
    "Explanation",
    "Option",
    "RankIdentity",
    "SurvivorsRow",
    "cluster_of",
    "explain",
    "row_of",
    "settled",
    "survivors_of",
]


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who is a rank.

    Attributes
    ----------
    rank, pp, dp, tp
        Its number and its place.
    node, slot
        Where it runs.
    microbatches
        First, and one after the last, of the micro-batches that it computes in each step.
    stays
        Whether it holds the parameters of this place already.
    before
        Its place until now; None for a spare or a newcomer.
    """

    rank: int
    node: str
    slot: int
    pp: int
    dp: int
    tp: int
    microbatches: tuple[int, int]
    stays: bool
    before: Coordinate | None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that was looked at.

    Attributes
    ----------
    shape
        Its sizes.
    throughput
        Steps in a time, against those before; 0 if it is refused.
    moves
        Ranks whose parameters come from elsewhere.
    refused
        Why it is out of the question; empty if it is not.
    """

    shape: Shape
    throughput: float
    moves: int
    refused: str


class SurvivorsRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of survivors comes to, in short.

    Attributes
    ----------
    survivors
        Slots that are left.
    shape
        What is chosen; None if nothing fits.
    throughput, ideal
        Steps in a time against those before; and the share of slots that is left, at most 1. A
        shorter pipeline fills faster, so throughput can be a little above the ideal.
    moves, parked
        Ranks whose parameters come from elsewhere; slots with nothing to do.
    refused
        Why nothing fits; empty if something does.
    """

    survivors: int
    shape: Shape | None
    throughput: float
    ideal: float
    moves: int
    parked: int
    refused: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of the policy and what follows from it.

    Attributes
    ----------
    before, shape
        Sizes of the layout until now, and of the one that is chosen.
    survivors, lost
        Slots that are left; places of `before` whose state nobody holds in memory any more.
    seats
        All ranks in their order.
    parked
        Slots that are spares now, as ``node/slot``.
    moves
        Ranks whose parameters come from elsewhere.
    throughput, ideal
        As in `SurvivorsRow`.
    why
        The policy's reasons, the deciding one first.
    options
        All shapes that were looked at, the best first.
    grown
        What one more node would make of it, and the same when nothing changes.
    """

    before: Shape
    shape: Shape
    survivors: int
    lost: tuple[Coordinate, ...]
    seats: tuple[RankIdentity, ...]
    parked: tuple[str, ...]
    moves: int
    throughput: float
    ideal: float
    why: tuple[str, ...]
    options: tuple[Option, ...]
    grown: SurvivorsRow


def cluster_of(job: JobSpec, slots_per_node: int, spare_nodes: int = 0) -> list[NodeSlot]:
    """Return the slots that run the planned layout, with their places, and spare nodes.

    Nodes are ``n0``, ``n1`` and so on: as many as the planned ranks fill.

    Raises
    ------
    UsageError
        kind ``bad-argument``: a number is too small.
    RefusedError
        kind ``no-layout``: the planned layout does not fit nodes of this size.
    """
    if slots_per_node < 1 or spare_nodes < 0:
        raise UsageError(
            "this is no cluster",
            kind="bad-argument",
            wanted="nodes with 1 slot at least, and 0 spare nodes at least",
            found=f"{slots_per_node} slots, {spare_nodes} spare nodes",
        )
    groups = slots_per_node // job.planned.tp
    nodes = -(-job.planned.pp * job.planned.dp // max(groups, 1))
    first = _all(range(nodes), slots_per_node)
    only = msgspec.structs.replace(job, pp=(), tp=(), memory=None)
    chosen = choose(only, first)
    spares = _all(range(nodes, nodes + spare_nodes), slots_per_node)
    return [*settled(chosen), *spares]


def _all(nodes: range, slots: int) -> list[NodeSlot]:
    return [NodeSlot(f"n{n}", k) for n in nodes for k in range(slots)]


def settled(choice: Choice) -> list[NodeSlot]:
    """Return the slots as they are once a choice is carried out; parked ones hold nothing."""
    seated = [msgspec.structs.replace(p.slot, held=p.at) for p in choice.places]
    return seated + [msgspec.structs.replace(s, held=None) for s in choice.parked]


def survivors_of(
    slots: Sequence[NodeSlot], nodes_lost: Collection[str] = (), survivors: int | None = None
) -> list[NodeSlot]:
    """Return what is left of a cluster.

    Parameters
    ----------
    nodes_lost
        Nodes that are gone with all of their slots.
    survivors
        How many slots are left; beyond `nodes_lost` those of the last nodes go first.

    Raises
    ------
    UsageError
        kind ``bad-argument``: no such node, or more survivors than there can be.
    """
    unknown = set(nodes_lost) - {s.node for s in slots}
    left = [s for s in _in_order(slots) if s.node not in nodes_lost]
    if unknown or (survivors is not None and not 0 <= survivors <= len(left)):
        raise UsageError(
            "this cannot be left of the cluster",
            kind="bad-argument",
            wanted=f"nodes of n0 to n{len({s.node for s in slots}) - 1},"
            f" and at most {len(left)} survivors",
            found=", ".join(sorted(unknown)) or f"{survivors} survivors",
        )
    return left if survivors is None else left[:survivors]


def _in_order(slots: Sequence[NodeSlot]) -> list[NodeSlot]:
    return sorted(slots, key=lambda s: (len(s.node), s.node, s.number))


def explain(
    job: JobSpec, left: Sequence[NodeSlot], before: Shape, slots_per_node: int
) -> Explanation:
    """Choose a layout for what is left, and say everything about it.

    Parameters
    ----------
    job
        What is allowed.
    left
        Slots that are left, with the places that they had.
    before
        The shape until now.
    slots_per_node
        Of the node that `Explanation.grown` adds.

    Raises
    ------
    RefusedError
        kind ``no-layout``: nothing fits; the hint says what one more node would change.
    """
    grown = _grown(job, left, before, slots_per_node)
    try:
        choice = choose(job, left, before)
    except RefusedError as error:
        if grown.shape is not None:
            error.hint = f"one more node of {slots_per_node} slots would do: {grown.shape}"
        raise
    held = {s.held for s in left}
    return Explanation(
        before=before,
        shape=choice.shape,
        survivors=len(left),
        lost=tuple(c for c in _places(before) if c not in held),
        seats=tuple(_seat(job, choice.shape, n, p) for n, p in enumerate(choice.places)),
        parked=tuple(f"{s.node}/{s.number}" for s in choice.parked),
        moves=choice.moves,
        throughput=_throughput(job, choice.shape, before),
        ideal=_ideal(len(left), before),
        why=choice.why,
        options=tuple(
            Option(
                shape=c.shape,
                throughput=0.0 if c.refused else _throughput(job, c.shape, before),
                moves=c.moves,
                refused=c.refused,
            )
            for c in choice.candidates
        ),
        grown=grown,
    )


def _places(shape: Shape) -> list[Coordinate]:
    return [
        Coordinate(p, d, t)
        for p in range(shape.pp)
        for d in range(shape.dp)
        for t in range(shape.tp)
    ]


def _seat(job: JobSpec, shape: Shape, rank: int, place: Place) -> RankIdentity:
    mine = share(job.microbatches, shape.dp, place.at.dp)
    return RankIdentity(
        rank=rank,
        node=place.slot.node,
        slot=place.slot.number,
        pp=place.at.pp,
        dp=place.at.dp,
        tp=place.at.tp,
        microbatches=(mine.start, mine.stop),
        stays=place.stays,
        before=place.slot.held,
    )


def row_of(job: JobSpec, left: Sequence[NodeSlot], before: Shape) -> SurvivorsRow:
    """Return in short what is left comes to; that nothing fits is an answer too."""
    ideal = _ideal(len(left), before)
    try:
        choice = choose(job, left, before)
    except RefusedError as error:
        return SurvivorsRow(
            survivors=len(left),
            shape=None,
            throughput=0.0,
            ideal=ideal,
            moves=0,
            parked=0,
            refused=str(error.found),
        )
    return SurvivorsRow(
        survivors=len(left),
        shape=choice.shape,
        throughput=_throughput(job, choice.shape, before),
        ideal=ideal,
        moves=choice.moves,
        parked=len(choice.parked),
        refused="",
    )


def _grown(job: JobSpec, left: Sequence[NodeSlot], before: Shape, slots: int) -> SurvivorsRow:
    taken = {s.node for s in left}
    name = next(n for n in (f"new{k}" for k in range(len(taken) + 1)) if n not in taken)
    return row_of(job, [*left, *(NodeSlot(name, k) for k in range(slots))], before)


def _throughput(job: JobSpec, shape: Shape, before: Shape) -> float:
    return job.step_cost(before) / job.step_cost(shape)


def _ideal(slots: int, before: Shape) -> float:
    return min(1.0, slots / before.world)
