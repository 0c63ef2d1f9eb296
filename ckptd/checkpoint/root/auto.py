"""`Auto`: how often to save, from costs and failures (MTBF); Daly's optimum, its bounds.

In it: default failure rate; longest interval; earlier lives of the job as evidence.

The optimum is J. T. Daly's (A higher order estimate of the optimum checkpoint interval for restart
dumps, Future Generation Computer Systems 22, 2006), which begins with J. W. Young's square root
(A first order approximation to the optimum checkpoint interval, CACM 17, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import msgspec
import numpy as np

from ckptd.checkpoint.format.names import generation_key
from ckptd.checkpoint.format.records import Generation
from ckptd.checkpoint.root.index import Index, seconds_of
from ckptd.checkpoint.root.policy import check_given, check_positive
from ckptd.errors import UsageError

NODE_MTBF_HOURS = 54 * 24 * (16_384 // 8) / 419
"""Hours between failures of one node of 8 accelerators.

Llama 3 405B (The Llama 3 Herd of Models, 2024, section 3.3.4): 419 unexpected interruptions in 54
days on 16,384 GPUs, that is 6,335 hours a node.
"""
BEYOND_NEAR = 0.15
"""Share of failures that near tiers do not survive: see `Auto`."""
_HUGE_EXPONENT = 700.0
_LONGEST_S = 1e15


class Auto(msgspec.Struct, frozen=True):
    """Save as often as pays, from measured costs and the failure rate. Rank 0 decides.

    The first save is due at once: it shows that the store works, and what a save costs.

    Parameters
    ----------
    mtbf_hours
        Mean time between failures of the whole job. None: measured from the earlier lives of the
        job at this root when there are enough of them, else from `nodes`.
    nodes
        Number of nodes; None counts the hosts of the job.
    node_mtbf_hours
        Mean time between failures of one node. The default is published for nodes of 8 GPUs.
    max_minutes
        Never longer than this, unless a save takes longer to become durable.
    beyond_near
        With near tiers: share of the failures that they do not survive, so that the root is
        needed, above 0 and at most 1. The default is published: on three clusters 85 % of failures
        were mended from the memory of nodes (Moody et al., SC 2010, on SCR).

    Raises
    ------
    UsageError
        A number that is not positive and finite, or two that exclude each other.
    """

    mtbf_hours: float | None = None
    nodes: int | None = None
    node_mtbf_hours: float = NODE_MTBF_HOURS
    max_minutes: float = 60.0
    beyond_near: float = BEYOND_NEAR
    by_clock: ClassVar[bool] = True
    """Whether rank 0 must decide: always."""

    def __post_init__(self) -> None:
        if self.mtbf_hours is not None:
            check_positive("mtbf_hours", self.mtbf_hours, (int, float))
            if self.nodes is not None:
                raise UsageError(
                    "mtbf_hours is for the whole job: it cannot be combined with nodes",
                    wanted="mtbf_hours, or nodes with node_mtbf_hours",
                    found=repr(self),
                )
        check_given(self, (int,), "nodes")
        check_positive("node_mtbf_hours", self.node_mtbf_hours, (int, float))
        check_positive("max_minutes", self.max_minutes, (int, float))
        check_positive("beyond_near", self.beyond_near, (int, float))
        if self.beyond_near > 1:
            raise UsageError(
                "beyond_near must be a fraction",
                wanted="above 0, and at most 1",
                found=repr(self.beyond_near),
            )


class Cost(msgspec.Struct, frozen=True):
    """Cost of one save, in seconds.

    Attributes
    ----------
    blocked_s
        How long the call held the loop.
    inflation_s
        How much longer the steps took while it drained.
    durable_s
        From the call to the commit.
    """

    blocked_s: float
    inflation_s: float
    durable_s: float

    @property
    def total_s(self) -> float:
        """Seconds that the loop lost."""
        return self.blocked_s + self.inflation_s


class Mtbf(msgspec.Struct, frozen=True):
    """A mean time between failures in seconds, and where it comes from."""

    seconds: float
    source: str


class IntervalChoice(msgspec.Struct, frozen=True):
    """An interval and why; ``str()`` says it in one sentence.

    Attributes
    ----------
    cost
        A typical save.
    mtbf
        How often the job fails.
    optimum_s
        Where the least time is lost, in seconds between the end of a save and the next.
    interval_s
        What was chosen: the optimum, within its bounds.
    bound
        ``""``, ``"drain"`` or ``"max"``: what kept it from the optimum.
    waste
        Expected share of the time that is lost to saving, to work done twice and, where its
        duration is known, to starting again, 0 to 1.
    restart_s
        How long a restart takes, from the failure to the first step; 0 if that is not known.
    """

    cost: Cost
    mtbf: Mtbf
    optimum_s: float
    interval_s: float
    bound: str
    waste: float
    restart_s: float = 0.0

    def __str__(self) -> str:
        cost = self.cost
        again = f", {duration(self.restart_s)} to restart" if self.restart_s else ""
        lost = "saves, to restarts and to work" if self.restart_s else "saves and to work"
        why = {
            "": "the optimum",
            "drain": f"as long as a save takes; the optimum would be {duration(self.optimum_s)}",
            "max": f"max_minutes; the optimum would be {duration(self.optimum_s)}",
        }[self.bound]
        return (
            f"saving every {duration(self.interval_s)} ({why}): a save costs"
            f" {duration(cost.total_s)} ({duration(cost.blocked_s)} in the call,"
            f" {duration(cost.inflation_s)} in slower steps) and is durable after"
            f" {duration(cost.durable_s)}, a failure is expected every"
            f" {duration(self.mtbf.seconds)} ({self.mtbf.source}){again}, and"
            f" {100 * self.waste:.3g} % of the time goes to {lost} done twice"
        )


def typical(costs: Sequence[Cost]) -> Cost:
    """Return the medians of some saves, at least one."""
    table = [(c.blocked_s, c.inflation_s, c.durable_s) for c in costs]
    return Cost(*np.median(table, axis=0).tolist())


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's optimal time between the end of a save and the next, in seconds.

    Parameters
    ----------
    cost_s
        What a save costs.
    mtbf_s
        Mean time between failures.

    Notes
    -----
    With d the cost and M the mean time between failures: ``sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) +
    1/9 (d / 2M)) - d``, which holds for d < 2M; beyond it is M. How long a restart takes is not in
    it: in the complete model (see `waste`) it is a factor that no interval changes. Only Daly's
    first approximation, sqrt(2 d (M + R)) - d, has it, because that leaves out failures during
    restarts; the two differ by less than the flat optimum can tell while R is well below M.
    """
    if cost_s <= 0.0:
        return 0.0
    mtbf_s = min(mtbf_s, _LONGEST_S)
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = cost_s / (2.0 * mtbf_s)
    root = math.sqrt(x)
    return 2.0 * mtbf_s * root * (1.0 + root / 3.0 + x / 9.0) - cost_s


