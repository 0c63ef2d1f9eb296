"""One life of a job with a fault in it: what it does, where, drawn from a seed."""

from __future__ import annotations

import random

import msgspec

__all__ = ["LOOPS", "POINTS", "Case", "draw"]

LOOPS = ("hand", "ddp", "fsdp", "tp", "pipe")
REPLICATED = ("hand", "ddp")
"""Loops in which all ranks hold the same parameters."""
POINTS = ("before", "between", "after")
WARM = 8
"""Steps after which faults come: warm-up is over."""
EVERY = 20


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one job does.

    Attributes
    ----------
    kind, seed
        Fault and seed; see `tests.monitor.faults.kinds`.
    world, nodes
        Ranks, and nodes that they pretend to be on.
    victim, step, point
        Whom the fault meets, in which step, and before which of its calls.
    loop
        What it trains with.
    steps
        Steps that it makes if nothing stops it.
    floor
        Least time of silence that counts as a hang, s.
    pause_s
        How long a rightful pause lasts.
    every
        A checkpoint and an evaluation each so many steps; 0 is none.
    compile
        Whether a small function is compiled in the middle.
    watched
        Whether ranks record themselves.
    """

    kind: str
    seed: int
    world: int = 4
    nodes: int = 1
    victim: int = 0
    step: int = 1 << 60
    point: str = "before"
    loop: str = "hand"
    steps: int = 1 << 60
    floor: float = 2.0
    pause_s: float = 0.0
    every: int = EVERY
    compile: bool = False
    watched: bool = True

    def node(self, rank: int) -> int:
        """Return the number of the node that `rank` is on."""
        return rank * self.nodes // self.world

    @property
    def name(self) -> str:
        """Short, and of this case only."""
        return f"{self.kind}-{self.seed}"


def draw(kind: str, seed: int, *, floor: float, nodes: int, pause: float, world: int = 4) -> Case:
    """Return the case of `kind` that `seed` stands for."""
    rng = random.Random(f"{kind} {seed}")
    # A slow rank is told by its own past. In steps with a checkpoint its long floor would hold.
    step = rng.choice([s for s in range(*_steps(kind)) if s % EVERY])
    return Case(
        kind=kind,
        seed=seed,
        world=world,
        nodes=nodes,
        victim=rng.randrange(world),
        step=step,
        point=rng.choice(POINTS),
        loop=rng.choice(REPLICATED if kind == "corrupt" else LOOPS),
        floor=floor,
        pause_s=pause * floor,
    )


def _steps(kind: str) -> tuple[int, int]:
    return (100, 130) if kind == "slow" else (WARM, 60)
