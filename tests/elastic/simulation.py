"""A job in simulated time: real decisions, simulated nodes, faults of all kinds, and a judge.

Nodes and controller exchange messages that take time; links break and heal; controllers die and
come back with nothing but the log. Training makes a step when every rank of one generation is
there and they reach each other, and a step counts when the log's last generation is theirs, as the
checkpoint's commit does it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.elastic.membership import Record, decode_record, encode_record
from ckptd.elastic.messages import (
    Abort,
    Action,
    Append,
    Ended,
    Event,
    Fence,
    Fenced,
    Finish,
    Left,
    Loaded,
    NodeUp,
    Order,
    OrderKind,
    Progress,
    Save,
    Saved,
    Start,
    Suspected,
    Tick,
)
from ckptd.elastic.policy import Job, Shape
from ckptd.elastic.statemachine import ControllerSettings, State, StateMachine

SETTINGS = ControllerSettings(
    silent_s=3.0,
    lease_s=20.0,
    save_s=2.0,
    nodes_s=400.0,
    resume_s=30.0,
    settle_s=4.0,
    grow_s=3.0,
    cycles=8,
    flaps=3,
    flap_window_s=30.0,
    out_s=20.0,
)
_STEP_S = 0.5
_BEAT_S = 0.5


class Violation(AssertionError):
    """Something that must never be."""


@dataclass
class SimNode:
    """A launcher with its workers."""

    name: str
    slots: int
    life: int = 0
    alive: bool = True
    reaches: bool = True
    """Whether it and the controller reach each other."""
    side: int = 0
    """Nodes reach each other if they are on one side."""
    frozen_until: float = 0.0
    fenced: int = 0
    running: int = 0
    """Generation of its workers; they may be loading."""
    ready_at: float = 0.0
    loaded_told: bool = False
    contact: float = 0.0
    started: int = 0
    ended: Ended | None = None


@dataclass
class World:
    """All of it; see `run`."""

    seed: int
    now: float = 0.0
    log: list[bytes] = field(default_factory=list)
    committed: int = 0
    committed_by: dict[int, int] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    """Generation whose step counts, by number of the step."""
    last_step_at: float = 0.0
    aborted: Abort | None = None
    finished: bool = False
    generations_seen: int = 0

    def __post_init__(self) -> None:
        """Lay out the cluster."""
        self.rng = random.Random(self.seed)
        rng = self.rng
        planned = rng.choice([Shape(1, 3, 1), Shape(1, 4, 1), Shape(2, 2, 1), Shape(2, 2, 2)])
        self.job = Job(microbatches=8, planned=planned, pp=(1,) if rng.random() < 0.5 else ())
        slots = planned.tp * rng.choice([1, 1, 2])
        count = -(-planned.world // slots) + rng.choice([0, 0, 1, 2])
        self.nodes = {f"n{k}": SimNode(f"n{k}", slots) for k in range(count)}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.machine: StateMachine | None = None
        self.controller_life = 0
        self.train_to = 10**9

    # --- time -------------------------------------------------------------------------------------

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something then."""
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, what))

    def run_until(self, moment: float) -> None:
        """Let time pass."""
        while self.queue and self.queue[0][0] <= moment and not self.over:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.now = max(self.now, moment)

    @property
    def over(self) -> bool:
        return self.finished or self.aborted is not None

    # --- the controller ---------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start it, with nothing but the log."""
        self.controller_life += 1
        records = [decode_record(raw, "log") for raw in self.log]
        self.machine = StateMachine(
            self.job, SETTINGS, records, self.now, by=str(self.controller_life)
        )
        life = self.controller_life
        for node in self.nodes.values():
            self.later(self.rng.uniform(0.05, 1.0), lambda n=node: self.say_up(n))  # type: ignore[misc]

        def tick() -> None:
            if life == self.controller_life and self.machine is not None:
                self.hear(Tick())
                self.later(0.25, tick)

        self.later(0.1, tick)

    def kill_controller(self) -> None:
        """Let it die, for a while."""
        self.machine = None
        self.controller_life += 1
        self.later(self.rng.uniform(0.2, 12.0), self._revive_controller)

    def _revive_controller(self) -> None:
        if self.machine is None:
            self.start_controller()

    def hear(self, event: Event) -> None:
        """Hand an event to the controller, and carry out what it wants."""
        if self.machine is None or self.over:
            return
        for action in self.machine.handle(event, self.now):
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        """Do what an action says."""
        match action:
            case Append(record=record):
                last = decode_record(self.log[-1], "log").generation if self.log else 0
                if record.generation <= last:
                    raise Violation(f"generation {record.generation} after {last}")
                self.log.append(encode_record(record))
                self.generations_seen += 1
            case Fence(nodes=names, generation=generation):
                for name in names:
                    self.send(name, lambda n, g=generation: self.fence(n, g))  # type: ignore[misc]
            case Start(record=record):
                for name in sorted(record.nodes):
                    self.send(name, lambda n, r=record: self.start(n, r))  # type: ignore[misc]
            case Save(generation=generation):
                self.later(self.rng.uniform(0.1, 3.0), lambda: self._saved(generation))
            case Abort():
                self.aborted = action
            case Finish():
                self.finished = True
            case _:
                pass

    def _saved(self, generation: int) -> None:
        if self.training() == generation:
            self.hear(Saved(generation=generation, step=self.committed))

    # --- messages ---------------------------------------------------------------------------------

    def send(self, name: str, what: Callable[[SimNode], None]) -> None:
        """Have a node do something, if the message arrives."""
        node = self.nodes[name]
        sent, life = self.now, node.life

        def arrive() -> None:
            if not node.alive or not node.reaches or node.life != life:
                return
            if node.frozen_until > self.now:
                self.later(node.frozen_until - self.now + 0.01, arrive)
                return
            # A message says who ruled when it was sent, not when it is read: an order that lay in
            # the buffer of a frozen launcher is stale. Launchers know by the beat that it echoes.
            node.contact = max(node.contact, sent)
            if self.now - sent <= SETTINGS.lease_s * 0.8:
                what(node)

        self.later(self.delay(), arrive)

    def tell(self, node: SimNode, event: Event) -> None:
        """Have the controller hear an event of a node, if it arrives."""
        if not (node.alive and node.reaches):
            return
        life, sent = self.controller_life, self.now

        def arrive() -> None:
            if life == self.controller_life and self.machine is not None:
                node.contact = max(node.contact, sent)  # what arrives is acknowledged
                self.hear(event)

        self.later(self.delay(), arrive)

    def delay(self) -> float:
        """How long a message takes; sometimes long enough to be overtaken."""
        return self.rng.uniform(0.001, 0.05) if self.rng.random() < 0.9 else self.rng.uniform(0, 2)

    # --- nodes ------------------------------------------------------------------------------------

    def say_up(self, node: SimNode) -> None:
        """Have a node say that it is there, with all that it has to tell."""
        self.tell(
            node,
            NodeUp(
                node=node.name,
                life=str(node.life),
                slots=node.slots,
                fenced=node.fenced,
                running=node.running,
            ),
        )
        if node.ended is not None:
            self.tell(node, node.ended)
        if node.loaded_told and node.running:
            self.tell(node, Loaded(node=node.name, generation=node.running))

    def beat(self, node: SimNode) -> None:
        """One turn of a node's launcher."""
        self.later(_BEAT_S, lambda: self.beat(node))
        if not node.alive or node.frozen_until > self.now:
            return
        # First of all: who wakes up with a lease that is over does not ask for another.
        if node.running and self.now - node.contact > SETTINGS.lease_s * 0.8:
            self.stop_workers(node)
        if node.reaches and self.machine is not None:
            self.say_up(node)
        if node.running and self.now >= node.ready_at and not node.loaded_told:
            node.loaded_told = True
            self.tell(node, Loaded(node=node.name, generation=node.running))

    def stop_workers(self, node: SimNode) -> None:
        node.fenced = max(node.fenced, node.running)
        node.running = 0

    def fence(self, node: SimNode, generation: int) -> None:
        """Kill workers of generations before this one."""
        if node.running < generation:
            node.running = 0
            node.fenced = max(node.fenced, generation)
            self.tell(node, Fenced(node=node.name, generation=node.fenced))

    def start(self, node: SimNode, record: Record) -> None:
        """Start workers, unless they were started or fenced before."""
        if record.generation <= max(node.started, node.fenced):
            return
        node.started = node.running = record.generation
        node.ended, node.loaded_told = None, False
        node.ready_at = self.now + self.rng.uniform(0.2, 2.0)

    def fail_worker(self, node: SimNode) -> None:
        """Let a worker die."""
        if node.running:
            node.ended = Ended(node=node.name, generation=node.running, code=-9)
            node.fenced, node.running = max(node.fenced, node.running), 0
            self.tell(node, node.ended)

    def kill_node(self, node: SimNode, back: bool) -> None:
        """Let a node die, and come back as another process."""
        node.alive, node.running = False, 0
        if back:
            self.later(self.rng.uniform(0.1, 15.0), lambda: self.revive(node))

    def revive(self, node: SimNode) -> None:
        if node.alive:
            return
        node.alive, node.life = True, node.life + 1
        node.fenced = node.started = node.running = 0
        node.ended, node.frozen_until, node.contact = None, 0.0, self.now
        self.say_up(node)

    # --- training ---------------------------------------------------------------------------------

    def training(self) -> int:
        """Return the generation that can make a step now; 0 if none can."""
        able = []
        for raw in self.log:
            record = decode_record(raw, "log")
            here = [self.nodes[name] for name in record.nodes]
            ready = all(
                n.alive
                and n.running == record.generation
                and self.now >= n.ready_at
                and n.frozen_until <= self.now
                # Workers look at their lease before each step: a node that was frozen may wake up.
                and self.now - n.contact <= SETTINGS.lease_s * 0.8
                for n in here
            )
            if ready and len({n.side for n in here}) == 1:
                able.append(record.generation)
        if len(able) > 1:
            raise Violation(f"generations {able} train at once")
        return able[0] if able else 0

    def train(self) -> None:
        """Make a step if that is possible."""
        self.later(_STEP_S, self.train)
        generation = self.training()
        if not generation:
            return
        if generation != decode_record(self.log[-1], "log").generation:
            return  # it trains on, and its commits are refused
        step = self.committed + 1
        if step in self.consumed:
            raise Violation(f"step {step} counts twice")
        self.consumed[step] = generation
        self.committed = step
        self.last_step_at = self.now
        record = decode_record(self.log[-1], "log")
        if record.step > step:
            raise Violation(f"generation {generation} was to go on from {record.step}, not {step}")
        teller = self.nodes[min(record.nodes)]
        self.tell(teller, Progress(generation=generation, step=step))
        if step >= self.train_to:
            for name in sorted(record.nodes):
                node = self.nodes[name]
                node.ended = Ended(node=name, generation=generation, code=0)
                node.fenced, node.running = max(node.fenced, generation), 0
                self.tell(node, node.ended)


