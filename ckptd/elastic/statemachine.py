"""What a controller decides: a state machine without clocks, sockets or files.

RUNNING, SUSPECT, FENCE, PLAN, RESHARD, RESUME, and aside of them PARKED, DONE and ABORTED. Every
state has a deadline, and a fault in any of them leads back to FENCE with a new generation: a second
fault needs no rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ckptd.elastic.decisions import ACTIVE, CLEAN, PAUSED_BEFORE
from ckptd.elastic.growth import grown
from ckptd.elastic.hearing import Hearing
from ckptd.elastic.messages import (
    Action,
    Broken,
    Ended,
    Event,
    Fence,
    Fenced,
    Left,
    Loaded,
    Lost,
    NodeUp,
    Notice,
    Order,
    Progress,
    Reseat,
    Reseated,
    Saved,
    Suspected,
    Tick,
)
from ckptd.elastic.roster import Node
from ckptd.elastic.states import ControllerSettings, Move, State

__all__ = ["ControllerSettings", "Move", "State", "StateMachine"]

_EXCUSED_S = 2.0
"""For so long after a worker exited by itself the loss of another node explains it."""
_LIVED_S = 60.0
"""A node of which nothing was heard for longer is gone, and not cut off just now."""
_MISSED_S = 0.5
"""For so long after a collective failed members may still be on their way to a new controller."""


class StateMachine(Hearing):
    """The decisions for one job.

    Whoever drives it hands over events in the order in which it hears of them, with the moment
    (seconds of a clock that never goes back), and carries out the actions in their order. It is
    deterministic: the same events at the same moments give the same actions.

    Deadlines are looked at on `Tick`, which costs time in proportion to the nodes; any other event
    of a job that trains costs the same whatever its size.

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
    record, members
        What the newest generation that was started is, and its nodes.
    step
        The last committed step.
    reason
        Why the state is not RUNNING.
    level
        Of the restart under way, or of the last.
    nodes
        What is known of each node.

    Raises
    ------
    CorruptError
        kind ``bad-log``: the log goes backwards.
    """

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event; return what is to be done about it, in this order."""
        self._out = []
        if self.state not in (State.DONE, State.ABORTED):
            _HANDLERS[type(event)](self, event, now)
            self._advance(now)
        return self._out

    def moves(self) -> list[Move]:
        """Return the changes of state since the last call, the oldest first."""
        moves, self._moves = self._moves, []
        return moves

    def explains(self, node: str) -> bool:
        """Return whether the loss of a node would explain what failed on another one just now."""
        failed = [self._broken[1]] if self._broken is not None else []
        failed += [self._accused[1]] if self._accused is not None else []
        return any(name != node for name in failed)

    def hears(self, now: float, within_s: float) -> tuple[int, int]:
        """Return how many nodes were heard of in the last moments, and how many there should be.

        A controller that has just begun is taken to hear all: they are on their way to it.
        """
        # Not by the members: a generation that is being decided has left some of them out already.
        known = [node for node in self.nodes if node.up or now - node.seen < _LIVED_S]
        if now - self._born < self.settings.settle_s:
            knows = len({node.name for node in known} | self.members)
            return knows, knows
        return sum(node.up and now - node.seen < within_s for node in known), len(known)

    def may_renew(self, node: str) -> bool:
        """Return whether a beat of this node is to be echoed, which renews its workers' lease.

        Not if it does not fence: its workers are to end by their lease.
        """
        return node not in self.nodes or self.nodes[node].stuck_at is None

    # --- what follows -----------------------------------------------------------------------------

    def _tick(self, _: Tick, now: float) -> None:
        """Look for silence, and for what has lasted too long."""
        for node in list(self.nodes):
            # Nothing is known of how long a node was silent before this controller began.
            if node.up and self._silence(node, now) >= self.settings.silent_s:
                self._gone(node, f"nothing is heard of {node.name}", now)
            elif node.idle_since is not None:
                self._look_at_idle(node, now - node.idle_since, now)
            elif not node.up and self._is_past(node, now):
                self.nodes.forget(node.name)
        self._changed = True
        if self._accused is not None and now - self._accused[0] >= _EXCUSED_S:
            self._convict(self._accused[1], now)
        if self.state in ACTIVE and self._broken is not None:
            self._wait_for_cause(*self._broken, now)
        if self.state is State.FENCE:
            self._hurry(now)
        waiting = _WAITING.get(self.state)
        if waiting is not None:
            waiting(self, now)

    def _is_past(self, node: Node, now: float) -> bool:
        """Return whether a node that is gone means nothing any more: names must not pile up."""
        kept_s = max(CLEAN * self.settings.out_s, self.settings.lease_s)
        there = self._is_member(node.name) or self._silence(node, now) < kept_s
        return not there and node.out_until <= now

    def _convict(self, node: str, now: float) -> None:
        """Blame a node whose worker failed by itself, since no other one was lost."""
        self._accused = None
        if self._blame(node, now) and self._is_member(node) and self.state in ACTIVE:
            self._planned(f"{node} is left out", now, leaving=True)

    def _look_at_idle(self, node: Node, waited: float, now: float) -> None:
        running = self.state in ACTIVE and not self._settling
        if not (running and self._is_member(node.name)) or self._is_over(node.name):
            node.idle_since = None
        elif waited >= self.settings.silent_s:
            node.idle_since = None
            self._fault(node.name, f"the workers of {node.name} are gone", now, waited)

    def _advance(self, now: float) -> None:
        if self.state is State.FENCE:
            self._wait_for_fence(now)
        if self.state is State.PLAN and self._changed:
            self._plan(now)

    def _wait_for_cause(self, since: float, _: str, reason: str, now: float) -> None:
        waited = now - since
        missing = None
        if self._settling and waited >= _MISSED_S:
            # A stand-in never had a connection that could break: who has not come is the cause.
            missing = next((n for n in sorted(self.members) if not self.nodes[n].up), None)
            reason = f"{reason}; nothing is heard of {missing}" if missing else reason
        if missing or waited >= self.settings.broken_s:
            self._fault("", reason, now, waited)

    def _suspect(self, now: float) -> None:
        if self._settling:
            self._settle(now)
        elif now >= self._save_until:
            self._fence(self.reason, now, planned=True)

    def _settle(self, now: float) -> None:
        """Find out whether the generation of the log's last record still runs."""
        here = [self.nodes[name] for name in sorted(self.members)]
        missing = [n for n in here if n.running != self.generation and not self._is_over(n.name)]
        all_heard = all(n.up for n in here)
        if all_heard and not missing:
            self._settling, self._loaded_at = False, now
            self._become(State.RESUME, self.reason, now)
            if self._then is State.PARKED:
                # It was ordered, and the controller before this one ended first.
                self._become(State.RUNNING, "", now)
                self._planned(PAUSED_BEFORE, now, leaving=True)
            return
        if self._then is State.PARKED and not any(n.up for n in self.nodes):
            return  # whose pause this is, only nodes tell
        # Who has fenced it may still be about to say how its workers ended.
        hopeless = any(n.up and n.fenced < self.generation for n in missing)
        if now - self.since < self.settings.settle_s and not (all_heard and hopeless):
            return
        text = f"after its restart the controller misses {[n.name for n in missing[:5]]}"
        if any(n.running == self.generation for n in here):
            self._fault("", text, now, known=False)
        else:
            self._gathering = True
            self.ladder.submitted()
            for name in self._out_before:
                self.nodes[name].out_until = -math.inf  # those orders were the last run's
            self._then = State.PLAN
            self._fence(text, now)
            self.level = 1  # the launchers are new already

    def _hurry(self, now: float) -> None:
        """Have killed who does not come out; take for gone who does not kill."""
        late = now - self._fenced_at - self.settings.fence_s
        if late < 0:
            return
        waited = [self.nodes[name] for name in self._pending]
        waited = [n for n in waited if n.up and n.fenced < self.generation]
        if self._fence_level() == 0:
            self._hurried = True
            names = tuple(sorted({n.name for n in waited}))
            self._out.append(Fence(nodes=names, generation=self.generation, level=1))
        elif late >= self.settings.fence_s or self.level > 0:
            for node in waited:
                node.stuck_at = node.stuck_at or now

    def _wait_for_fence(self, now: float) -> None:
        while self._pending:
            node = self.nodes[self._pending[-1]]
            if node.up and node.stuck_at is None and node.fenced < self.generation:
                break  # silence ends this wait as well
            self._pending.pop()
        if self._pending:
            return
        # A controller that was restarted may never have heard of a member, which trains on.
        names = self.members | {n.name for n in self.nodes if n.running}
        running = [self.nodes[name] for name in names]
        # One dead rank keeps its whole generation from another step, and no other one: who ran an
        # older one says nothing of the newest. If no death is sure, all that helps is the lease,
        # which workers give up by themselves.
        ranks = [n for n in running if n.name in self.members] or running
        if not running or any(n.fenced >= self.generation for n in ranks):
            self._after_fence(now)
            return
        last = max(n.leased(self._born) for n in running)
        if self._reseated < last:
            # Who reaches the log and not this controller renews the lease by itself until then.
            gone = not any(n.up and n.stuck_at is None for n in running)
            if gone and not self._reseating:
                self._reseating = True
                self._out.append(Reseat(generation=self.generation))
        elif now - self._reseated >= self.settings.lease_s:
            self._after_fence(now)

    def _reseated_(self, event: Reseated, now: float) -> None:
        if event.generation == self.generation:
            self._reseating, self._reseated = False, now

    def _wait_for_load(self, now: float) -> None:
        waited = now - self.since
        if not self._tells and waited >= self.settings.steady_s:
            self._steady(now)
        elif waited >= self.settings.resume_s:
            self._fault("", "not all ranks have loaded in time", now, waited)

    def _wait_for_step(self, now: float) -> None:
        if now - self._loaded_at >= self.settings.steady_s:
            self._steady(now)

    def _steady(self, now: float) -> None:
        if not self._tells:
            self.ladder.credit()
        self._become(State.RUNNING, "", now)

    def _run(self, now: float) -> None:
        """Take newcomers in, if that makes steps shorter."""
        there = self.settings.grow_s
        if self.record is None or now - max(self.since, self._looked) < there:
            return
        self._looked = now
        better = grown(self.job, self.nodes, self.record, self.members, now, there)
        if better is not None:
            self._planned(f"growing from {self.record.shape} to {better}", now)


_HANDLERS: dict[type[Event], Callable[[Any, Any, float], None]] = {
    NodeUp: StateMachine._node_up,
    Left: StateMachine._left,
    Lost: StateMachine._lost,
    Notice: StateMachine._notice,
    Ended: StateMachine._ended,
    Broken: StateMachine._broken_,
    Fenced: StateMachine._fenced,
    Loaded: StateMachine._loaded_,
    Progress: StateMachine._progress,
    Saved: StateMachine._saved,
    Suspected: StateMachine._suspected,
    Order: StateMachine._order,
    Reseated: StateMachine._reseated_,
    Tick: StateMachine._tick,
}

_WAITING: dict[State, Callable[[StateMachine, float], None]] = {
    State.SUSPECT: StateMachine._suspect,
    State.RESHARD: StateMachine._wait_for_load,
    State.RESUME: StateMachine._wait_for_step,
    State.RUNNING: StateMachine._run,
}
