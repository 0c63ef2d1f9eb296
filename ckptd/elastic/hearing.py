"""What a controller makes of what it hears: a method for each kind of event."""

from __future__ import annotations

import math

from ckptd.elastic.decisions import ACTIVE, PAUSED_BEFORE, Decisions
from ckptd.elastic.membership import Record
from ckptd.elastic.messages import (
    Broken,
    Ended,
    Fence,
    Fenced,
    Finish,
    Left,
    Loaded,
    Lost,
    NodeUp,
    Notice,
    Order,
    OrderKind,
    Progress,
    Refuse,
    Save,
    Saved,
    Start,
    Suspected,
    Tell,
)
from ckptd.elastic.policy import choose
from ckptd.elastic.roster import Node
from ckptd.elastic.states import State
from ckptd.errors import RefusedError

__all__ = ["Hearing"]

_MOST_REASON = 1000
"""Characters of a node's reason that are kept: it goes into each status."""


class Hearing(Decisions):
    """The half of a `StateMachine` that hears; see there."""

    # --- nodes ------------------------------------------------------------------------------------

    def _node_up(self, said: NodeUp, now: float) -> None:
        known = max(said.fenced, said.running)
        if self.record is None and known > 0:
            self._refuse(said, now)
            return
        silent = self._silence(self.nodes[said.node], now)
        had = self.nodes[said.node].up, self.nodes[said.node].slots
        other = self.nodes.hear(said, now)
        node = self.nodes[said.node]
        self._changed |= other or had != (node.up, node.slots)
        if not node.running and node.fenced >= self.generation:
            # It may have fenced while it was cut off: nobody will hear of that by itself.
            self._changed |= node.stuck_at is not None
            node.stuck_at = None
        if known > self.generation:
            # A controller before this one had begun a generation that the log does not know.
            self.generation = known
            if self.state in ACTIVE:
                paused = self._settling and self._then is State.PARKED
                text = "a generation was begun and not written down"
                self._fence(PAUSED_BEFORE if paused else text, now)
        self._repeat(node, came=other or not had[0])
        if self.state not in ACTIVE or self._settling or self.record is None:
            return
        if other and self._is_member(node.name):
            self._fault(node.name, f"{node.name} came back without its workers", now, silent)
        elif self._is_member(node.name) and not node.running and not self._is_over(node.name):
            self._idle(node, self.record, now)
        else:
            node.idle_since = None

    def _idle(self, node: Node, record: Record, now: float) -> None:
        """Ask why a member runs nothing."""
        if node.fenced < record.generation:
            # Perhaps it never heard of this generation. Who has started it already does nothing.
            self._out.append(Start(record=record, level=self.level, nodes=(node.name,)))
            return
        # How they ended is perhaps about to be told.
        node.idle_since = now if node.idle_since is None else node.idle_since

    def _repeat(self, node: Node, *, came: bool) -> None:
        """Fence again whoever has not heard of it, or came too late to."""
        fencing = self.state is State.FENCE
        unheard = (fencing or node.stuck_at is not None) and node.fenced < self.generation
        if unheard or 0 < node.running < self.generation:
            level = self._fence_level() if fencing else 1
            self._out.append(Fence(nodes=(node.name,), generation=self.generation, level=level))
        waited_for = node.running or self._is_member(node.name)
        if fencing and unheard and came and waited_for:
            self._pending.append(node.name)

    def _refuse(self, said: NodeUp, now: float) -> None:
        text = (
            f"{said.node} knows of generation {max(said.fenced, said.running)}, and the membership "
            "log is empty: it was lost, or this is another one. Nothing was begun and nobody was "
            "stopped. Start the controller with the job's log; or stop all of the job's launchers, "
            "and start it as a new one: its checkpoints are not touched"
        )
        self._become(State.ABORTED, text, now)
        self._out.append(Refuse(kind="lost-log", text=text))

    def _left(self, event: Left, now: float) -> None:
        node = self.nodes[event.node]
        node.up, node.running, self._changed = False, 0, True
        node.fenced = max(node.fenced, self.generation)
        if self._is_member(event.node):
            self._acquit(event.node, now)
            if self.state in ACTIVE:
                self._fault(event.node, f"{event.node} is gone", now)

    def _lost(self, event: Lost, now: float) -> None:
        if event.node in self.nodes and self.nodes[event.node].up:
            text = f"the connection to {event.node} broke"
            self._gone(self.nodes[event.node], text, now)

    def _gone(self, node: Node, reason: str, now: float) -> None:
        """Give a node up, whose workers may run on."""
        node.up, self._changed = False, True
        if self._is_member(node.name):
            self._acquit(node.name, now)
            if self.state in ACTIVE:
                self._fault(node.name, reason, now, self._silence(node, now))

    def _acquit(self, culprit: str, now: float) -> None:
        """Blame a node that is gone for what failed elsewhere just before that was heard."""
        if self._accused is not None and self._accused[1] != culprit:
            self._accused = None
            self._early.clear()  # what its loss explains, no program has said
            if self.state not in ACTIVE:
                self._blame(culprit, now)

    def _notice(self, event: Notice, now: float) -> None:
        node = self.nodes[event.node]
        node.leaving, self._changed = node.life, True
        if not self._is_member(event.node) or self.state not in ACTIVE:
            return
        reason = event.reason[:_MOST_REASON] or "notice"
        text = f"{event.node} will be gone in {event.seconds:.0f} s: {reason}"
        try:
            choose(self.job, self.nodes.slots(now, self.record, all_up=True))
        except RefusedError:
            # Without it the job only waits: it trains on as long as it can.
            self._out.append(Tell(text=f"{text}. Nothing fits without it"))
            if self.record is not None and self.state is State.RUNNING:
                self._out.append(Save(generation=self.record.generation))
            return
        self._planned(text, now, within_s=max(event.seconds, 0.0), leaving=True)

    def _fenced(self, event: Fenced, now: float) -> None:
        node = self.nodes[event.node]
        node.seen = max(node.seen, now)
        node.fenced = max(node.fenced, event.generation)
        if node.running <= event.generation and node.fenced >= self.generation:
            self._changed |= node.stuck_at is not None
            node.running, node.stuck_at = 0, None

    # --- workers ----------------------------------------------------------------------------------

    def _ended(self, event: Ended, now: float) -> None:
        if not self._is_current(event.generation) or not self._is_member(event.node):
            return
        self._ends[event.node] = event
        if not event.left:
            self.nodes[event.node].running = 0
            if not event.code:
                self._done.add(event.node)
        if len(self._done) == len(self.members):
            self._become(State.DONE, "all workers have ended in good order", now)
            self._out.append(Finish())
            return
        failed = [end for end in self._ends.values() if end.code]
        if failed:
            self._look_at_failed(failed, event, now)

    def _look_at_failed(self, failed: list[Ended], event: Ended, now: float) -> None:
        """Restart because a worker has failed, unless all others are at their end.

        Who has returned in good order takes part in no further step: nothing is won by starting
        the rest once more. What the others still do is waited for.
        """
        first = failed[0]
        self._code = first.code
        what = f"a worker on {first.node} ended with {first.code}"
        what += f": {first.text}" if first.text else ""
        alone = len(failed) == 1 and first.bad == 1
        if not alone or not any(end.well or not end.code for end in self._ends.values()):
            culprit = "" if self._excused(first, now) else first.node
            self._fault(culprit, what, now, ended=first)
        elif any(end.left for end in self._ends.values()) or self._ends.keys() != self.members:
            if event is first:
                self._out.append(Tell(text=f"{what}. Others have ended well: the rest may end"))
        else:
            self.reason = f"{what}, when all others ended in good order"
            self._abort("exit-code", now)

    def _excused(self, event: Ended, now: float) -> bool:
        """Return whether another node's loss, told later, may be why a worker failed.

        Its collective failed then, and it exits by itself: a signal has no such excuse. Nor has who
        needed it before; or else a node whose workers fail as soon as they start is never left out.
        """
        if self._accused is not None:
            # A whole generation lies between, and no node was lost.
            self._blame(self._accused[1], now)
        faults = self.nodes.recent(event.node, now, self.settings.flap_window_s)
        excused = event.code > 0 and len(self.members) > 1
        excused = excused and (not faults or faults + 1 < self.settings.flaps)
        self._accused = (now, event.node) if excused else None
        return excused

    def _broken_(self, event: Broken, now: float) -> None:
        if self._is_current(event.generation) and self._is_member(event.node):
            reason = event.reason[:_MOST_REASON] or "a collective failed"
            self._broken = self._broken or (now, event.node, f"{event.node}: {reason}")

    def _loaded_(self, event: Loaded, now: float) -> None:
        if not self._is_current(event.generation) or not self._is_member(event.node):
            return
        self._tells = True
        self._loaded.add(event.node)
        if event.step > 0:
            self._found = min(self._found, event.step)
        if self.state is State.RESHARD and len(self._loaded) == len(self.members):
            self._tell_of_lost_steps()
            self._loaded_at = now
            self._become(State.RESUME, self.reason, now, keep_since=True)

    def _tell_of_lost_steps(self) -> None:
        """Say so if an older state was found than the one that is known to be committed.

        The log keeps the committed step, which never falls: steps that are made again are no
        progress.
        """
        known = self.record.step if self.record is not None else 0
        if self._found < known:
            text = f"{known - self._found:.0f} committed steps were lost: step {known} was"
            self._out.append(Tell(text=f"{text} promised, and step {self._found:.0f} found"))

    def _progress(self, event: Progress, now: float) -> None:
        if self.record is None or event.generation != self.record.generation:
            return
        self._tells = True
        if event.step > self.step:
            self._each_step = event.step == self.step + 1
            self._early.clear()
        # Also while it is fenced: the step is committed, and nothing takes it back.
        self.step = max(self.step, event.step)
        if self.state in (State.RESHARD, State.RESUME) and self._is_current(event.generation):
            self._become(State.RUNNING, "", now)

    def _saved(self, event: Saved, now: float) -> None:
        if self.record is None or event.generation != self.record.generation:
            return
        self._tells = True
        self.step = max(self.step, event.step)
        if self.state is State.SUSPECT and not self._settling:
            self._fence(self.reason, now, planned=True)

    # --- people and monitors ----------------------------------------------------------------------

    def _suspected(self, event: Suspected, now: float) -> None:
        for name in event.nodes:
            self.nodes[name].out_until = max(self.nodes[name].out_until, now + self.settings.out_s)
        self._changed = True
        stale = self.record is None or event.generation not in (0, self.record.generation)
        meant = not event.nodes or any(self._is_member(name) for name in event.nodes)
        if self.state in ACTIVE and meant and not stale:
            self._fault("", event.reason, now, event.since_s)
        self._keep_orders(now)

    def _order(self, event: Order, now: float) -> None:
        self._obey(event, now)
        self._keep_orders(now)

    def _obey(self, event: Order, now: float) -> None:
        text = event.reason or f"ordered: {event.kind} {' '.join(event.nodes)}".strip()
        kind = event.kind
        self._changed = True
        if kind is OrderKind.ADD:
            for name in event.nodes:
                node = self.nodes[name]
                node.out_until, node.faults, node.leaving = -math.inf, [], None
                node.outs, node.out_at = 0, -math.inf
            return
        if kind in (OrderKind.EXCLUDE, OrderKind.DRAIN):
            for name in event.nodes:
                self.nodes[name].out_until = math.inf
                self._out_before.discard(name)
            if not any(self._is_member(name) for name in event.nodes):
                return
        if kind is OrderKind.RESUME:
            self._resume(text, now)
            return
        if kind is OrderKind.PAUSE:
            self._then = State.PARKED
        if kind is OrderKind.STOP:
            self._then = State.ABORTED
            self.reason = text
        self._planned(text, now, leaving=kind is not OrderKind.RESTART)

    def _resume(self, text: str, now: float) -> None:
        if self._then is State.PARKED:
            self._then = State.PLAN
        if self.state is State.PARKED:
            self._become(State.PLAN, text, now)
