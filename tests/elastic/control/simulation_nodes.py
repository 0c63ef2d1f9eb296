"""Launchers and workers in simulated time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.elastic.control.statemachine import ControllerSettings, StateMachine
from ckptd.elastic.membership import Record, decode_record
from ckptd.elastic.messages import Broken, Ended, Fenced, JobEvent, Loaded, NodeUp

SETTINGS = ControllerSettings(
    silent_s=3.0,
    lease_s=20.0,
    save_s=2.0,
    fence_s=3.0,
    gather_s=5.0,
    relaunch_s=8.0,
    nodes_s=400.0,
    resume_s=30.0,
    steady_s=10.0,
    settle_s=4.0,
    grow_s=3.0,
    cycles=8,
    flaps=3,
    flap_window_s=30.0,
    out_s=20.0,
)
BEAT_S = 0.5
LEASE_S = SETTINGS.lease_s * 0.8
"""After which workers kill themselves: before the controller counts on it."""


@dataclass
class Boss:
    """A controller."""

    life: int
    machine: StateMachine
    known: int
    """Records of the log that it knows."""
    ahead: float = 0.0
    """Of its machine's clock: each counts from a moment of its own."""


@dataclass
class SimNode:
    """A launcher with its workers."""

    name: str
    slots: int
    life: int = 0
    alive: bool = True
    reaches: bool = True
    """Whether it and the controller reach each other."""
    cut_at: float = 0.0
    """Since when they do not."""
    side: int = 0
    """Nodes reach each other if they are on one side."""
    frozen_until: float = 0.0
    stuck_until: float = 0.0
    """Until then the launcher beats, and does nothing else."""
    fenced: int = 0
    running: int = 0
    """Generation of its workers; they may be loading."""
    idle: bool = False
    """Whether sessions wait for a generation."""
    ready_at: float = math.inf
    loaded_told: bool = False
    broken: bool = False
    """Whether a collective of its workers failed: they make no step any more."""
    contact: float = 0.0
    started: int = 0
    ended: Ended | None = None
    boss: int = 0
    """Life of the controller that it is connected to."""
    seat: int = 0
    """As it was when a controller was last heard of."""


