"""Layout policy: pipeline, data, tensor parallel sizes that survivors train on; fit in memory.

In it: when spares are used; when it is worth changing a layout; words that explain the choice.

Cheapest first: a spare takes the place of a lost slot; else data-parallel replicas are dropped;
else the pipeline is cut another way, where the job says that its layers allow it; the tensor-
parallel size only changes if the job says that it may. The number of micro-batches is a constant
of the job, so that none of this changes what a step computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from ckptd.elastic.placement import NodeSlot, SlotPosition, place, stages_within, units
from ckptd.errors import RefusedError, UsageError, first_few

_SUMMING = 0.1
"""Time in which many replicas add up gradients over full-speed links, by that of computing.

No job tells it. It counts only between nodes whose links differ.
"""
_CROSSING = 2
"""How many times slower gradients are added up where a stage leaves its domain."""
_BACKWARD = 2 / 3
"""Part of a micro-batch's time that its backward pass takes."""


class Shape(msgspec.Struct, frozen=True, order=True):
    """Sizes of the pipeline, of data parallelism and of tensor parallelism."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} tp={self.tp}"


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of a rank; all in bytes.

    Attributes
    ----------
    replicated
        Of the whole model, held by each data-parallel replica: parameters, gradients.
    sharded
        Of the whole model, shared out among the replicas: with ZeRO or FSDP, optimizer state.
    activations
        Of one micro-batch through the whole model. A stage keeps as many as the pipeline is long.
    limit
        Of one rank.
    """

    replicated: int = 0
    sharded: int = 0
    activations: int = 0
    limit: int

    def needed(self, shape: Shape) -> int:
        """Return the bytes that a rank of `shape` needs at most, in the first stage."""
        stage = shape.pp * shape.tp
        # A first stage has pp micro-batches under way, each of 1/pp of the layers.
        weights = self.replicated / stage + self.sharded / (stage * shape.dp)
        return int(weights + self.activations / shape.tp)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a job that the policy uses.

    Attributes
    ----------
    microbatches
        Of a step, on all ranks together: a constant.
    planned
        The shape that the job was made for; it never grows beyond its number of replicas.
    pp
        Pipeline sizes that its layers allow, besides the planned.
    tp
        Tensor-parallel sizes that it allows, besides the planned: they change rounding.
    memory
        Where known; without it every shape fits.
    least
        Ranks below which the job waits rather than trains.
    worth
        How many times faster steps must become before the pipeline is cut again where replicas
        could be dropped instead.
    """

    microbatches: int
    planned: Shape
    pp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    memory: MemoryNeed | None = None
    least: int = 1
    worth: float = 1.1

    def __post_init__(self) -> None:
        """Check the numbers."""
        shapes = msgspec.structs.astuple(self.planned)
        good = min(self.microbatches, self.least, *shapes, *self.pp, *self.tp) >= 1
        if not good or self.planned.dp > self.microbatches or self.least > self.planned.world:
            raise UsageError(
                "invalid job spec",
                wanted="sizes of at least 1, no more replicas than micro-batches, and "
                "at least as many ranks planned as asked for",
                found=f"{self.planned}, {self.microbatches} micro-batches, at least {self.least} "
                "ranks",
            )

    def step_cost(self, shape: Shape) -> float:
        """Return how long a step takes, in times of one micro-batch through the planned model.

        The longest share of micro-batches passes a pipeline that has to fill first; ranks are taken
        to be equally fast.
        """
        longest = -(-self.microbatches // shape.dp)
        return (longest + shape.pp - 1) / (shape.pp * shape.tp)

    def network_cost(self, shape: Shape, places: Sequence[SlotPosition]) -> float:
        """Return by how much slow links, and those between domains, make a step longer.

        Each stage adds up gradients at the pace of its slowest link. A later one begins a backward
        pass sooner than the one before it, and has that much time more.
        """
        stages: dict[int, list[NodeSlot]] = defaultdict(list)
        for one in places:
            stages[one.at.pp].append(one.slot)
        share = -(-self.microbatches // self.planned.dp)
        adding = _SUMMING * share * (1 - 1 / shape.dp) / (shape.pp * shape.tp)
        sooner = _BACKWARD / (shape.pp * shape.tp)
        ends = [
            adding * max(1 << max(s.pace for s in slots), _far(slots)) - stage * sooner
            for stage, slots in stages.items()
        ]
        return max(max(ends) - adding, 0.0)

    def idle_cost(self, shape: Shape) -> float:
        """Return how long of `step_cost` a rank waits while the pipeline fills and drains."""
        return (shape.pp - 1) / (shape.pp * shape.tp)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that was looked at.

    Attributes
    ----------
    shape
        With as many replicas as fit.
    cost
        Of a step, see `JobSpec.step_cost`; with `network`.
    idle
        Part of it for which ranks wait while the pipeline fills and drains.
    network
        Part of it that slow links and those between domains add, see `JobSpec.network_cost`; 0
        where all links are equally fast, or nobody measured them.
    within
        Pipeline stages whose replicas are all in one domain; None where no node says where it is.
    moves
        Ranks that do not hold their stage's parameters already.
    refused
        Why it is out of the question; empty if it is not.
    """

    shape: Shape
    cost: float
    idle: float = 0.0
    network: float = 0.0
    within: int | None = None
    moves: int = 0
    refused: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Layout that the policy chose, and why.

    Attributes
    ----------
    shape
        The layout's sizes.
    places
        Which slot takes which place, in the order of ranks.
    parked
        Slots that have nothing to do: spares.
    moves
        Ranks whose parameters come from elsewhere.
    why
        Sentences, the deciding one first.
    candidates
        All that were compared, best first.
    """

    shape: Shape
    places: tuple[SlotPosition, ...]
    parked: tuple[NodeSlot, ...]
    moves: int
    why: tuple[str, ...]
    candidates: tuple[Candidate, ...]


_Placed = tuple[tuple[SlotPosition, ...], tuple[NodeSlot, ...]]
"""Slots with their places, and those that are parked."""
_Judged = tuple[Candidate, _Placed | None]


def together(one: Candidate) -> str:
    """Return in words how near the replicas of each stage are; empty where no node says where."""
    if one.within is None:
        return ""
    return f"the replicas of {one.within} of {one.shape.pp} pipeline stages are within one domain"


def choose(job: JobSpec, slots: Sequence[NodeSlot], current: Shape | None = None) -> Choice:
    """Return the layout of `job` on what is left, or newly there.

    Parameters
    ----------
    job
        What is allowed.
    slots
        Everything that can run a rank: survivors with the place that they had, spares and
        newcomers without.
    current
        The shape that they had; the planned one if left out.

    Raises
    ------
    RefusedError
        Nothing fits; the reasons are in ``found``.
    UsageError
        Two slots had one place, or a place that the shape does not have.
    """
    current = current or job.planned
    _check(slots, current)
    judged = list(_candidates(job, slots, current))
    judged.sort(key=lambda one: _rank(job, one[0], current))
    candidates = tuple(one for one, _ in judged)
    best, placed = judged[0]
    if placed is None:
        reasons = "; ".join(f"{c.shape}: {c.refused}" for c in candidates)
        raise RefusedError(
            "no layout of this job fits the remaining slots",
            wanted=f"{_least(job)} slots at least, those of a tensor-parallel group on one node",
            found=f"{len(slots)} slots on {len({s.node for s in slots})} nodes; {reasons}",
            hint="add nodes; or allow smaller pipelines or tensor-parallel groups",
        )
    places, parked = placed
    return Choice(
        shape=best.shape,
        places=places,
        parked=parked,
        moves=best.moves,
        why=tuple(_why(job, best, candidates, current, slots, len(parked))),
        candidates=candidates,
    )


def _check(slots: Sequence[NodeSlot], current: Shape) -> None:
    held = [s.held for s in slots if s.held is not None]
    if len(set(held)) < len(held) or any(
        not all(0 <= a < b for a, b in zip(c, msgspec.structs.astuple(current), strict=True))
        for c in held
    ):
        raise UsageError(
            "slots hold invalid positions",
            wanted=f"each place of {current} once at most",
            found=", ".join(str(tuple(c)) for c in held)[:500],
        )


def _candidates(job: JobSpec, slots: Sequence[NodeSlot], current: Shape) -> Iterator[_Judged]:
    for tp in dict.fromkeys((job.planned.tp, *job.tp)):
        for pp in dict.fromkeys((job.planned.pp, *job.pp)):
            fitting = min(units(slots, tp) // pp, job.planned.dp, job.microbatches)
            shape = Shape(pp, max(fitting, 1), tp)
            yield _judged(job, slots, shape, current, fitting)


def _judged(
    job: JobSpec, slots: Sequence[NodeSlot], shape: Shape, current: Shape, fitting: int
) -> _Judged:
    cost, idle, refused = job.step_cost(shape), job.idle_cost(shape), ""
    if not fitting:
        refused = f"needs {shape.world} slots, in groups of {shape.tp} on one node"
    elif shape.world < job.least:
        refused = f"has fewer than the {job.least} ranks asked for"
    elif job.memory is not None and (needed := job.memory.needed(shape)) > job.memory.limit:
        refused = f"needs {needed:,} bytes a rank of {job.memory.limit:,}"
    if refused:
        return Candidate(shape=shape, cost=cost, idle=idle, refused=refused), None
    network, placed = _placed(job, slots, shape, current)
    one = Candidate(
        shape=shape,
        cost=cost + network,
        idle=idle,
        network=network,
        within=stages_within(placed[0]),
        moves=sum(not p.stays for p in placed[0]),
    )
    return one, placed


def _placed(
    job: JobSpec, slots: Sequence[NodeSlot], shape: Shape, current: Shape
) -> tuple[float, _Placed]:
    """Return the placement that makes steps shortest, and what the network adds to them."""
    keep = (shape.pp, shape.tp) == (current.pp, current.tp)
    placing = partial(place, slots, shape.pp, shape.dp, shape.tp, keep=keep)
    blind = placing()
    if len({slot.pace for slot in slots}) < 2:
        return 0.0, blind
    costs = [(job.network_cost(shape, one[0]), one) for one in (blind, placing(paced=True))]
    kept = min(costs, key=_first)
    anew = placing(paced=True, again=True)
    network, step = job.network_cost(shape, anew[0]), job.step_cost(shape)
    # Survivors hold state: to give them other places must be worth it.
    return (network, anew) if (step + network) * job.worth < step + kept[0] else kept


def _first(pair: tuple[float, _Placed]) -> float:
    return pair[0]


def _far(slots: Sequence[NodeSlot]) -> int:
    """Return how many times slower gradients are added up than within one domain."""
    return _CROSSING if len({slot.domains for slot in slots}) > 1 else 1


def _rank(job: JobSpec, c: Candidate, current: Shape) -> tuple[object, ...]:
    changed = c.shape.pp != current.pp
    # A pipeline that is cut again moves everything, so it must be worth it.
    cost = c.cost * job.worth if changed else c.cost
    return (bool(c.refused), c.shape.tp != job.planned.tp, cost, c.moves, c.shape)


def _least(job: JobSpec) -> int:
    return max(job.least, min((job.planned.pp, *job.pp)) * min((job.planned.tp, *job.tp)))


def _why(
    job: JobSpec,
    best: Candidate,
    candidates: Sequence[Candidate],
    current: Shape,
    slots: Sequence[NodeSlot],
    parked: int,
) -> Iterator[str]:
    shape, least = best.shape, min(slot.pace for slot in slots)
    if shape == current:
        yield f"the layout stays {shape}: spares take the places of those that are gone"
    elif shape.pp == current.pp and shape.tp == current.tp:
        what = "more" if shape.dp > current.dp else "fewer"
        yield f"{what} replicas, {current.dp} to {shape.dp}: nothing else changes"
    else:
        yield f"from {current} to {shape}"
    longest, rest = divmod(job.microbatches, shape.dp)
    share = f"{longest} or {longest + 1}" if rest else f"{longest}"
    yield f"each replica computes {share} of the {job.microbatches} micro-batches"
    yield f"{best.moves} of {shape.world} ranks get parameters that they do not hold"
    if said := together(best):
        yield said
    if slow := sorted({slot.node for slot in slots if slot.pace > least}):
        ratio = 1 << max(slot.pace - least for slot in slots)
        yield (
            f"links of {first_few(slow, 5)} are up to {ratio} times slower than others: by the "
            f"model the network adds {100 * best.network / best.cost:.1f} % to a step"
        )
    if parked:
        yield f"{parked} slots are parked as spares"
    for other in candidates:
        if other is not best:
            slower = f"a step would take {other.cost / best.cost:.2f} times as long"
            if other.cost < best.cost:
                same = other.shape.tp == shape.tp
                slower += ", too little for another pipeline" if same else ", with other rounding"
            yield f"not {other.shape}: {other.refused or slower}"
