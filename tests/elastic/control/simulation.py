"""A job in simulated time: real decisions, simulated nodes, faults of all kinds, and a judge.

Nodes and controllers exchange messages that take time; links break and heal; controllers die, come
back with nothing but the log, and may be two at once. Training makes a step when every rank of one
generation is there and they reach each other, and a step counts when the log's last generation is
theirs, as the checkpoint's commit does it. The judge (`simulation_judge`) holds the run against
what must never be: two generations that train at once, a promised step that is not there, a sample
that is consumed twice or not at all, a job that neither goes on nor says why.

``python -m tests.elastic.control.simulation FIRST LAST`` plays schedules and prints what was wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from ckptd.checkpoint.data.schedule import Schedule
from ckptd.elastic.control.statemachine import State, StateMachine
from ckptd.elastic.leader import may_stand_in
from ckptd.elastic.membership import Record, decode_record, encode_record
from ckptd.elastic.messages import (
    Abort,
    Action,
    Append,
    Fence,
    Finish,
    JobEvent,
    NodeLost,
    Order,
    OrderKind,
    Progress,
    Refuse,
    Relaunch,
    Reseat,
    Reseated,
    Saved,
    SaveNow,
    Start,
    Tick,
)
from ckptd.elastic.messages import Ended as EndedEvent
from ckptd.elastic.policy import JobSpec, Shape
from ckptd.errors import CorruptError
from tests.elastic.control.simulation_judge import Line, Violation
from tests.elastic.control.simulation_nodes import LEASE_S, SETTINGS, Boss, Nodes, SimNode

STEP_S = 0.5
_CLOCKS_S, _LATE_S = 86_400.0, 5.0
"""So far apart are what two machines count by, and what they take for the time of day."""
_SHAPES = (Shape(1, 3, 1), Shape(1, 4, 1), Shape(2, 2, 1), Shape(2, 2, 2))


class World(Nodes):
    """All of it; see `run`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        planned = rng.choice(_SHAPES)
        pp = (1,) if rng.random() < 0.5 else ()
        least = rng.choice([1, 1, planned.pp * planned.tp * 2])
        self.job = JobSpec(microbatches=8, planned=planned, pp=pp, least=least)
        slots = planned.tp * rng.choice([1, 1, 2])
        count = -(-planned.world // slots) + rng.choice([0, 0, 1, 2])
        self.nodes = {f"n{k}": SimNode(f"n{k}", slots) for k in range(count)}
        self.sessions = rng.random() < 0.6
        self.commit_every = 1 if self.sessions and rng.random() < 0.7 else rng.choice([1, 2, 5])
        self.settings = dataclasses.replace(SETTINGS, levels=rng.choice([1, 1, 2, 3]))
        self.line = Line(Schedule(size=97, microbatch=2, microbatches=8, seed=seed))
        self.position: dict[int, int] = {}
        """The step that each generation has made."""
        self.aborted: Abort | None = None
        self.finished = False
        self.log_lost = ""
        """How the log looks to controllers that start: ``empty``, ``broken``, or as it is."""
        self.train_to = 10**9
        self.counts: Counter[str] = Counter()

    # --- controllers ------------------------------------------------------------------------------

    @property
    def machine(self) -> StateMachine | None:
        """The newest controller's decisions."""
        boss = self.newest()
        return boss.machine if boss is not None else None

    def start_controller(self) -> None:
        """Start one, with nothing but the log."""
        life = self.counts["controllers"] = self.counts["controllers"] + 1
        raws = {"empty": [], "broken": [b"{"]}.get(self.log_lost, self.log)
        try:
            records = [decode_record(raw, "log") for raw in raws]
        except CorruptError as error:
            self.counts[f"refused {error.kind}"] += 1
            return
        ahead, late = _CLOCKS_S * (life % 3), _LATE_S * (life % 2)
        machine = StateMachine(
            self.job,
            self.settings,
            records,
            self.now + ahead,
            by=str(life),
            epoch=-ahead - late,
        )
        self.bosses[life] = Boss(life, machine, len(raws), ahead)
        self.seat += 1
        for node in self.nodes.values():
            self.later(self.rng.uniform(0.05, 1.0), lambda n=node: self.turn_to(n, life))  # type: ignore[misc]
        self.later(0.1, lambda: self.tick(life))
        # Who had the seat before sees at some time that it is taken.
        for old in [other for other in self.bosses if other != life]:
            self.later(self.rng.uniform(0.5, 10.0), lambda k=old: self.bosses.pop(k, None))  # type: ignore[misc]

    def cut_off(self, island: list[SimNode], seconds: float) -> None:
        """Cut nodes off from the controller's side; the larger side has a controller soon."""
        for node in island:
            self.away(node)
            if self.rng.random() < 0.5:
                self.lose(node)
        end = self.now + seconds
        stand_ins, before, ended = 0, self.faults(), self.ended()

        def look() -> None:
            nonlocal stand_ins
            if self.now >= end:
                for node in self.nodes.values():
                    node.reaches = True
                return
            self.later(0.5, look)
            silent = self.silent()
            if silent and self.may_stand_in(len(silent)):
                stand_ins += 1
                # Each side may start one, and one more after each other fault (nobody hears what is
                # frozen or dead), and after a controller that ended because it was refused or came
                # second: twice at most, since two sides must not fight for as long as they are cut.
                most = 2 + 2 * (self.faults() - before) + min(2, self.ended() - ended)
                if stand_ins > most:
                    raise Violation(f"{stand_ins} controllers followed each other in one cut")
                self.counts["stand-ins"] += 1
                self.start_controller()
                for node in self.nodes.values():
                    if node in silent:
                        node.reaches = True
                    else:
                        self.away(node)

        self.later(0.5, look)

    def faults(self) -> int:
        """Return how many faults there were so far; a job that is queued anew is one."""
        faults = (n for name, n in self.counts.items() if name.startswith("fault "))
        return sum(faults) + self.counts["requeues"]

    def ended(self) -> int:
        """Return how many controllers ended because of what the log or the launchers said."""
        names = [n for n in self.counts if n in ("refused", "log-taken", "yielded")]
        return sum(self.counts[name] for name in names)

    def away(self, node: SimNode) -> None:
        """Let a node not reach the controller."""
        if node.reaches:
            node.reaches, node.cut_at = False, self.now

    def silent(self) -> list[SimNode]:
        """Return the nodes whose launchers say, beside the seat, that they hear no controller."""
        late = self.now - 2.0
        live = [n for n in self.nodes.values() if n.alive and n.frozen_until <= self.now]
        return [n for n in live if not n.reaches and n.cut_at <= late]

    def may_stand_in(self, silent: int) -> bool:
        """Return what launchers that hear no controller make of its signs."""
        boss = self.newest()
        if boss is None:
            return may_stand_in(2.0, 0, 0, silent, known=True)
        hears = boss.machine.hears(self.now + boss.ahead, 2.0)
        return may_stand_in(0.0, *hears, silent, known=True)

    def turn_to(self, node: SimNode, life: int) -> None:
        """Have a node connect to a controller."""
        if life in self.bosses and node.alive and node.reaches and node.boss < life:
            old, node.boss = node.boss, life
            self.say_up(node)
            if old in self.bosses:
                self.later(0.5, lambda: self.hear(NodeLost(node=node.name), self.bosses.get(old)))

    def tick(self, life: int) -> None:
        """Let a controller look at its deadlines."""
        if life in self.bosses:
            self.hear(Tick(), self.bosses[life])
            self.later(0.25, lambda: self.tick(life))

    def kill_controller(self, after: float) -> None:
        """Let all of them die; another one starts some time later."""
        self.bosses.clear()
        self.later(after, self.revive_controller)

    def revive_controller(self, after: int = 0) -> None:
        """Start a controller where none is, or none that began after the life `after`."""
        if max(self.bosses, default=0) <= after:
            self.start_controller()

    def lose(self, node: SimNode) -> None:
        """Let its controller see that the connection broke, unless it is back at once."""
        boss, life = node.boss, node.life

        def look() -> None:
            if not (node.alive and node.life == life and node.reaches):
                self.hear(NodeLost(node=node.name), self.bosses.get(boss))

        self.later(0.5, look)

    def hear(self, event: JobEvent, boss: Boss | None = None) -> None:
        """Hand an event to a controller, and carry out what it wants."""
        boss = boss or self.newest()
        if boss is None or self.bosses.get(boss.life) is not boss or self.over:
            return
        for action in boss.machine.handle(event, self.now + boss.ahead):
            if boss.life not in self.bosses:
                break  # it is no controller any more
            self.carry_out(action, boss)

    def carry_out(self, action: Action, boss: Boss) -> None:
        """Do what an action says."""
        match action:
            case Append(record=record):
                self.append(record, boss)
            case Fence(nodes=names, generation=generation, level=level):
                for name in names:
                    self.send(boss, name, lambda n: self.fence(n, generation, level))
            case Start(record=record, level=level, nodes=nodes):
                for name in nodes or sorted(record.nodes):
                    self.send(boss, name, lambda n: self.start(n, record, level))
            case Relaunch(nodes=names):
                self.relaunch(names)
            case Reseat(generation=generation):
                self.later(self.rng.uniform(0.01, 0.5), lambda: self.reseat(boss, generation))
            case SaveNow(generation=generation):
                if self.rng.random() < 0.9:
                    self.later(self.rng.uniform(0.05, 3.0), lambda: self.save(generation))
            case Abort() | Finish():
                self.end(action, boss)
            case Refuse():
                self.counts["refused"] += 1
                del self.bosses[boss.life]
            case _:
                pass

    def reseat(self, boss: Boss, generation: int) -> None:
        """Take the seat anew, unless another one has it."""
        if boss is self.newest():
            self.seat += 1
            self.hear(Reseated(generation=generation), boss)

    def append(self, record: Record, boss: Boss) -> None:
        """Write to the log, unless another controller did."""
        # Of a job whose launchers are all new ones nobody can know that it was begun before.
        known = any(n.alive and (n.running or n.fenced) for n in self.nodes.values())
        if self.log_lost and known:
            raise Violation(f"generation {record.generation} was begun over a log that was lost")
        hears, knows = boss.machine.hears(self.now + boss.ahead, 2.0, linked=True)
        if len(self.silent()) > hears:
            if knows - hears > hears:
                self.counts["yielded"] += 1
                del self.bosses[boss.life]
                return
            last = self.record_of(self.newest_generation)
            parted = {n.name for n in self.silent()} & (last.nodes if last else set())
            if len(parted) > hears:
                raise Violation(f"{hears} of {knows} nodes go on without {parted}, which live")
        if len(self.log) != boss.known:
            self.counts["log-taken"] += 1
            del self.bosses[boss.life]
            # Its launchers hear none any more, whatever becomes of one that others still hear.
            wait, newest = self.rng.uniform(0.5, 3.0), boss.life > max(self.bosses, default=0)
            self.later(wait, lambda: self.revive_controller(boss.life if newest else 0))
            return
        last = decode_record(self.log[-1], "log") if self.log else None
        ordered = last is not None and (record.generation, record.members) == (
            last.generation,
            last.members,
        )
        if last is not None and record.generation <= last.generation and not ordered:
            raise Violation(f"generation {record.generation} after {last.generation}")
        self.log.append(encode_record(record))
        boss.known += 1
        if ordered:
            self.counts["orders kept"] += 1
            return
        self.counts["generations"] += 1
        self.counts[f"level {record.level}"] += 1

    def end(self, action: Abort | Finish, boss: Boss) -> None:
        """End the job; a controller that is not the newest only ends itself."""
        if len(self.log) != boss.known or boss is not self.newest():
            del self.bosses[boss.life]
            self.later(0.5, self.revive_controller)
        elif isinstance(action, Abort) and action.kind == "requeue":
            self.counts["requeues"] += 1
            for node in self.nodes.values():
                node.alive, node.running, node.idle = False, 0, False
                self.later(self.rng.uniform(3.0, 9.0), lambda n=node: self.revive(n))  # type: ignore[misc]
            self.kill_controller(self.rng.uniform(3.0, 9.0))
        elif isinstance(action, Abort):
            self.aborted, self.over = action, True
        else:
            self.finished = self.over = True

    def relaunch(self, names: tuple[str, ...]) -> None:
        """Start launchers anew; some never come."""
        self.counts["relaunches"] += 1
        for name in names:
            if self.rng.random() < 0.9:
                node, life = self.nodes[name], self.nodes[name].life
                self.later(self.rng.uniform(0.2, 5.0), lambda n=node, k=life: self._anew(n, k))  # type: ignore[misc]

    def _anew(self, node: SimNode, life: int) -> None:
        if node.life == life:
            if node.alive:
                self.kill_node(node, back=False, told=True)
            self.revive(node)

    # --- training ---------------------------------------------------------------------------------

    @property
    def newest_generation(self) -> int:
        """Of the log."""
        return decode_record(self.log[-1], "log").generation if self.log else 0

    def able(self, record: Record) -> bool:
        """Return whether all ranks of a generation can make a step now."""
        here = [self.nodes[name] for name in record.nodes]
        ready = all(
            n.alive
            and n.running == record.generation
            and self.now >= n.ready_at
            and n.frozen_until <= self.now
            and not n.broken
            # Workers look at their lease before each step: a node that was frozen may wake up.
            and self.now - n.contact <= LEASE_S
            for n in here
        )
        return ready and len({n.side for n in here}) == 1

    def training(self) -> int:
        """Return the generation that can make a step now; 0 if none can."""
        records = {r.generation: r for r in (decode_record(raw, "log") for raw in self.log[-9:])}
        able = [record.generation for record in records.values() if self.able(record)]
        if len(able) > 1:
            raise Violation(f"generations {able} train at once")
        return able[0] if able else 0

    def train(self) -> None:
        """Make a step if that is possible."""
        self.later(STEP_S, self.train)
        generation = self.training()
        record = self.record_of(generation)
        if record is None:
            return
        if generation not in self.position:
            self.position[generation] = self.line.begin(record)
        self.position[generation] += 1
        step = self.position[generation]
        if step % self.commit_every == 0 or step >= self.train_to:
            self.commit(record, step)
        if step >= self.train_to and generation == self.newest_generation:
            for name in sorted(record.nodes):
                self.finish_worker(self.nodes[name], generation)

    def commit(self, record: Record, step: int) -> None:
        """Commit what a generation has made, and tell."""
        generation = record.generation
        if self.line.commit(generation, step, self.newest_generation):
            self.tell(self.nodes[min(record.nodes)], Progress(generation=generation, step=step))

    def save(self, generation: int) -> None:
        """Save at once, as asked, and tell; perhaps too late."""
        record = self.record_of(generation)
        if record is None or self.training() != generation or generation not in self.position:
            return
        step = self.position[generation]
        if self.line.commit(generation, step, self.newest_generation):
            self.tell(self.nodes[min(record.nodes)], Saved(generation=generation, step=step))

    def finish_worker(self, node: SimNode, generation: int) -> None:
        """Let the workers of a node return in good order."""
        node.ended = EndedEvent(node=node.name, generation=generation, code=0)
        node.fenced, node.running = max(node.fenced, generation), 0
        self.tell(node, node.ended)


def run(seed: int, faults: int | None = None) -> World:
    """Play a schedule of faults, then let everything heal; raise `Violation` if anything is wrong.

    Parameters
    ----------
    seed
        Decides everything.
    faults
        How many; up to 12 if left out.
    """
    from tests.elastic.control.simulation_faults import kinds

    world = World(seed)
    rng = world.rng
    for node in world.nodes.values():
        world.later(rng.uniform(0, 1), lambda n=node: world.beat(n))  # type: ignore[misc]
    world.start_controller()
    world.later(0.3, world.train)
    possible = kinds(world)
    for _ in range(rng.randrange(13) if faults is None else faults):
        gap = rng.choice([0.0, 0.05, 0.5, 3.0, 12.0])
        world.run_until(world.now + rng.uniform(0, 2 * gap))
        if world.over:
            break
        name = rng.choice(sorted(possible))
        world.counts[f"fault {name}"] += 1
        possible[name]()
    _end(world)
    world.line.check()
    return world


def _end(world: World) -> None:
    """Let everything heal, look for progress, and end the job."""
    _heal(world)
    before = world.line.committed
    world.run_until(world.now + 150.0)
    if not world.over and world.line.committed < before + 20:
        machine = world.machine
        raise Violation(
            f"no progress after everything healed: {before} to {world.line.committed}, "
            f"{machine and (machine.state, machine.reason, machine.generation)}"
        )
    if not world.over:
        world.train_to = world.line.committed + 3
        world.run_until(world.now + 150.0)
        if not world.over:
            raise Violation("the job does not end")
    if world.aborted is not None:
        _check_last_words(world, world.aborted)


def _check_last_words(world: World, aborted: Abort) -> None:
    if aborted.kind not in {"no-progress", "no-nodes", "stopped", "max-restarts"}:
        raise Violation(f"ended with {aborted.kind}")
    # What it says may be a message old, and never more than what is committed.
    ends = r".*(?:Step (\d+) or a later one is|No step is known to be) committed\."
    said = re.fullmatch(ends, aborted.text)
    if said is None:
        raise Violation(f"no word of what is committed: {aborted.text}")
    told = int(said[1] or 0)
    if told > world.line.committed:
        raise Violation(f"step {told} was promised, {world.line.committed} are committed")


def _heal(world: World) -> None:
    """Bring back everything."""
    world.run_until(world.now + 45.0)
    world.log_lost, world.poisoned_until = "", 0.0
    for node in world.nodes.values():
        node.reaches, node.side, node.frozen_until, node.stuck_until = True, 0, 0.0, 0.0
        world.revive(node)
    if not world.over:
        world.revive_controller()
    world.run_until(world.now + 3.0)
    for name in world.nodes:
        world.hear(Order(kind=OrderKind.ADD, nodes=(name,)))
    world.hear(Order(kind=OrderKind.RESUME))
    world.run_until(world.now + 1.0)


def main() -> None:
    """Play seeds FIRST to LAST; print what went wrong, and how often what happened."""
    import sys

    first, last = (int(a) for a in sys.argv[1:3])
    ends: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            world = run(seed)
            ends[world.aborted.kind if world.aborted else "finished"] += 1
            counts += world.counts
            counts["steps"] += world.line.committed
            counts["seconds"] += int(world.now)
            counts["refused commits"] += world.line.refused
        except Exception as error:  # noqa: BLE001 - every kind of failure is a result
            ends["violation"] += 1
            sys.stdout.write(f"seed {seed}: {type(error).__name__} {error}\n")
        if (seed + 1 - first) % 250 == 0:
            sys.stdout.write(f"seeds {first} to {seed}: {dict(ends)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"seeds {first} to {last - 1}: {dict(ends)}\n{dict(sorted(counts.items()))}\n")


__all__ = ["State", "Violation", "World", "run"]

if __name__ == "__main__":
    main()