def waste(
    interval_s: float, cost_s: float, durable_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """Return the expected share of time that is lost, 0 to 1, by Daly's complete model.

    Failures come at random, during restarts as well. Each costs the work since the last save that
    was durable: the part of an interval, and the time that the save needed to become durable; and
    a restart, after which the job makes steps again.
    """
    durable_s += restart_s
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent + durable_s / mtbf_s > _HUGE_EXPONENT:
        return 1.0
    kept = math.exp(-durable_s / mtbf_s)
    if exponent <= 0.0:
        return 1.0 - kept
    return max(0.0, 1.0 - kept * (interval_s / mtbf_s) / math.expm1(exponent))


def choose(auto: Auto, cost: Cost, mtbf: Mtbf, restart_s: float = 0.0) -> IntervalChoice:
    """Return the interval for saves of this cost.

    It is the optimum, but not above `Auto.max_minutes`, and in any case not below the time
    that a save takes to become durable: the next one would wait for it.
    """
    best = optimum_s(cost.total_s, mtbf.seconds)
    interval, bound = best, ""
    if interval > 60.0 * auto.max_minutes:
        interval, bound = 60.0 * auto.max_minutes, "max"
    if interval < cost.durable_s:
        interval, bound = cost.durable_s, "drain"
    lost = waste(interval, cost.total_s, cost.durable_s, mtbf.seconds, restart_s)
    return IntervalChoice(cost, mtbf, best, interval, bound, lost, restart_s)


def beyond_near(auto: Auto, mtbf: Mtbf) -> Mtbf:
    """Return how often the root is needed where near tiers mend the other failures."""
    share = f"{100 * auto.beyond_near:.3g} % of failures are beyond near tiers"
    return Mtbf(mtbf.seconds / auto.beyond_near, f"{share}; {mtbf.source}")


def duration(seconds: float) -> str:
    """Return seconds for people: two or three digits and the largest unit that fits."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1000.0 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


ENOUGH = 8
"""Lives from which a rate is computed: half too much or too little then costs little, because the
interval goes with the square root and the optimum is flat."""
_READ = 33


def recent(index: Index) -> list[Generation]:
    """Return the records of the newest generations, ascending; at most 33.

    Raises
    ------
    CkptdError
        The store fails, or a record cannot be read.
    """
    return [index.generation(n) for n in index.generations()[-_READ:]]


def lives_of(generations: Sequence[Generation]) -> list[float]:
    """Return the rank-seconds of each earlier life of the job that failed.

    One counts when the next generation is a job that goes on from a checkpoint of it: it had got
    somewhere, and then the job had to begin again. What ended in a rollback by hand, or before its
    first checkpoint, shows nothing about the machines. A life lasts until the next one begins.
    """
    found = []
    for life, after in pairwise(generations):
        goes_on = after.parent is not None and after.parent.generation == life.generation
        seconds = _created(after) - _created(life)
        if goes_on and life.world_size and after.world_size and seconds > 0.0:
            found.append(seconds * life.world_size)
    return found


def mtbf_s(lives: Sequence[float], world: int) -> float | None:
    """Return the mean time between failures for `world` ranks in seconds; None with few lives.

    It is taken from the median, as for failures at random: one night in which the job stayed down
    would spoil a mean.
    """
    if len(lives) < ENOUGH:
        return None
    return float(np.median(lives)) / math.log(2.0) / world


def _created(record: Generation) -> float:
    return seconds_of(record.created, generation_key(record.generation))