def _faults(world: World) -> list[Callable[[], Any]]:
    rng, nodes = world.rng, list(world.nodes.values())

    def one() -> SimNode:
        return rng.choice(nodes)

    def cut() -> None:
        node = one()
        node.reaches = False
        world.later(rng.uniform(0.5, 40), lambda: setattr(node, "reaches", True))

    def cut_all() -> None:
        for node in nodes:
            if rng.random() < 0.6:
                node.reaches = False
                world.later(rng.uniform(0.5, 40), lambda n=node: setattr(n, "reaches", True))  # type: ignore[misc]

    def split() -> None:
        for node in nodes:
            node.side = rng.randrange(2)
        world.later(rng.uniform(0.5, 20), join)

    def join() -> None:
        for node in nodes:
            node.side = 0

    def freeze() -> None:
        one().frozen_until = world.now + rng.uniform(0.5, 30)

    def order(kind: OrderKind, *names: str) -> None:
        world.hear(Order(kind=kind, nodes=names))

    def drain() -> None:
        name = one().name
        order(OrderKind.DRAIN, name)
        world.later(rng.uniform(1, 15), lambda: order(OrderKind.ADD, name))

    def pause() -> None:
        order(OrderKind.PAUSE)
        again = [1.0, 5.0, 15.0, 40.0, 80.0]
        for seconds in again:  # whoever wants it says so until it is heard
            world.later(seconds, lambda: order(OrderKind.RESUME))

    def leave() -> None:
        node = one()
        if node.alive:
            world.tell(node, Left(node=node.name))
            world.kill_node(node, back=True)

    return [
        lambda: world.fail_worker(one()),
        lambda: world.fail_worker(one()),
        lambda: world.kill_node(one(), back=rng.random() < 0.9),
        leave,
        cut,
        cut_all,
        split,
        freeze,
        lambda: world.kill_controller() if world.machine else None,
        lambda: order(OrderKind.RESTART),
        drain,
        pause,
        lambda: world.hear(Suspected(nodes=(one().name,), reason="suspected")),
    ]


