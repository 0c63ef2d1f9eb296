"""The model of `elastic_month.py`: a month of a large job, with the real decisions in made-up time.

What is real: `StateMachine`, `choose` (the layout), the cadence of
`ckptd.checkpoint.root.auto`, and the accounts of `Goodput`. What is assumed is in `ASSUMED`, each
with its source.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.checkpoint.root.auto import NODE_MTBF_HOURS, Auto, Cost, Mtbf, choose
from ckptd.elastic.control.history import Goodput
from ckptd.elastic.control.statemachine import ControllerSettings, State, StateMachine
from ckptd.elastic.messages import (
    Action,
    Ended,
    Fence,
    Fenced,
    JobEvent,
    Loaded,
    NodeLost,
    NodeUp,
    Progress,
    Saved,
    SaveNow,
    Start,
    Suspected,
    Tick,
)
from ckptd.elastic.policy import JobSpec, Shape

__all__ = ["ASSUMED", "KINDS", "SYSTEMS", "System", "month"]

DAY_S = 86400.0
KINDS = {
    "crash": (56, "software bug 54, dependency 2: a process ends, its node is sound"),
    "broken": (
        270,
        "GPU 148, HBM3 72, SRAM 19, system processor 17, heat 6, silent corruption 6, memory 2",
    ),
    "gone": (
        44,
        "host maintenance 32, power 3, SSD 3, chassis 2, IO board 2, CPU 2: a node falls silent",
    ),
    "hang": (49, "switch or cable 35, NIC 7, NCCL watchdog 7: nothing ends, nothing moves"),
}
"""How many of Llama 3's 419 interruptions were of each kind, and which of its causes."""

ASSUMED = {
    "node_gpus": (8, "GPUs of a node, also the tensor-parallel size", "Llama 3"),
    "spares": (0.01, "share of nodes that are spare, one at least", "assumed, for all alike"),
    "repair_h": (8.0, "hours until a broken or lost node is back", "assumed, for all alike"),
    "state_gb": (0.3, "GB of state a rank", "405e9 parameters of 12 bytes on 16,384 ranks"),
    "remote_gbps": (0.122, "GB/s of the remote store a rank", "Llama 3: 2 TB/s for 16,384"),
    "peer_gbps": (5.0, "GB/s from a peer's memory a rank", "assumed: a 400 Gb/s card is 50"),
    "step_s": (5.0, "seconds of a step", "assumed"),
    "init_s": (
        5.0 / 2048,
        "seconds a rank to make all process groups",
        "MegaScale: under 5 s at 2,048 GPUs, under 30 s beyond 10,000; stock gets it too",
    ),
    "import_s": (30.0, "seconds to start Python and import, stock", "assumed; 1.3 to 2.9 here"),
    "context_s": (5.0, "seconds to fork from a warm process and make a device context", "assumed"),
    "warm_s": (20.0, "seconds a new process is slow: kernels, allocator", "assumed, all alike"),
    "release_s": (5.0, "seconds until a killed process's device memory is free", "NVRx: up to 50"),
    "crash_s": (0.5, "seconds until the end of a process is known", "measured: 0.1"),
    "monitor_s": (60.0, "seconds until ckptd's monitor names a hang", "its limit, by default"),
    "gone_stock_s": (45.0, "seconds until stock notices a lost node and meets", "measured: 46.5"),
    "meet_s": (2.0, "seconds of stock's rendezvous", "measured: 1.3 to 2"),
    "stop_s": (30.0, "seconds stock waits for workers that do not end", "its source; measured"),
    "replace_s": (
        300.0,
        "seconds until stock's surroundings find a broken node and leave it out",
        "assumed; published restarts take 15 to 30 min (HyperPod)",
    ),
}
"""Value, meaning, source."""


def _a(name: str) -> float:
    return float(ASSUMED[name][0])


@dataclass(frozen=True)
class System:
    """System that runs a job.

    Attributes
    ----------
    name
        For people.
    cost
        Of a save; the cadence follows from it, for all alike.
    load_s
        To load the newest save.
    hang_s
        Until a hang is known.
    machine
        Whether ckptd's state machine decides; else torchrun does.
    sessions
        Whether workers hold sessions: restarts begin at level 0.
    """

    name: str
    cost: Cost
    load_s: float
    hang_s: float
    machine: bool = True
    sessions: bool = False


