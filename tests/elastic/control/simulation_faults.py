"""What can go wrong in a simulated job."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.elastic.messages import Left, NodeLost, NodeUp, Notice, Order, OrderKind, Suspected
from tests.elastic.control.simulation import World
from tests.elastic.control.simulation_nodes import SimNode

__all__ = ["kinds"]


def kinds(world: World) -> dict[str, Callable[[], None]]:
    """Return all faults by name."""
    return {
        method.removeprefix("fault_"): getattr(_Faults(world), method)
        for method in dir(_Faults)
        if method.startswith("fault_")
    }


class _Faults:
    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.nodes = list(world.nodes.values())

    def one(self) -> SimNode:
        return self.rng.choice(self.nodes)

    def order(self, kind: OrderKind, *names: str) -> None:
        self.world.hear(Order(kind=kind, nodes=names))

    def fault_worker(self) -> None:
        self.world.fail_worker(self.one())

    def fault_worker_again(self) -> None:
        """Two workers, one during what the other one began."""
        self.world.fail_worker(self.one())
        node = self.one()
        self.world.later(self.rng.uniform(0.0, 3.0), lambda: self.world.fail_worker(node))

    def fault_node(self) -> None:
        back, told = self.rng.random() < 0.9, self.rng.random() < 0.7
        self.world.kill_node(self.one(), back=back, told=told)

    def fault_leave(self) -> None:
        node = self.one()
        if node.alive:
            self.world.tell(node, Left(node=node.name))
            self.world.kill_node(node, back=True, told=False)

    def fault_cut(self) -> None:
        self._cut(self.one())

    def fault_cut_many(self) -> None:
        for node in self.nodes:
            if self.rng.random() < 0.6:
                self._cut(node)

    def _cut(self, node: SimNode) -> None:
        self.world.away(node)
        if self.rng.random() < 0.5:
            self.world.lose(node)
        self.world.later(self.rng.uniform(0.5, 40), lambda: setattr(node, "reaches", True))

    def fault_island(self) -> None:
        """Some nodes and the controller are cut off from each other, and all reach the log."""
        part = self.rng.choice([0.0, 0.4, 0.8])
        island = [node for node in self.nodes if self.rng.random() < part] or [self.one()]
        self.world.cut_off(island, self.rng.uniform(0.5, 40))

    def fault_lone_stand_in(self) -> None:
        """The controller's node dies, and the node that stands in is cut off from all others."""
        lone = self.one()
        others = [node for node in self.nodes if node is not lone]
        for node in self.rng.sample(others, min(1, len(others))):
            self.world.kill_node(node, back=self.rng.random() < 0.5, told=True)
        self.world.kill_controller(0.0)
        self.world.later(0.0, lambda: self.world.cut_off(others, self.rng.uniform(0.5, 40)))

    def fault_reset(self) -> None:
        """A connection breaks, and is back too late by a little."""
        self.world.hear(NodeLost(node=self.one().name))

    def fault_split(self) -> None:
        for node in self.nodes:
            node.side = self.rng.randrange(2)
        if self.rng.random() < 0.5:
            self.world.break_peers(self.world.newest_generation)
        self.world.later(self.rng.uniform(0.5, 20), self._join)

    def _join(self) -> None:
        for node in self.nodes:
            node.side = 0

    def fault_freeze(self) -> None:
        self.one().frozen_until = self.world.now + self.rng.uniform(0.5, 30)

    def fault_stuck(self) -> None:
        """A launcher beats and does nothing else."""
        self.one().stuck_until = self.world.now + self.rng.uniform(1.0, 40)

    def fault_broken(self) -> None:
        """A collective fails, and nobody knows why."""
        node = self.one()
        self.world.break_one(node, node.running)

    def fault_store(self) -> None:
        """The node that hosts the store dies between saying so and being reached there."""
        record = self.world.record_of(self.world.newest_generation)
        host = self.world.nodes[record.members[0].node] if record is not None else self.one()
        self.world.fail_worker(self.one())
        told = self.rng.random() < 0.7
        self.world.later(
            self.rng.uniform(0.02, 2.0), lambda: self.world.kill_node(host, back=True, told=told)
        )

    def fault_notice(self) -> None:
        node, seconds = self.one(), self.rng.uniform(0.0, 8.0)
        self.world.hear(Notice(node=node.name, seconds=seconds, reason="pre-empted"))
        if self.rng.random() < 0.9:  # some that are announced stay
            told = self.rng.random() < 0.7
            self.world.later(seconds, lambda: self.world.kill_node(node, back=True, told=told))

    def fault_poison(self) -> None:
        """Every worker dies soon after its start, for a while."""
        self.world.poisoned_until = self.world.now + self.rng.uniform(5.0, 60.0)
        self.world.fail_worker(self.one())

    def fault_zombie(self) -> None:
        """A node that says what was true long ago."""
        node = self.one()
        old = self.rng.randrange(self.world.newest_generation + 1)
        said = NodeUp(node=node.name, life=str(node.life), slots=node.slots, fenced=0, running=old)
        self.world.hear(said)
        for generation, step in list(self.world.position.items()):
            if generation != self.world.newest_generation:  # and commits what it has made
                self.world.line.commit(generation, step + 1, self.world.newest_generation)

    def fault_controller(self) -> None:
        self.world.kill_controller(self.rng.uniform(0.2, 12.0))

    def fault_second_controller(self) -> None:
        """Somebody takes the seat while the controller lives."""
        self.world.start_controller()

    def fault_lost_log(self) -> None:
        """The controller dies, and the next ones do not find the log."""
        world = self.world
        # Of a job whose nodes are all new nobody can know that it was begun before.
        know = all(n.alive and n.reaches and (n.running or n.fenced) for n in self.nodes)
        if not world.log or not know:
            return
        before = [(n.name, n.life, n.running) for n in self.nodes]
        world.log_lost = self.rng.choice(["empty", "broken"])
        world.kill_controller(0.3)
        world.run_until(world.now + 3.0)
        if world.bosses:
            self._found()  # nobody who knew better reached it in time
            return
        after = [(n.name, n.life, n.running) for n in self.nodes]
        for was, now in zip(before, after, strict=True):
            if was[:2] == now[:2] and was[2] and now[2] > was[2]:
                raise AssertionError("something was started over a log that was lost")
        self._found()

    def _found(self) -> None:
        self.world.log_lost = ""
        self.world.kill_controller(0.5)

    def fault_restart(self) -> None:
        self.order(OrderKind.RESTART)

    def fault_drain(self) -> None:
        name = self.one().name
        self.order(OrderKind.DRAIN, name)
        self.world.later(self.rng.uniform(1, 15), lambda: self.order(OrderKind.ADD, name))

    def fault_pause(self) -> None:
        self.order(OrderKind.PAUSE)
        for seconds in (1.0, 5.0, 15.0, 40.0, 80.0):  # whoever wants it says so until it is heard
            self.world.later(seconds, lambda: self.order(OrderKind.RESUME))

    def fault_suspected(self) -> None:
        names = (self.one().name,) if self.rng.random() < 0.7 else ()
        generation = self.rng.choice([0, 0, self.world.newest_generation])
        event = Suspected(nodes=names, reason="suspected", generation=generation)
        self.world.hear(event)
