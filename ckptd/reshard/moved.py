"""How many bytes a new layout moves, and from where: counted by the planner, nothing is read.

What a survivor held in memory stays with it, or comes from the nearest survivor that held the same;
what nobody left held comes from the root, or from a partner's memory where there are near tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from ckptd.elastic.placement import Coordinate, NodeSlot
from ckptd.elastic.policy import Shape
from ckptd.errors import UsageError
from ckptd.lay.copies import compose
from ckptd.lay.live import Transfers
from ckptd.lay.local import LaidTensor
from ckptd.lay.resolve import Bound, MeshShape

__all__ = ["SOURCES", "Moved", "moved", "moved_whole"]

SOURCES = ("own", "node", "peer", "root")
"""Nearest first: a rank's own memory, another rank's of its node, another node's, the root."""
_AXES = ("pp", "dp", "tp")


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of state that ranks need in the new layout.

    Attributes
    ----------
    sources
        By where they come from, see `SOURCES`.
    received
        The same by the node that gets them.
    sent
        By the node that gives them to another one.
    """

    sources: dict[str, int]
    received: dict[str, dict[str, int]]
    sent: dict[str, int]


def _origin(giver: NodeSlot | None, taker: NodeSlot) -> str:
    if giver is None:
        return "root"
    if (giver.node, giver.number) == (taker.node, taker.number):
        return "own"
    return "node" if giver.node == taker.node else "peer"


def moved(
    before: Bound,
    after: Bound,
    *,
    shape: Shape,
    seats: Sequence[NodeSlot],
    left: Sequence[NodeSlot],
    itemsize: Callable[[str], int],
) -> Moved:
    """Count what moves between two layouts of one program.

    Parameters
    ----------
    before, after
        The layout on the mesh until now, and on the new one.
    shape
        The new sizes.
    seats
        Who is which rank now, in the order of pipeline, data and tensor coordinates.
    left
        Slots that are left, with the places that they had.
    itemsize
        Returns the bytes of an element by a stored tensor's name.

    Raises
    ------
    UsageError
        kind ``bad-argument``: the program's mesh has other axes than the sizes need.
    MismatchError
        The layouts do not fit each other.
    """
    composition = compose(before, after)
    old, new = composition.source.mesh, composition.target.mesh
    places = {slot.held: slot for slot in left if slot.held is not None}
    by_rank = {r: places[c] for r in range(old.world) if (c := _place(old, r)) in places}
    number = {
        Coordinate(p, d, t): (p * shape.dp + d) * shape.tp + t
        for p in range(shape.pp)
        for d in range(shape.dp)
        for t in range(shape.tp)
    }
    takers = [seats[number[_place(new, rank)]] for rank in range(new.world)]

    def distance(giver: int, rank: int) -> int:
        return SOURCES.index(_origin(by_rank.get(giver), takers[rank]))

    transfers = Transfers(composition, price=distance)
    count = _Count()
    for rank, taker in enumerate(takers):
        for tensor, plan in transfers.local(rank):
            size = itemsize(_stored_name(transfers, tensor)) if tensor.pieces else 0
            for copy in plan.copies:
                numel = sum(block.numel for block in copy.blocks)
                count.add(by_rank.get(copy.rank), taker, numel * size)
    return count.moved()


def _stored_name(transfers: Transfers, tensor: LaidTensor) -> str:
    form, first = transfers.composition.target, tensor.pieces[0]
    return form.tensor(first.rule, first.indexes, tensor.state).name


def _place(mesh: MeshShape, rank: int) -> Coordinate:
    at = mesh.coordinates(rank)
    strange = [a for a in at if a not in _AXES and mesh.extents[a] > 1]
    if strange:
        raise UsageError(
            "the mesh of this program has axes that the layout policy does not know",
            kind="bad-argument",
            wanted="axes pp, dp and tp",
            found=", ".join(strange),
        )
    return Coordinate(*(at.get(a, 0) for a in _AXES))


def moved_whole(total: int, seats: Sequence[NodeSlot], left: Sequence[NodeSlot]) -> Moved:
    """Count for a job whose ranks all hold everything: who has nothing takes all of it.

    Parameters
    ----------
    total
        Bytes of the whole state.
    seats
        Who is a rank now.
    left
        Slots that are left; those that had a place hold the state.
    """
    holders = [s for s in left if s.held is not None]
    count = _Count()
    for number, taker in enumerate(seats):
        turned = holders[number % max(len(holders), 1) :] + holders
        origins = [(SOURCES.index(_origin(h, taker)), n) for n, h in enumerate(turned)]
        giver = turned[min(origins)[1]] if turned else None
        count.add(giver, taker, total)
    return count.moved()


class _Count:
    """Adds up."""

    def __init__(self) -> None:
        self._received: dict[str, Counter[str]] = {}
        self._sent: Counter[str] = Counter()

    def add(self, giver: NodeSlot | None, taker: NodeSlot, nbytes: int) -> None:
        origin = _origin(giver, taker)
        self._received.setdefault(taker.node, Counter())[origin] += nbytes
        if origin == "peer" and giver is not None:
            self._sent[giver.node] += nbytes

    def moved(self) -> Moved:
        every = {n: {s: c[s] for s in SOURCES} for n, c in self._received.items()}
        return Moved(
            sources={s: sum(c[s] for c in every.values()) for s in SOURCES},
            received=every,
            sent=dict(self._sent),
        )