def run(seed: int, faults: int | None = None) -> World:
    """Play a schedule of faults, then let everything heal; raise `Violation` if anything is wrong.

    Parameters
    ----------
    seed
        Decides everything.
    faults
        How many; up to 12 if left out.
    """
    world = World(seed)
    rng = world.rng
    for node in world.nodes.values():
        world.later(rng.uniform(0, 1), lambda n=node: world.beat(n))  # type: ignore[misc]
    world.start_controller()
    world.later(0.3, world.train)
    kinds = _faults(world)
    for _ in range(rng.randrange(13) if faults is None else faults):
        gap = rng.choice([0.0, 0.05, 0.5, 3.0, 12.0])
        world.run_until(world.now + rng.uniform(0, 2 * gap))
        if world.over:
            break
        rng.choice(kinds)()
    _heal(world)
    before = world.committed
    world.run_until(world.now + 150.0)
    if world.aborted is None and not world.finished and world.committed < before + 20:
        machine = world.machine
        raise Violation(
            f"no progress after everything healed: {before} to {world.committed}, "
            f"{machine and (machine.state, machine.reason, machine.generation)}"
        )
    if world.aborted is None:
        world.train_to = world.committed + 3
        world.run_until(world.now + 150.0)
        if not world.finished and world.aborted is None:
            raise Violation("the job does not end")
    if world.aborted is not None and f"step is {world.committed}" not in world.aborted.text:
        # What it says may be one message old, and never more than what is committed.
        told = int(world.aborted.text.rsplit(" ", 1)[-1].rstrip("."))
        if told > world.committed:
            raise Violation(f"step {told} was promised, {world.committed} are committed")
    return world


def _heal(world: World) -> None:
    """Bring back everything but one node at most that the job can do without."""
    world.run_until(world.now + 45.0)
    for node in world.nodes.values():
        node.reaches, node.side, node.frozen_until = True, 0, 0.0
        world.revive(node)
    if world.machine is None and not world.over:
        world.start_controller()
    for name in world.nodes:
        world.hear(Order(kind=OrderKind.ADD, nodes=(name,)))
    world.hear(Order(kind=OrderKind.RESUME))
    world.run_until(world.now + 1.0)


def main() -> None:
    """Play seeds FIRST to LAST; print what went wrong."""
    import sys
    from collections import Counter

    first, last = (int(a) for a in sys.argv[1:3])
    ends: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            world = run(seed)
            ends[world.aborted.kind if world.aborted else "finished"] += 1
        except Exception as error:  # noqa: BLE001 - every kind of failure is a result
            ends["violation"] += 1
            sys.stdout.write(f"seed {seed}: {type(error).__name__} {error}\n")
    sys.stdout.write(f"{dict(ends)}\n")


if __name__ == "__main__":
    main()


__all__ = ["State", "Violation", "World", "run"]
