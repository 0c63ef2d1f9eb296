"""Layout policy: pipeline, data, tensor parallel sizes that survivors train on; fit in memory.

In it: when spares are used; when it is worth changing a layout; words that explain the choice.

Cheapest first: a spare takes the place of a lost slot; else data-parallel replicas are dropped;
else the pipeline is cut another way, where the job says that its layers allow it; the tensor-
parallel size only changes if the job says that it may. The number of micro-batches is a constant
of the job, so that none of this changes what a step computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ckptd.elastic.placement import NodeSlot, SlotPosition, place, stages_within, units
from ckptd.errors import RefusedError, UsageError


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
        Of a step, see `JobSpec.step_cost`.
    idle
        Part of it for which ranks wait while the pipeline fills and drains.
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
    candidates = sorted(_candidates(job, slots, current), key=lambda c: _rank(job, c, current))
    best = next(iter(candidates), None)
    if best is None or best.refused:
        reasons = "; ".join(f"{c.shape}: {c.refused}" for c in candidates)
        raise RefusedError(
            "no layout of this job fits the remaining slots",
            wanted=f"{_least(job)} slots at least, those of a tensor-parallel group on one node",
            found=f"{len(slots)} slots on {len({s.node for s in slots})} nodes; {reasons}",
            hint="add nodes; or allow smaller pipelines or tensor-parallel groups",
        )
    places, parked = _placed(slots, best.shape, current)
    return Choice(
        shape=best.shape,
        places=places,
        parked=parked,
        moves=best.moves,
        why=tuple(_why(job, best, candidates, current, len(parked))),
        candidates=tuple(candidates),
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


def _candidates(job: JobSpec, slots: Sequence[NodeSlot], current: Shape) -> Iterator[Candidate]:
    for tp in dict.fromkeys((job.planned.tp, *job.tp)):
        for pp in dict.fromkeys((job.planned.pp, *job.pp)):
            fitting = min(units(slots, tp) // pp, job.planned.dp, job.microbatches)
            shape = Shape(pp, max(fitting, 1), tp)
            yield _judged(job, slots, shape, current, fitting)


def _judged(
    job: JobSpec, slots: Sequence[NodeSlot], shape: Shape, current: Shape, fitting: int
) -> Candidate:
    cost, idle, refused = job.step_cost(shape), job.idle_cost(shape), ""
    if not fitting:
        refused = f"needs {shape.world} slots, in groups of {shape.tp} on one node"
    elif shape.world < job.least:
        refused = f"has fewer than the {job.least} ranks asked for"
    elif job.memory is not None and (needed := job.memory.needed(shape)) > job.memory.limit:
        refused = f"needs {needed:,} bytes a rank of {job.memory.limit:,}"
    if refused:
        return Candidate(shape=shape, cost=cost, idle=idle, refused=refused)
    places, _ = _placed(slots, shape, current)
    return Candidate(
        shape=shape,
        cost=cost,
        idle=idle,
        within=stages_within(places),
        moves=sum(not p.stays for p in places),
    )


def _placed(
    slots: Sequence[NodeSlot], shape: Shape, current: Shape
) -> tuple[tuple[SlotPosition, ...], tuple[NodeSlot, ...]]:
    keep = (shape.pp, shape.tp) == (current.pp, current.tp)
    return place(slots, shape.pp, shape.dp, shape.tp, keep=keep)


def _rank(job: JobSpec, c: Candidate, current: Shape) -> tuple[object, ...]:
    changed = c.shape.pp != current.pp
    # A pipeline that is cut again moves everything, so it must be worth it.
    cost = c.cost * job.worth if changed else c.cost
    return (bool(c.refused), c.shape.tp != job.planned.tp, cost, c.moves, c.shape)


def _least(job: JobSpec) -> int:
    return max(job.least, min((job.planned.pp, *job.pp)) * min((job.planned.tp, *job.tp)))


def _why(
    job: JobSpec, best: Candidate, candidates: Sequence[Candidate], current: Shape, parked: int
) -> Iterator[str]:
    shape = best.shape
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
    if parked:
        yield f"{parked} slots are parked as spares"
    for other in candidates:
        if other is not best:
            slower = f"a step would take {other.cost / best.cost:.2f} times as long"
            yield f"not {other.shape}: {other.refused or slower}"