_REMOTE_S = _a("state_gb") / _a("remote_gbps")
_PEER_S = _a("state_gb") / _a("peer_gbps")
SYSTEMS = (
    System("stock", Cost(_REMOTE_S + 2.0, 0.0, _REMOTE_S + 2.0), _REMOTE_S + 2.0, 1800.0, False),
    System("stock, tuned", Cost(1.0, 0.5, _REMOTE_S + 3.0), _REMOTE_S + 2.0, 600.0, False),
    System("ckptd, remote saves", Cost(0.1, 0.3, _REMOTE_S + 1.0), _REMOTE_S + 2.0, 60.0),
    System("ckptd, peer memory", Cost(0.03, 0.03, _PEER_S + 0.1), _PEER_S + 1.0, 60.0),
    System(
        "ckptd, peer memory, level 0",
        Cost(0.03, 0.03, _PEER_S + 0.1),
        _PEER_S + 1.0,
        60.0,
        sessions=True,
    ),
)
"""The stock one saves while the loop waits and finds hangs by a time limit of 30 min; the tuned one
saves beside the loop and has NCCL's limit of 10 min."""


@dataclass
class Account:
    """Sums over a month.

    Attributes
    ----------
    seconds
        By kind, as `Goodput` has them.
    faults
        By kind.
    recoveries
        Seconds from each fault to the next step.
    levels
        Restarts by level.
    interval_s
        Between saves.
    """

    seconds: dict[str, float]
    faults: Counter[str]
    recoveries: list[float]
    levels: Counter[int] = field(default_factory=Counter)
    interval_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of useful time."""
        whole = sum(self.seconds.values())
        return (self.seconds["useful"] + self.seconds["training"]) / whole


def month(system: System, ranks: int, seed: int, days: float = 30.0) -> Account:
    """Return what a month of a job of so many ranks comes to."""
    return (_Month if system.machine else _Stock)(system, ranks, seed, days).run()


class _Time:
    """Common base of both kinds of month: faults, saves, and the account."""

    def __init__(self, system: System, ranks: int, seed: int, days: float) -> None:
        self.system, self.ranks = system, ranks
        self.rng = random.Random(f"{seed} {ranks}")  # the same faults for every system
        self.end = days * DAY_S
        gpus = int(_a("node_gpus"))
        self.members = ranks // gpus
        self.spares = max(1, math.ceil(_a("spares") * self.members))
        mtbf = Mtbf(3600.0 * NODE_MTBF_HOURS / self.members, "published")
        self.mtbf_s = mtbf.seconds
        self.interval_s = choose(Auto(), system.cost, mtbf).interval_s
        self.init_s = max(1.0, _a("init_s") * ranks)
        self.faults: list[tuple[float, str, float]] = []
        self.goodput = Goodput(0.0, State.RUNNING)
        at = self.rng.expovariate(1 / self.mtbf_s)
        while at < self.end:
            kind = self.rng.choices(list(KINDS), [count for count, _ in KINDS.values()])[0]
            self.faults.append((at, kind, self.rng.random()))
            at += self.rng.expovariate(1 / self.mtbf_s)

    def kept(self, began: float, until: float) -> tuple[float, float]:
        """Return the moment up to which work is kept, and the time that saves held up the loop.

        The first save is due at once; each is kept once it is durable, with what came before it.
        """
        cost = self.system.cost
        turn = self.interval_s + cost.total_s
        saves = math.floor((until - began - cost.durable_s) / turn) + 1
        made = math.ceil((until - began) / turn)
        if saves <= 0:
            return began, max(made, 0) * cost.total_s
        return began + (saves - 1) * turn, max(made, 0) * cost.total_s


class _Stock(_Time):
    """torchrun: every fault ends all workers, and all start again from the remote store."""

    def run(self) -> Account:
        seconds = dict.fromkeys(("useful", "training", "saving", "lost", "restarting"), 0.0)
        began, recoveries = 0.0, []
        for k, (at, kind, _) in enumerate(self.faults):
            if at < began:
                continue  # it lengthened the restart that it fell into; see below
            self._train(seconds, began, at)
            back = at + self._restart_s(kind)
            for later, other, _ in self.faults[k + 1 :]:
                if later >= back:
                    break
                back = later + self._restart_s(other)
            seconds["restarting"] += min(back, self.end) - at
            recoveries.append(back - at)
            began = back
        if began < self.end:
            self._train(seconds, began, self.end)
        faults = Counter(kind for _, kind, _ in self.faults)
        return Account(seconds, faults, recoveries, interval_s=self.interval_s)

    def _train(self, seconds: dict[str, float], began: float, until: float) -> None:
        kept, saving = self.kept(began, until)
        saving = min(saving, kept - began)
        seconds["saving"] += saving
        seconds["useful"] += kept - began - saving
        seconds["lost"] += until - kept

    def _restart_s(self, kind: str) -> float:
        known = {
            "crash": _a("crash_s"),
            "broken": _a("crash_s") + _a("replace_s"),
            "gone": _a("gone_stock_s"),
            "hang": self.system.hang_s + _a("stop_s"),
        }[kind]
        start = _a("release_s") + _a("import_s") + _a("context_s") + _a("warm_s")
        return known + _a("meet_s") + start + self.init_s + self.system.load_s


class _Month(_Time):
    """ckptd: the state machine decides, and hears of nodes as a controller would."""

    def __init__(self, system: System, ranks: int, seed: int, days: float) -> None:
        super().__init__(system, ranks, seed, days)
        gpus = int(_a("node_gpus"))
        pipeline = next(p for p in (16, 8, 4) if self.members % p == 0)
        shape = Shape(pipeline, self.members // pipeline, gpus)
        self.names = [f"n{k:05d}" for k in range(self.members + self.spares)]
        self.job = JobSpec(microbatches=4 * shape.dp, planned=shape)
        settings = ControllerSettings(gather_s=60.0, patience_s=0.0)
        self.machine = StateMachine(self.job, settings)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.life = dict.fromkeys(self.names, 1)
        self.alive = dict.fromkeys(self.names, True)
        self.bad: set[str] = set()
        self.fresh: set[str] = set()
        """Nodes with workers that must start from nothing even at level 0."""
        self.fault_at: float | None = None
        self.account = Account({}, Counter(), [], interval_s=self.interval_s)
        self.step = 0
        self.began = 0.0
        self.ticking = False

    def run(self) -> Account:
        self.goodput = Goodput(0.0, State.PLAN)
        for name in self.names:
            self.hear(self.up(name))
        for at, kind, share in self.faults:
            self.later(at, lambda k=kind, s=share: self.fault(k, s))  # type: ignore[misc]
        while self.queue and self.queue[0][0] < self.end:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.now = self.end
        if self.machine.state is State.RUNNING:
            self.keep()
        self.account.seconds = self.goodput.seconds(self.end)
        return self.account

    def later(self, at: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.queue, (at, self._count, what))

    def up(self, name: str) -> NodeUp:
        node = self.machine.nodes[name]
        return NodeUp(
            node=name,
            life=str(self.life[name]),
            slots=self.job.planned.tp,
            running=node.running,
            fenced=node.fenced,
            sessions=self.system.sessions,
        )

    # --- what the controller hears, and does ------------------------------------------------------

    def hear(self, event: JobEvent) -> None:
        before = self.machine.state
        actions = self.machine.handle(event, self.now)
        for move in self.machine.moves():
            if move.state is State.FENCE and move.before is State.SUSPECT and move.planned:
                self.goodput.committed(self.now)  # saved before it
            elif move.state is State.FENCE and move.before in (State.RUNNING, State.SUSPECT):
                self.keep()
            self.goodput.moved(move)
        for action in actions:
            self.carry_out(action)
        if self.machine.state is State.ABORTED:
            raise RuntimeError(self.machine.reason)
        if before is not State.RUNNING and self.machine.state is State.RUNNING:
            self.runs()

    def keep(self) -> None:
        """Put down what was saved before the moment at which training stopped."""
        stopped = self.now if self.fault_at is None else self.fault_at
        kept, saving = self.kept(self.began, stopped)
        self.goodput.saving(min(saving, kept - self.began))
        self.goodput.committed(kept)

    def runs(self) -> None:
        """Note that training goes on."""
        if self.fault_at is not None:
            self.account.recoveries.append(self.now - self.fault_at)
        if self.step == 1:  # the account begins with the first step, as stock's does
            self.goodput = Goodput(self.now, State.RUNNING)
        self.fault_at, self.began = None, self.now
        self.goodput.committed(self.now)
        self.fresh.clear()
        for name in sorted(self.machine.members):
            self.hear(self.up(name))

    def tick(self) -> None:
        """Advance the controller's time until the job trains again."""
        for node in self.machine.nodes:
            if self.alive[node.name] and node.up:
                node.seen = self.now
        self.hear(Tick())
        record = self.machine.record
        short = record is not None and record.shape != self.job.planned
        self.ticking = self.machine.state is not State.RUNNING or short
        if self.ticking:  # a job that is whole and trains has nothing to look at
            often = self.machine.state is not State.RUNNING
            self.later(self.now + (1.0 if often else 60.0), self.tick)

    def carry_out(self, action: Action) -> None:
        match action:
            case Fence(nodes=names, generation=generation, level=level):
                wait = 0.1 if level == 0 else 0.5
                self.later(self.now + wait, lambda: self.fenced(names, generation))
                if not self.ticking:
                    self.ticking = True
                    self.later(self.now + 1.0, self.tick)
            case SaveNow(generation=generation):
                self.step += 1
                saved = Saved(generation=generation, step=self.step)
                self.later(self.now + self.system.cost.durable_s, lambda: self.hear(saved))
            case Start(nodes=nodes, record=record, level=level) if not nodes:
                self.account.levels[level] += 1
                members = self.machine.members
                fresh = level > 0 or bool(self.fresh & members)
                wait = self.init_s + self.system.load_s
                if fresh:
                    wait += _a("context_s") + _a("warm_s")
                if level > 0:
                    wait += _a("release_s")
                dies = sorted(self.bad & members)
                generation = record.generation
                if dies:  # as soon as its device is touched
                    at = self.now + _a("context_s")
                    self.later(at, lambda: self.ended(dies[0], generation))
                self.later(self.now + wait, lambda: self.started(generation))
            case _:
                pass

    def fenced(self, names: tuple[str, ...], generation: int) -> None:
        for name in names:
            if self.alive[name]:
                self.hear(Fenced(node=name, generation=generation))

    def started(self, generation: int) -> None:
        record = self.machine.record
        if (
            record is None
            or record.generation != generation
            or self.machine.state
            not in (
                State.RESHARD,
                State.RESUME,
            )
        ):
            return
        if self.bad & self.machine.members:
            return
        for name in sorted(self.machine.members):
            self.hear(Loaded(node=name, generation=generation))
        self.step += 1
        self.hear(Progress(generation=generation, step=self.step))

    # --- faults -----------------------------------------------------------------------------------

    def fault(self, kind: str, share: float) -> None:
        record = self.machine.record
        if record is None:
            return
        self.account.faults[kind] += 1
        name = record.members[int(share * len(record.members))].node
        generation = record.generation
        if self.fault_at is None and self.machine.state is State.RUNNING:
            self.fault_at = self.now
            if self.kept(self.began, self.now)[0] > self.began:
                self.step += 1  # the controller hears of steps one by one; the last is enough
                self.hear(Progress(generation=generation, step=self.step))
        if kind == "hang":
            self.later(self.now + self.system.hang_s, lambda: self.named(name, generation))
            return
        if kind == "gone":
            self.alive[name] = False
            self.repair(name)
            self.later(self.now + _a("crash_s"), lambda: self.hear(NodeLost(node=name)))
            return
        if kind == "broken":
            self.bad.add(name)
            self.repair(name)
        self.fresh.add(name)
        self.later(self.now + _a("crash_s"), lambda: self.ended(name, generation))

    def ended(self, name: str, generation: int) -> None:
        if self.alive[name]:
            self.fresh.add(name)
            self.hear(Ended(node=name, generation=generation, code=1))

    def named(self, name: str, generation: int) -> None:
        """Have the monitor say where it hangs, unless something else has ended the hang."""
        record = self.machine.record
        if record is not None and record.generation == generation:
            self.hear(Suspected(nodes=(name,), reason="hang", since_s=self.system.hang_s))

    def repair(self, name: str) -> None:
        self.later(self.now + 3600.0 * _a("repair_h"), lambda: self.back(name))

    def back(self, name: str) -> None:
        self.bad.discard(name)
        self.alive[name] = True
        self.life[name] += 1
        node = self.machine.nodes[name]
        member = name in self.machine.members and self.machine.state is State.RUNNING
        if member and node.up:
            return  # it was never left out
        node.running = node.fenced = 0
        self.fresh.add(name)
        self.hear(self.up(name))
