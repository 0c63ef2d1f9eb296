"""What a seed means: nodes, tiers, lives, and who dies when."""

from __future__ import annotations

import random
from typing import Any

import msgspec

__all__ = ["AGENT_MOMENTS", "TRAINER_MOMENTS", "VICTIMS", "Arm", "LifePlan", "Schedule", "draw"]

TRAINER_MOMENTS = {
    "copy": ("copy_now:before", "copy_now:after", "unit:after", "copy_rest:after"),
    "seal": ("seal:before", "slot_seal:after", "seal:after", "begin:after"),
    "promise": ("reached:before", "reached:after", "complete:after"),
    "restore": ("meet:after", "sources:after", "load_one:before", "fetch:before", "fetch:after"),
    "claim": ("claim:before", "claim:after"),
}
"""Points in trainers, by what goes on."""
AGENT_MOMENTS = {
    "digest": ("digest:before", "digest:after", "keep:after"),
    "drain": ("store_write:after", "store_put:before", "share:after"),
    "upload": ("to_peer:before", "guest:before", "guest:after", "shelf_put:after", "to_peer:after"),
    "commit": ("gather:before", "publish:before", "publish:after"),
    "retention": ("retention:before", "store_delete:after", "completed:before", "completed:after"),
    "promotion": ("promote:before", "adopt:before", "adopt:after", "promote:after"),
}
"""Points in agents."""
VICTIMS = ("trainer", "trainers", "agent", "agents", "both", "node", "everything")
"""A trainer; all; one node's agent; all; both of a node; that and its folder; all but the disks."""


class Arm(msgspec.Struct, frozen=True):
    """A death that waits for its moment.

    Attributes
    ----------
    moment
        The `nth` time that a process of `node` (any, where None) comes there; ``time``: that many
        milliseconds after the life has restored.
    freeze_s
        Agents among the victims are stopped for so long before they die.
    thaw_s
        The agents of the victims' node are stopped instead, and go on so much later: zombies.
    """

    number: int
    victims: str
    of: int
    what: str
    moment: str
    nth: int
    node: int | None
    freeze_s: float = 0.0
    thaw_s: float = 0.0


class LifePlan(msgspec.Struct, frozen=True):
    """One life of the job.

    Attributes
    ----------
    nodes
        Node of each rank.
    forked
        Agents are forked, with hooks in them; else trainers start them as they do for users.
    """

    number: int
    nodes: tuple[int, ...]
    steps: int
    pause_s: float
    forked: bool
    arms: tuple[Arm, ...]
    late_s: float
    """How long the launcher takes to end the other trainers when one died."""
    gap_s: float
    """How long until the next life."""


class Schedule(msgspec.Struct, frozen=True):
    """A job that dies again and again; the last life is left in peace."""

    seed: int
    tiers: dict[str, int]
    root_every: int
    keep: int | None
    local_keep: int
    throttle: float | None
    lives: tuple[LifePlan, ...]

    @property
    def deaths(self) -> int:
        """How many there are to be."""
        return sum(len(life.arms) for life in self.lives)


def draw(seed: int) -> Schedule:
    """Return what `seed` stands for."""
    rng = random.Random(seed)
    names = rng.choice(
        [("memory", "peer", "local")] * 3
        + [("memory", "peer"), ("memory", "local"), ("peer", "local"), ("memory",), ("peer",)]
        + [("local",)]
    )
    tiers = {name: rng.choice((1, 1, 1, 2, 3)) for name in names}
    lives: list[LifePlan] = []
    for number in range(rng.choice((1, 2, 3, 3, 4))):
        lives.append(_life(rng, number, sum(len(life.arms) for life in lives), tiers))
    lives.append(LifePlan(len(lives), (0, 1), 3, 0.0, True, (), 0.0, 0.0))
    return Schedule(
        seed=seed,
        tiers=tiers,
        root_every=rng.choice((3, 5, 8, 100)),
        keep=rng.choice((None, 2, 2)),
        local_keep=rng.choice((1, 2)),
        throttle=rng.choice((None, None, 30e6)),
        lives=tuple(lives),
    )


def _life(rng: random.Random, number: int, deaths: int, tiers: dict[str, int]) -> LifePlan:
    nodes: tuple[int, ...] = rng.choice(((0, 1), (0, 1), (0, 1), (0, 0, 1), (0, 0, 1, 1)))
    if number and rng.random() < 0.2:
        only = rng.randrange(2)
        nodes = tuple(n for n in nodes if n == only)
    arms = []
    if rng.random() < 0.35:
        arms.append(_arm(rng, deaths, ("agent", "agent", "agents"), nodes, tiers, number))
    others = ("trainer", "trainer", "trainers", "both", "node", "everything", "agent")
    arms.append(_arm(rng, deaths + len(arms), others, nodes, tiers, number))
    return LifePlan(
        number=number,
        nodes=nodes,
        steps=rng.randint(5, 10),
        pause_s=rng.choice((0.0, 0.0, 0.005, 0.03)),
        forked=rng.random() < 0.85,
        arms=tuple(arms),
        late_s=rng.choice((0.0, 0.0, 0.02, 0.2)),
        gap_s=rng.choice((0.0, 0.0, 0.1, 0.4)),
    )


def _arm(
    rng: random.Random,
    number: int,
    victims: tuple[str, ...],
    nodes: tuple[int, ...],
    tiers: dict[str, int],
    life: int,
) -> Arm:
    chosen = rng.choice(victims)
    moments: dict[str, Any] = {**TRAINER_MOMENTS, **AGENT_MOMENTS, "time": ("time",)}
    if "peer" not in tiers or len(set(nodes)) < 2:
        del moments["upload"]
    if not life:
        del moments["restore"]  # nothing is there
    if chosen in ("trainer", "trainers", "agent", "agents"):
        del moments["promotion"]  # it comes when trainers are gone
    what = rng.choice(sorted(moments))
    moment = rng.choice(moments[what])
    early = what in ("restore", "claim")
    nth = 1 if early else rng.randint(5, 400) if what == "time" else rng.randint(1, 7)
    if what in ("commit", "retention", "promotion"):
        nth = rng.randint(1, 2)
    if moment.startswith(("unit", "store", "shelf")):
        nth *= 4
    return Arm(
        number=number,
        victims=chosen,
        of=rng.choice(nodes),
        what=what,
        moment=moment,
        nth=nth,
        node=rng.choice((None, rng.choice(nodes))),
        freeze_s=rng.choice((0.0, 0.0, 0.0, 0.15)),
        thaw_s=rng.choice((0.0, 0.0, 0.0, 0.4)) if chosen in ("trainer", "trainers") else 0.0,
    )