class Nodes:
    """The half of a simulated world that is not the controller's."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.nodes: dict[str, SimNode] = {}
        self.bosses: dict[int, Boss] = {}
        self.seat = 0
        """How often it was taken."""
        self.sessions = False
        self.poisoned_until = 0.0
        """Until then each worker dies soon after its start."""
        self.log: list[bytes] = []
        self.over = False

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

    # --- messages ---------------------------------------------------------------------------------

    def hear(self, event: JobEvent, boss: Boss) -> None:
        """Hand an event to a controller."""
        raise NotImplementedError

    def newest(self) -> Boss | None:
        """Return the controller that took the seat last, if it lives."""
        return self.bosses[max(self.bosses)] if self.bosses else None

    def send(self, boss: Boss, name: str, what: Callable[[SimNode], None]) -> None:
        """Have a node do something, if the message arrives."""
        node = self.nodes[name]
        sent, life = self.now, node.life
        renews = boss.machine.may_renew(name)
        seat = self.seat if boss is self.newest() else 0

        def arrive() -> None:
            if not (node.alive and node.reaches) or (node.life, node.boss) != (life, boss.life):
                return
            if node.frozen_until > self.now:
                self.later(node.frozen_until - self.now + 0.01, arrive)
                return
            # A message says who ruled when it was sent, not when it is read: an order that lay in
            # the buffer of a frozen launcher is stale. Launchers know by the beat that it echoes.
            if renews and sent >= node.contact:
                node.contact, node.seat = sent, seat
            if self.now - sent <= LEASE_S:
                what(node)

        self.later(self.delay(), arrive)

    def tell(self, node: SimNode, event: JobEvent) -> None:
        """Have the node's controller hear an event, if it arrives."""
        boss = self.bosses.get(node.boss)
        if not (node.alive and node.reaches) or boss is None:
            return
        life, sent = node.life, self.now

        def arrive() -> None:
            if self.bosses.get(boss.life) is boss and node.boss == boss.life:
                if node.life == life and boss.machine.may_renew(node.name):
                    node.contact = max(node.contact, sent)  # what arrives is acknowledged
                self.hear(event, boss)

        self.later(self.delay(), arrive)

    def delay(self) -> float:
        """How long a message takes; sometimes long enough to be overtaken."""
        return self.rng.uniform(0.001, 0.05) if self.rng.random() < 0.9 else self.rng.uniform(0, 2)

    # --- launchers --------------------------------------------------------------------------------

    def say_up(self, node: SimNode) -> None:
        """Have a node say that it is there, with all that it has to tell."""
        up = NodeUp(
            node=node.name,
            life=str(node.life),
            slots=node.slots,
            fenced=node.fenced,
            running=node.running,
            sessions=self.sessions and node.running > 0,
        )
        self.tell(node, up)
        if node.ended is not None:
            self.tell(node, node.ended)
        if node.loaded_told and node.running:
            self.tell(node, Loaded(node=node.name, generation=node.running))
        if node.broken and node.running:
            self.tell(node, Broken(node=node.name, generation=node.running))

    def beat(self, node: SimNode) -> None:
        """One turn of a node's launcher."""
        self.later(BEAT_S, lambda: self.beat(node))
        if not node.alive or node.frozen_until > self.now:
            return
        # First of all: who wakes up with a lease that is over does not ask for another.
        if node.running and self.now - node.contact > LEASE_S:
            self.stop_workers(node)
        newest = self.newest()
        if self.seat == node.seat and not (node.reaches and node.boss in self.bosses):
            node.contact = self.now  # it sees in the log that nobody else has the seat
        if node.boss not in self.bosses and newest is not None:
            node.boss = newest.life
        if node.reaches:
            self.say_up(node)
            self.host(node)
        if node.running and self.now >= node.ready_at and not node.loaded_told:
            node.loaded_told = True
            self.tell(node, Loaded(node=node.name, generation=node.running))

    def host(self, node: SimNode) -> None:
        """Say where the workers' store is, if it is this node's to host; again with each beat."""
        record = self.record_of(node.running)
        boss = self.bosses.get(node.boss)
        if record is None or boss is None or record.members[0].node != node.name:
            return
        generation, life = node.running, node.life

        def heard() -> None:
            if self.bosses.get(boss.life) is boss and node.reaches and node.life == life:
                for name in sorted(record.nodes):
                    self.send(boss, name, lambda n: self.store_at(n, generation))

        if node.stuck_until <= self.now:
            self.later(self.delay(), heard)

    def record_of(self, generation: int) -> Record | None:
        """Return the record of a generation, if it was logged."""
        for raw in reversed(self.log):
            record = decode_record(raw, "log")
            if record.generation == generation:
                return record
        return None

    def store_at(self, node: SimNode, generation: int) -> None:
        """Let workers go on that wait for their store."""
        if node.running == generation and node.ready_at == math.inf:
            node.ready_at = self.now + self.rng.uniform(0.05 if node.idle else 0.2, 2.0)
            node.idle = False
            if self.now < self.poisoned_until:
                dies = self.rng.uniform(0.0, 2.5)
                self.later(dies, lambda: self._poison(node, generation))

    def _poison(self, node: SimNode, generation: int) -> None:
        if node.running == generation and self.now < self.poisoned_until:
            self.fail_worker(node)

    def stop_workers(self, node: SimNode) -> None:
        """Kill them, because the lease is over."""
        node.fenced = max(node.fenced, node.running)
        node.running, node.idle = 0, False

    def fence(self, node: SimNode, generation: int, level: int) -> None:
        """End generations before this one."""
        if node.stuck_until > self.now or node.running >= generation:
            return
        # A session that does not come out within a second is killed.
        slow = self.rng.choice([0.01, 0.1, 1.0]) if level == 0 and self.sessions else 0.01
        life, was = node.life, node.running

        def out() -> None:
            if not node.alive or node.life != life or node.running not in (was, 0):
                return
            if node.frozen_until > self.now:
                self.later(node.frozen_until - self.now + 0.01, out)
                return
            node.running, node.idle = 0, level == 0 and self.sessions
            node.fenced = max(node.fenced, generation)
            self.tell(node, Fenced(node=node.name, generation=node.fenced))

        self.later(self.rng.uniform(0, slow), out)

    def start(self, node: SimNode, record: Record, level: int) -> None:
        """Start workers, unless they were started or fenced before."""
        if node.stuck_until > self.now or record.generation <= max(node.started, node.fenced):
            return
        node.started = node.running = record.generation
        node.idle = node.idle and level == 0
        node.ended, node.loaded_told, node.broken = None, False, False
        node.ready_at = math.inf
        self.host(node)

    # --- deaths -----------------------------------------------------------------------------------

    def fail_worker(self, node: SimNode) -> None:
        """Let a worker die."""
        if node.running and node.alive:
            generation = node.running
            node.ended = Ended(node=node.name, generation=generation, code=-9)
            node.fenced, node.running = max(node.fenced, generation), 0
            self.tell(node, node.ended)
            self.break_peers(generation)

    def break_peers(self, generation: int) -> None:
        """Let collectives of a generation fail on some of its nodes."""
        if not self.sessions:
            return
        for node in self.nodes.values():
            if node.running == generation and self.rng.random() < 0.7:
                wait = self.rng.uniform(0.01, 0.5)
                self.later(wait, lambda n=node: self.break_one(n, generation))  # type: ignore[misc]

    def break_one(self, node: SimNode, generation: int) -> None:
        """Let a collective fail on one node."""
        if node.alive and generation and node.running == generation:
            node.broken = True
            self.tell(node, Broken(node=node.name, generation=generation))

    def kill_node(self, node: SimNode, *, back: bool, told: bool) -> None:
        """Let a node die, and come back as another process."""
        generation = node.running
        node.alive, node.running, node.idle = False, 0, False
        self.break_peers(generation)
        if told:
            self.lose(node)
        if back:
            self.later(self.rng.uniform(0.1, 15.0), lambda: self.revive(node))

    def lose(self, node: SimNode) -> None:
        """Let the controller see that a connection broke."""
        raise NotImplementedError

    def revive(self, node: SimNode) -> None:
        """Start a launcher where none is."""
        if node.alive:
            return
        node.alive, node.life = True, node.life + 1
        node.fenced = node.started = node.running = 0
        node.idle = node.broken = node.loaded_told = False
        node.ended, node.frozen_until, node.stuck_until, node.contact = None, 0.0, 0.0, self.now
        self.say_up(node)
