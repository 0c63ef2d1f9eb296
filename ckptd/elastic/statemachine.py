"""What a controller decides: a state machine without clocks, sockets or files.

RUNNING, SUSPECT, FENCE, PLAN, RESHARD, RESUME, and aside of them PARKED, DONE and ABORTED. Every
state has a deadline, and a fault in any of them leads back to FENCE with a new generation: a second
fault needs no rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckptd.elastic.membership import Record, check_log, members_of
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
    Tell,
    Tick,
)
from ckptd.elastic.policy import Choice, Job, choose
from ckptd.elastic.roster import Node, Roster
from ckptd.elastic.states import ControllerSettings, State
from ckptd.errors import RefusedError

__all__ = ["ControllerSettings", "State", "StateMachine"]


_ACTIVE = (State.RUNNING, State.SUSPECT, State.RESHARD, State.RESUME)


class StateMachine:
    """The decisions for one job.

    Whoever drives it hands over events in the order in which it hears of them, with the moment
    (seconds of a clock that never goes back), and carries out the actions in their order. It is
    deterministic: the same events at the same moments give the same actions.

    Parameters
    ----------
    job
        What the layout policy has to know.
    settings
        Deadlines.
    records
        The membership log so far: a controller that was killed goes on from it.
    now
        The moment.
    by
        Which life of which controller this is, for its records.
    epoch
        Seconds since 1970 at which `now` was 0, for people.

    Attributes
    ----------
    state, since
        Where the job is, and since when.
    generation
        The newest that was ever heard of.
    record
        What the newest generation that was started is.
    step
        The last committed step.
    reason
        Why the state is not RUNNING.

    Raises
    ------
    CorruptError
        kind ``bad-log``: the log goes backwards.
    """

    def __init__(
        self,
        job: Job,
        settings: ControllerSettings | None = None,
        records: Sequence[Record] = (),
        now: float = 0.0,
        *,
        by: str = "controller",
        epoch: float = 0.0,
    ) -> None:
        check_log(records, "the membership log")
        self.job = job
        self.settings = settings or ControllerSettings()
        self.nodes = Roster()
        self.record = records[-1] if records else None
        self.generation = self.record.generation if self.record else 0
        self.step = self.record.step if self.record else 0
        self.state = State.SUSPECT if self.record else State.PLAN
        self.since = now
        self.reason = "the controller was restarted" if self.record else "waiting for nodes"
        self._by, self._epoch, self._born = by, epoch, now
        self._settling = self.record is not None
        self._cycles = 0
        self._stepped = self.step
        """Last committed step when the last fault was counted."""
        self._then = State.PLAN
        """What follows the fence."""
        self._done: set[str] = set()
        self._loaded: set[str] = set()
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event; return what is to be done about it, in this order."""
        self._out = []
        if self.state not in (State.DONE, State.ABORTED):
            _HANDLERS[type(event)](self, event, now)
            self._advance(now)
        return self._out

    # --- what is heard ----------------------------------------------------------------------------

    def _node_up(self, said: NodeUp, now: float) -> None:
        other = self.nodes.hear(said, now)
        if max(said.fenced, said.running) > self.generation:
            # A controller before this one had begun a generation that the log does not know.
            self.generation = max(said.fenced, said.running)
            if self.state in _ACTIVE:
                self._fence("a generation was begun and not written down", now)
        self._repeat(self.nodes[said.node])
        if self.state not in _ACTIVE or not self._is_member(said.node) or self.record is None:
            return
        if other or (self._settling and said.running != self.record.generation):
            self._fault(said.node, f"{said.node} came back without its workers", now)
        elif not said.running and not self._settling:
            # Perhaps it never heard of this generation. Who has started it already does nothing.
            self._out.append(Start(record=self.record, level=self._level()))

    def _repeat(self, node: Node) -> None:
        """Fence again whoever has not heard of it, or came too late to."""
        unheard = self.state is State.FENCE and node.fenced < self.generation
        if unheard or 0 < node.running < self.generation:
            self._out.append(Fence(nodes=(node.name,), generation=self.generation))

    def _left(self, event: Left, now: float) -> None:
        node = self.nodes[event.node]
        node.up, node.running = False, 0
        node.fenced = max(node.fenced, self.generation)
        if self.state in _ACTIVE and self._is_member(event.node):
            self._fault(event.node, f"{event.node} is gone", now)

    def _ended(self, event: Ended, now: float) -> None:
        if not self._is_current(event.generation) or not self._is_member(event.node):
            return
        self.nodes[event.node].running = 0
        if event.code:
            self._fault(event.node, f"a worker on {event.node} ended with {event.code}", now)
            return
        self._done.add(event.node)
        if self.record is not None and self._done >= self.record.nodes:
            self._become(State.DONE, "all workers have ended in good order", now)
            self._out.append(Finish())

    def _fenced(self, event: Fenced, now: float) -> None:
        node = self.nodes[event.node]
        node.seen = max(node.seen, now)
        node.fenced = max(node.fenced, event.generation)
        if node.running <= event.generation and node.fenced >= self.generation:
            node.running = 0

    def _loaded_(self, event: Loaded, now: float) -> None:
        if self._is_current(event.generation) and self.state is State.RESHARD:
            self._loaded.add(event.node)
            if self.record is not None and self._loaded >= self.record.nodes:
                self._become(State.RESUME, self.reason, now, keep_since=True)

    def _progress(self, event: Progress, now: float) -> None:
        if self.record is None or event.generation != self.record.generation:
            return
        # Also while it is fenced: the step is committed, and nothing takes it back.
        self.step = max(self.step, event.step)
        if self.state in (State.RESHARD, State.RESUME) and self._is_current(event.generation):
            self._become(State.RUNNING, "", now)

    def _saved(self, event: Saved, now: float) -> None:
        if self.record is not None and event.generation == self.record.generation:
            self.step = max(self.step, event.step)
        if self.state is State.SUSPECT and not self._settling:
            self._fence(self.reason, now)

    def _suspected(self, event: Suspected, now: float) -> None:
        if self.state not in _ACTIVE:
            return
        for name in event.nodes:
            self.nodes[name].out_until = now + self.settings.out_s
        self._fault("", event.reason, now)

    def _order(self, event: Order, now: float) -> None:
        text = event.reason or f"ordered: {event.kind} {' '.join(event.nodes)}".strip()
        kind = event.kind
        if kind is OrderKind.ADD:
            for name in event.nodes:
                self.nodes[name].out_until, self.nodes[name].faults = -math.inf, []
            return
        if kind in (OrderKind.EXCLUDE, OrderKind.DRAIN):
            for name in event.nodes:
                self.nodes[name].out_until = math.inf
            if not any(self._is_member(name) for name in event.nodes):
                return
        if kind is OrderKind.RESUME:
            if self.state is State.PARKED or self._then is State.PARKED:
                self._then = State.PLAN
                if self.state is State.PARKED:
                    self._become(State.PLAN, text, now)
            return
        if kind is OrderKind.PAUSE:
            self._then = State.PARKED
        if kind is OrderKind.STOP:
            self._then = State.ABORTED
        self._planned(text, now)

    def _tick(self, _: Tick, now: float) -> None:
        """Time alone is looked at after every event."""

    # --- what follows -----------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self._give_up_silent(now)
        before = None
        while before is not self.state:
            before = self.state
            waiting = _WAITING.get(self.state)
            if waiting is not None:
                waiting(self, now)

    def _give_up_silent(self, now: float) -> None:
        for node in list(self.nodes):
            # Nothing is known of how long a node was silent before this controller began.
            if node.up and now - max(node.seen, self._born) >= self.settings.silent_s:
                node.up = False
                if self.state in _ACTIVE and self._is_member(node.name):
                    self._fault(node.name, f"nothing is heard of {node.name}", now)

    def _suspect(self, now: float) -> None:
        if self._settling:
            members = self.record.nodes if self.record else frozenset()
            here = [self.nodes[name] for name in sorted(members)]
            if all(n.up and n.running == self.generation for n in here):
                self._settling = False
                self._become(State.RESUME, self.reason, now)
            elif now - self.since >= self.settings.settle_s:
                missing = sorted(n.name for n in here if n.running != self.generation)
                self._fault("", f"after its restart the controller misses {missing[:5]}", now)
        elif now - self.since >= self.settings.save_s:
            self._fence(self.reason, now)

    def _wait_for_fence(self, now: float) -> None:
        members = self.record.nodes if self.record else frozenset()
        # A controller that was restarted may never have heard of a member, which trains on.
        names = members | {n.name for n in self.nodes if n.running}
        running = [self.nodes[name] for name in sorted(names)]
        if any(n.up and n.fenced < self.generation for n in running):
            return  # silence ends this wait as well
        # One dead rank keeps its whole generation from another step. If no death is sure, all
        # that helps is the lease, which workers give up by themselves.
        sure = not running or any(n.fenced >= self.generation for n in running)
        last = max((max(n.seen, self._born) for n in running), default=now)
        if sure or now - last >= self.settings.lease_s:
            self._after_fence(now)

    def _after_fence(self, now: float) -> None:
        if self._then is State.ABORTED:
            self._abort("stopped", now)
        else:
            self._become(self._then, self.reason, now)

    def _plan(self, now: float) -> None:
        choice = self._choice(now)
        if choice is None:
            if now - self.since >= self.settings.nodes_s:
                self._abort("no-nodes", now)
            return
        smaller = choice.shape.world < self.job.planned.world
        if smaller and now - self.since < self.settings.patience_s:
            return
        self.generation += 1
        self.record = Record(
            generation=self.generation,
            shape=choice.shape,
            members=members_of(choice.places),
            step=self.step,
            reason=self.reason,
            at=self._epoch + now,
            by=self._by,
        )
        self._done, self._loaded = set(), set()
        for name in sorted(self.record.nodes):
            self.nodes[name].running = self.generation
        self._out += [Append(record=self.record), Start(record=self.record, level=self._level())]
        self._out += [Tell(text=line) for line in choice.why[:1]]
        self._become(State.RESHARD, self.reason, now)

    def _level(self) -> int:
        return min(1 + self._cycles // 2, self.settings.levels)

    def _choice(self, now: float) -> Choice | None:
        current = self.record.shape if self.record else None
        for all_up in (False, True):  # a node that is often at fault is better than none
            slots = self.nodes.slots(now, self.record, all_up=all_up)
            try:
                return choose(self.job, slots, current)
            except RefusedError:
                continue
        return None

    def _wait_for_step(self, now: float) -> None:
        if now - self.since >= self.settings.resume_s:
            self._fault("", "no step was committed in time", now)

    def _run(self, now: float) -> None:
        """Take newcomers in, if that makes steps shorter."""
        if self.record is None:
            return
        new = [n for n in self.nodes if n.up and n.name not in self.record.nodes]
        settled = [n for n in new if self._has_settled(n, now)]
        if not settled:
            return
        current = self.record.shape
        known = {n.name for n in settled} | self.record.nodes
        slots = [s for s in self.nodes.slots(now, self.record) if s.node in known]
        try:
            better = choose(self.job, slots, current).shape
        except RefusedError:
            return
        if self.job.step_cost(better) < self.job.step_cost(current):
            self._planned(f"growing from {current} to {better}", now)

    def _has_settled(self, node: Node, now: float) -> bool:
        return node.out_until <= now and now - max(self.since, self._born) >= self.settings.grow_s

    # --- changes ----------------------------------------------------------------------------------

    def _planned(self, reason: str, now: float) -> None:
        """Restart, but let the ranks save first where they train."""
        if self.state is State.RUNNING and self.record is not None:
            self._become(State.SUSPECT, reason, now)
            self._out.append(Save(generation=self.record.generation))
        elif self.state in _ACTIVE:
            self._fence(reason, now)
        elif self.state is not State.FENCE:
            self._after_fence(now)

    def _fault(self, node: str, reason: str, now: float) -> None:
        s = self.settings
        if node and self.nodes.blame(
            node, now, window_s=s.flap_window_s, most=s.flaps, out_s=s.out_s
        ):
            self._out.append(Tell(text=f"{node} was at fault {s.flaps} times: it is left out"))
        self._cycles = self._cycles + 1 if self.step <= self._stepped else 1
        self._stepped = self.step
        self._fence(reason, now)
        if self._cycles > s.cycles:
            self._abort("no-progress", now)

    def _fence(self, reason: str, now: float) -> None:
        self.generation += 1
        self._settling = False
        self._become(State.FENCE, reason, now)
        self._out.append(Fence(nodes=self.nodes.up(), generation=self.generation))

    def _abort(self, kind: str, now: float) -> None:
        texts = {
            "stopped": f"stopped: {self.reason}",
            "no-nodes": f"no layout fits the nodes that are left; last: {self.reason}",
            "no-progress": f"{self._cycles} generations in a row have committed no step; "
            f"last: {self.reason}",
        }
        text = f"{texts[kind]}. The last committed step is {self.step}."
        self._become(State.ABORTED, text, now)
        self._out.append(Abort(kind=kind, text=text))

    def _become(self, state: State, reason: str, now: float, *, keep_since: bool = False) -> None:
        self.state, self.reason = state, reason
        self.since = self.since if keep_since else now
        if state is State.PLAN:
            self._then = State.PLAN

    def _is_member(self, node: str) -> bool:
        return self.record is not None and node in self.record.nodes

    def _is_current(self, generation: int) -> bool:
        return (
            self.state in _ACTIVE
            and self.record is not None
            and generation == self.record.generation == self.generation
        )


_HANDLERS: dict[type[Event], Callable[[Any, Any, float], None]] = {
    NodeUp: StateMachine._node_up,
    Left: StateMachine._left,
    Ended: StateMachine._ended,
    Fenced: StateMachine._fenced,
    Loaded: StateMachine._loaded_,
    Progress: StateMachine._progress,
    Saved: StateMachine._saved,
    Suspected: StateMachine._suspected,
    Order: StateMachine._order,
    Tick: StateMachine._tick,
}

_WAITING: dict[State, Callable[[StateMachine, float], None]] = {
    State.SUSPECT: StateMachine._suspect,
    State.FENCE: StateMachine._wait_for_fence,
    State.PLAN: StateMachine._plan,
    State.RESHARD: StateMachine._wait_for_step,
    State.RESUME: StateMachine._wait_for_step,
    State.RUNNING: StateMachine._run,
}
