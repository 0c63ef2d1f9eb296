"""State machine of a job: from events (lost, ended, late, orders) to the next generation.

In it: what is done in each state, its deadline, and the sentences that explain it; which faults
blame a node, and for how long a faulty one counts; when a job grows, shrinks, pauses, ends; how
long the first start waits for nodes.

RUNNING, SUSPECT, FENCE, PLAN, RESHARD, RESUME, and aside of them PARKED, DONE and ABORTED. Every
state has a deadline, and a fault in any of them leads back to FENCE with a new generation: a second
fault needs no rule of its own.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ckptd.elastic import messages
from ckptd.elastic.control.ladder import DEEPEST, RELAUNCH, Ladder
from ckptd.elastic.control.roster import MOST_DOUBLED, Node, Roster
from ckptd.elastic.control.states import ControllerSettings, ExitCodes, Move, State
from ckptd.elastic.membership import Record, check_log, members_of
from ckptd.elastic.policy import Choice, JobSpec, Shape, choose, together
from ckptd.errors import RefusedError, first_few

_EXCUSED_S = 2.0
"""For so long after a worker exited by itself the loss of another node explains it."""
_LIVED_S = 60.0
"""A node of which nothing was heard for longer is gone, and not cut off just now."""
_MISSED_S = 0.5
"""For so long members may still be on their way to a new controller that hears half of them."""
_READY_S = 60.0
"""By so much longer the first start waits for nodes that are there and not ready yet."""
_MOST_REASON = 1000
"""Characters of a node's reason that are kept: it goes into each status."""
_CLEAN = 24
"""Times `ControllerSettings.out_s` after which a node that was left out is like any other."""
_SHORTER = 12
"""A node that no other one replaces is left out for so much less."""
_PAUSED_BEFORE = "paused before the controller was restarted"
_UP = (State.RUNNING, State.DONE)
_ACTIVE = (State.RUNNING, State.SUSPECT, State.RESHARD, State.RESUME)


class StateMachine:
    """The decisions for one job.

    Its driver hands over events in the order of their arrival, with the moment
    (seconds of a clock that never goes back), and carries out the actions in their order. It is
    deterministic: the same events at the same moments give the same actions.

    Deadlines are looked at on `Tick`, which costs time in proportion to the nodes; any other event
    of a job that trains costs the same whatever its size.

    Parameters
    ----------
    job
        Description of the job, for the layout policy.
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
        The newest that any record or node has named.
    record, members
        Record of the newest generation that was started, and its nodes.
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
        The log goes backwards.
    """

    def __init__(
        self,
        job: JobSpec,
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
        self._out_before = set(self.record.out if self.record else ())
        """Nodes that were left out under a controller before this one."""
        for name in self._out_before:
            self.nodes[name].out_until = math.inf
        longest = self.settings.out_s * 2**MOST_DOUBLED
        for name, until in self.record.resting if self.record else ():
            # By another machine's clock, perhaps.
            self.nodes[name].out_until = now + min(until - epoch - now, longest)
            self._out_before.add(name)
        self.members = self.record.nodes if self.record else frozenset[str]()
        for name in self.members:
            self.nodes[name].seen = now  # they are on their way to this controller
        self.generation = self.record.generation if self.record else 0
        self.step = self.record.step if self.record else 0
        self.state = State.SUSPECT if self.record else State.PLAN
        self.since = now
        self.reason = "the controller was restarted" if self.record else "waiting for nodes"
        self.level = self.record.level if self.record else 1
        self.ladder = Ladder.after(self.record, self.settings)
        self._by, self._epoch, self._born = by, epoch, now
        self._settling = self.record is not None
        self._gathering = self.record is None
        self._planned_restart = False
        self._tells = self.step > 0
        """Whether this job ever told of loading or steps."""
        self._each_step = False
        """Whether each step of the generation was committed, as far as it has told."""
        parked = self.record is not None and self.record.parked
        self._then = State.PARKED if parked else State.PLAN
        """State after the fence."""
        self._save_until = self._relaunch_until = -math.inf
        self._fenced_at = self._loaded_at = now
        self._looked = now
        """When newcomers were looked at."""
        self._hurried = False
        """Whether those that did not come out are being killed."""
        self._code = 0
        self._final = ExitCodes(self.settings.no_restart_on)
        self._ends: dict[str, messages.Ended] = {}
        """Each member's report of how its workers ended in this generation."""
        self._early: dict[tuple[int, str], set[str]] = {}
        """Nodes whose program has ended before its first step, by code and place, since a step."""
        self._refused = ""
        self._changed = True
        """Whether a plan that was refused may succeed now: looking costs time."""
        self._broken: tuple[float, str, str] | None = None
        """When a collective failed, on which node, and what is known of it."""
        self._causeless = False
        """Whether those that do not come to a stand-in are to explain the restart under way."""
        self._accused: tuple[float, str] | None = None
        """When a worker failed by itself, and on which node, if that may be another one's fault."""
        self._reseating = False
        self._reseated = -math.inf
        """Since when no lease is renewed without this controller."""
        self._pending: list[str] = []
        """Nodes whose fence is waited for."""
        self._done: set[str] = set()
        self._loaded: set[str] = set()
        self._found = math.inf
        """The oldest step that a node of the generation has loaded."""
        self._out: list[messages.Action] = []
        self._moves: list[Move] = []

    def handle(self, event: messages.JobEvent, now: float) -> list[messages.Action]:
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

    def hears(self, now: float, within_s: float, *, linked: bool = False) -> tuple[int, int]:
        """Return how many nodes reported in the last `within_s` seconds, and how many should.

        For a controller that has just begun all nodes count as heard: they are on their way to it.
        So do launchers that are being replaced. Without that, a single node that is cut off takes
        the place of a controller whose launchers all restart. With `linked`, a node without a
        connection is not heard: where one way of a network is cut, its last words came just before.
        """
        # Not by the members: a generation that is being decided has left some of them out already.
        known = [node for node in self.nodes if node.up or now - node.seen < _LIVED_S]
        if now - self._born < self.settings.settle_s:
            return len(known), len(known)
        replaced = now < self._relaunch_until
        heard = sum(
            (now - node.seen < within_s and (node.up or not linked))
            or (replaced and node.asked == node.life)
            for node in known
        )
        return heard, len(known)

    def may_renew(self, node: str) -> bool:
        """Return whether a beat of this node is to be echoed, which renews its workers' lease.

        Not if it does not fence: its workers are to end by their lease.
        """
        return node not in self.nodes or self.nodes[node].stuck_at is None

    # --- events: nodes ----------------------------------------------------------------------------

    def _node_up(self, said: messages.NodeUp, now: float) -> None:
        known = max(said.fenced, said.running)
        if self.record is None and known > 0:
            self._refuse(said, now)
            return
        silent = now - self.nodes[said.node].seen
        had = self.nodes[said.node].up, self.nodes[said.node].slots
        before = self.nodes[said.node].sick
        other = self.nodes.hear(said, now)
        node = self.nodes[said.node]
        for text in said.sick:
            if text not in before:
                self._out.append(messages.Tell(text=f"{node.name} has lost a slot: {text}"))
        self._changed |= other or had != (node.up, node.slots)
        if (other or not had[0]) and node.out_until > now:
            self._say_left_out(node, now, (node.name,))
        if not node.running and node.fenced >= self.generation:
            # It may have fenced while it was cut off, and will not report that again.
            self._changed |= node.stuck_at is not None
            node.stuck_at = None
        if known > self.generation:
            # A controller before this one had begun a generation that the log does not know.
            self.generation = known
            if self.state in _ACTIVE:
                paused = self._settling and self._then is State.PARKED
                text = "a generation was started but not recorded in the log"
                self._fence(_PAUSED_BEFORE if paused else text, now)
        self._repeat(node, came=other or not had[0])
        if self.state not in _ACTIVE or self._settling or self.record is None:
            return
        if other and node.name in self.members:
            self._fault(node.name, f"{node.name} came back without its workers", now, silent)
        elif node.name in self.members and not node.running and not self._is_over(node.name):
            self._idle(node, self.record, now)
        else:
            node.idle_since = None

    def _idle(self, node: Node, record: Record, now: float) -> None:
        """Ask why a member runs nothing."""
        if node.fenced < record.generation:
            # Perhaps the order to start was lost. A node that has started already ignores this one.
            self._out.append(messages.Start(record=record, level=self.level, nodes=(node.name,)))
            return
        # The report of how they ended may still be on its way.
        node.idle_since = now if node.idle_since is None else node.idle_since

    def _repeat(self, node: Node, *, came: bool) -> None:
        """Fence a node again where the order was lost, or the node came too late."""
        fencing = self.state is State.FENCE
        unfenced = (fencing or node.stuck_at is not None) and node.fenced < self.generation
        if unfenced or 0 < node.running < self.generation:
            level = self._fence_level() if fencing else 1
            self._out.append(
                messages.Fence(nodes=(node.name,), generation=self.generation, level=level)
            )
        waited_for = node.running or node.name in self.members
        if fencing and unfenced and came and waited_for:
            self._pending.append(node.name)

    def _refuse(self, said: messages.NodeUp, now: float) -> None:
        text = (
            f"{said.node} knows of generation {max(said.fenced, said.running)}, and the membership "
            "log is empty: it was lost, or --log names another one. Nothing was started or "
            "stopped. Start the controller with the job's log; or stop all of the job's launchers, "
            "and start it as a new one: its checkpoints are not touched"
        )
        self._become(State.ABORTED, text, now)
        self._out.append(messages.Refuse(text=text))

    def _left(self, event: messages.Left, now: float) -> None:
        node = self.nodes[event.node]
        node.running, node.seen = 0, now
        node.fenced = max(node.fenced, self.generation)
        self._gone(node, f"{event.node} is gone", now)

    def _lost(self, event: messages.NodeLost, now: float) -> None:
        if event.node in self.nodes and self.nodes[event.node].up:
            text = f"the connection to {event.node} broke"
            self._gone(self.nodes[event.node], text, now)

    def _gone(self, node: Node, reason: str, now: float) -> None:
        """Give a node up; its workers may run on, unless it has said goodbye."""
        node.up, self._changed = False, True
        if node.name in self.members:
            self._acquit(node.name, now, reason)
            if self.state in _ACTIVE:
                self._fault(node.name, reason, now, now - node.seen)

    def _acquit(self, culprit: str, now: float, why: str = "") -> None:
        """Blame a node that is gone for what failed elsewhere just before that was heard."""
        if self._accused is not None and self._accused[1] != culprit:
            self._accused = None
            self._early.clear()  # what its loss explains, no program has said
            if self.state not in _ACTIVE:
                self._blame(culprit, now)
                self.reason = f"{why}; {self.reason}" if why else self.reason

    def _notice(self, event: messages.Notice, now: float) -> None:
        node = self.nodes[event.node]
        node.leaving, self._changed = node.life, True
        if event.node not in self.members or self.state not in _ACTIVE:
            return
        reason = event.reason[:_MOST_REASON] or "notice"
        text = f"{event.node} will be taken away in {event.seconds:.0f} s: {reason}"
        try:
            choose(self.job, self.nodes.slots(now, self.record, all_up=True))
        except RefusedError:
            # Without it the job only waits: it trains on as long as it can.
            self._out.append(messages.Tell(text=f"{text}. Nothing fits without it"))
            if self.record is not None and self.state is State.RUNNING:
                self._out.append(messages.SaveNow(generation=self.record.generation))
            return
        self._planned(text, now, within_s=max(event.seconds, 0.0), leaving=True)

    def _fenced(self, event: messages.Fenced, now: float) -> None:
        node = self.nodes[event.node]
        node.seen = max(node.seen, now)
        node.fenced = max(node.fenced, event.generation)
        if node.running <= event.generation and node.fenced >= self.generation:
            self._changed |= node.stuck_at is not None
            node.running, node.stuck_at = 0, None

    # --- events: workers --------------------------------------------------------------------------

    def _ended(self, event: messages.Ended, now: float) -> None:
        if event.node not in self.members:
            return
        if not self._is_current(event.generation):
            self._look_at_late(event, now)
            return
        self._ends[event.node] = event
        if not event.left:
            self.nodes[event.node].running = 0
            if not event.code:
                self._done.add(event.node)
        if len(self._done) == len(self.members):
            self._become(State.DONE, "all workers have finished successfully", now)
            self._out.append(messages.Finish())
            return
        failed = [end for end in self._ends.values() if end.code]
        if failed:
            self._look_at_failed(failed, event, now)

    def _look_at_failed(
        self, failed: list[messages.Ended], event: messages.Ended, now: float
    ) -> None:
        """Restart because a worker has failed, unless all others are at their end.

        A rank that returned successfully takes part in no further step: nothing is won by starting
        the rest once more. What the others still do is waited for.
        """
        first = min(failed, key=lambda end: end.code != -signal.SIGKILL)
        self._code, what = first.code, _what(first)
        alone = len(failed) == 1 and first.bad == 1
        if not alone or not any(end.well or not end.code for end in self._ends.values()):
            culprit = "" if self._excused(first, now) else first.node
            self._fault(culprit, what, now, ended=first)
        elif any(end.left for end in self._ends.values()) or self._ends.keys() != self.members:
            if event is first:
                self._out.append(
                    messages.Tell(text=f"{what}. Others succeeded: waiting for all to end")
                )
        else:
            self.reason = f"{what}; all other ranks finished successfully"
            self._abort("exit-code", now)

    def _look_at_late(self, event: messages.Ended, now: float) -> None:
        """Take a kill for the cause of what was reported before it."""
        fenced = self.state is State.FENCE and self._accused is not None
        of_last = self.record is not None and event.generation == self.record.generation
        if fenced and of_last and event.code == -signal.SIGKILL:
            self._code, self.reason = event.code, _what(event)
            self._acquit(event.node, now)

    def _excused(self, event: messages.Ended, now: float) -> bool:
        """Return whether a worker may have failed because another node was lost.

        The loss may be reported later than the failure. It explains a worker that exited by itself,
        since its collective failed, and not one that was killed by a signal. It explains one
        failure of a node and no second: a node whose workers always fail would never be left out.
        """
        if self._accused is not None:
            # A whole generation lies between, and no node was lost.
            self._blame(self._accused[1], now)
        faults = self.nodes.recent(event.node, now, self.settings.flap_window_s)
        excused = event.code > 0 and len(self.members) > 1
        excused = excused and (not faults or faults + 1 < self.settings.flaps)
        self._accused = (now, event.node) if excused else None
        return excused

    def _broken_(self, event: messages.Broken, now: float) -> None:
        if self._is_current(event.generation) and event.node in self.members:
            reason = event.reason[:_MOST_REASON] or "a collective failed"
            self._broken = self._broken or (now, event.node, f"{event.node}: {reason}")

    def _loaded_(self, event: messages.Loaded, now: float) -> None:
        if not self._is_current(event.generation) or event.node not in self.members:
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
            self._out.append(
                messages.Tell(text=f"{text} promised, and step {self._found:.0f} found")
            )

    def _progress(self, event: messages.Progress, now: float) -> None:
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

    def _saved(self, event: messages.Saved, now: float) -> None:
        if self.record is None or event.generation != self.record.generation:
            return
        self._tells = True
        self.step = max(self.step, event.step)
        if self.state is State.SUSPECT and not self._settling:
            self._fence(self.reason, now, planned=True)

    # --- events: people and monitors --------------------------------------------------------------

    def _suspected(self, event: messages.Suspected, now: float) -> None:
        for name in event.nodes:
            node, out_s = self.nodes[name], self._out_s(name, now)
            if out_s < self.settings.out_s and not self._does_without(name, now):
                text = f"node {name} is used again, as no other can take its place: {event.reason}"
                self._out.append(messages.Tell(text=text, aloud=True))
                continue
            node.out_until = max(node.out_until, now + out_s)
            node.out_why = event.reason
            self._say_left_out(node, now)
        self._changed = True
        stale = self.record is None or event.generation not in (0, self.record.generation)
        meant = not event.nodes or not self.members.isdisjoint(event.nodes)
        if self.state in _ACTIVE and meant and not stale:
            self._fault("", event.reason, now, event.since_s)
        self._keep_orders(now)

    def _order(self, event: messages.Order, now: float) -> None:
        self._obey(event, now)
        self._keep_orders(now)

    def _obey(self, event: messages.Order, now: float) -> None:
        text = event.reason or f"ordered: {event.kind} {' '.join(event.nodes)}".strip()
        kind = event.kind
        self._changed = True
        if kind is messages.OrderKind.ADD:
            for name in event.nodes:
                node = self.nodes[name]
                node.out_until, node.faults, node.leaving = -math.inf, [], None
                node.outs, node.out_at = 0, -math.inf
            return
        if kind in (messages.OrderKind.EXCLUDE, messages.OrderKind.DRAIN):
            for name in event.nodes:
                node = self.nodes[name]
                node.out_until, node.out_why = math.inf, text
                self._out_before.discard(name)
                self._say_left_out(node, now)
            if self.members.isdisjoint(event.nodes):
                return
        if kind is messages.OrderKind.RESUME:
            self._resume(text, now)
            return
        if kind is messages.OrderKind.PAUSE:
            self._then = State.PARKED
        if kind is messages.OrderKind.STOP:
            self._then = State.ABORTED
            self.reason = text
        self._planned(text, now, leaving=kind is not messages.OrderKind.RESTART)

    def _resume(self, text: str, now: float) -> None:
        if self._then is State.PARKED:
            self._then = State.PLAN
        if self.state is State.PARKED:
            self._become(State.PLAN, text, now)

    # --- time -------------------------------------------------------------------------------------

    def _tick(self, tick: messages.Tick, now: float) -> None:
        """Look for silence, and for what has lasted too long."""
        if tick.away:
            self.nodes.excuse(tick.away, now)
        for node in list(self.nodes):
            if node.name in tick.stopped:
                node.stopped_at = now
            # Nothing is known of how long a node was silent before this controller began.
            silent = now - node.seen
            stopped = now - node.stopped_at < self.settings.silent_s
            if node.up and silent >= (self.settings.lease_s if stopped else self.settings.silent_s):
                self._gone(node, f"no heartbeat from {node.name}", now)
            elif node.idle_since is not None:
                self._look_at_idle(node, now - node.idle_since, now)
            elif not node.up and self._is_past(node, now):
                self.nodes.forget(node.name)
        self._changed = True
        if self._accused is not None and now - self._accused[0] >= _EXCUSED_S:
            self._convict(self._accused[1], now)
        if self.state in _ACTIVE and self._broken is not None:
            self._wait_for_cause(*self._broken, now)
        if self.state is State.FENCE:
            self._hurry(now)
        waiting = _WAITING.get(self.state)
        if waiting is not None:
            waiting(self, now)

    def _is_past(self, node: Node, now: float) -> bool:
        """Return whether a node that is gone means nothing any more: names must not pile up."""
        kept_s = max(_CLEAN * self.settings.out_s, self.settings.lease_s)
        there = node.name in self.members or now - node.seen < kept_s
        return not there and node.out_until <= now

    def _convict(self, node: str, now: float) -> None:
        """Blame a node whose worker failed by itself, since no other one was lost."""
        self._accused = None
        if self._blame(node, now) and node in self.members and self.state in _ACTIVE:
            self._planned(f"{node} is left out", now, leaving=True)

    def _look_at_idle(self, node: Node, waited: float, now: float) -> None:
        running = self.state in _ACTIVE and not self._settling
        if not (running and node.name in self.members) or self._is_over(node.name):
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
        # A stand-in never had a connection that could break: absent nodes are the cause.
        absent = self._settling and any(not self.nodes[name].up for name in self.members)
        if waited < (_MISSED_S if absent else self.settings.broken_s):
            return
        # One that is stopped, and whose worker was killed, reports nothing itself.
        silent = [n for n in sorted(self.members) if now - self.nodes[n].seen >= waited]
        if silent and not absent:
            reason = f"{reason}; no heartbeat from {first_few(silent, 5)}"
        self._fault("", reason, now, waited)
        self._causeless = absent

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
                self._planned(_PAUSED_BEFORE, now, leaving=True)
            return
        if self._then is State.PARKED and not any(n.up for n in self.nodes):
            return  # whose pause this is, only nodes tell
        # A node that fenced may still report its workers' exit codes.
        hopeless = any(n.up and n.fenced < self.generation for n in missing)
        if now - self.since < self.settings.settle_s and not (all_heard and hopeless):
            return
        absent = first_few([n.name for n in missing if not n.up], 5)
        back = first_few([n.name for n in missing if n.up and n.fenced < self.generation], 5)
        text = f"no rank of generation {self.generation} is running"
        if absent:
            text = f"no heartbeat since the controller's restart from {absent}"
        elif back:
            text = f"{back} came back without its workers"
        if any(n.running == self.generation for n in here):
            self._fault("", text, now, known=False)
        else:
            self._gathering = True
            self._then = State.PLAN
            # Members that are not heard prove nothing: others ran, or fenced, before.
            if not any(n.running or n.fenced for n in self.nodes):  # all launchers are new
                self.ladder.submitted()
                for name in self._out_before:
                    self.nodes[name].out_until = -math.inf  # those orders were the last run's
                text = "the job was started again" + (f", without {absent}" if absent else "")
            self._fence(text, now)
            self.level = 1  # the launchers are new already

    def _hurry(self, now: float) -> None:
        """Order the kill of sessions that do not come out; count nodes that do not kill as gone."""
        late = now - self._fenced_at - self.settings.fence_s
        if late < 0:
            return
        waited = [self.nodes[name] for name in self._pending]
        waited = [n for n in waited if n.up and n.fenced < self.generation]
        if self._fence_level() == 0:
            self._hurried = True
            names = tuple(sorted({n.name for n in waited}))
            self._out.append(messages.Fence(nodes=names, generation=self.generation, level=1))
        elif late >= self.settings.fence_s or self.level > 0:
            for node in waited:
                node.stuck_at = node.stuck_at or now

    def _wait_for_fence(self, now: float) -> None:
        while self._pending:
            node = self.nodes[self._pending[-1]]
            if node.up and node.stuck_at is None and node.fenced < self.generation:
                break  # silence ends this wait as well
            self._pending.pop()
        if self._pending or self._awaits_members(now):
            return
        # After the controller's restart a member that trains on may not have reported yet.
        names = self.members | {n.name for n in self.nodes if n.running}
        running = [self.nodes[name] for name in names]
        # One confirmed-dead rank blocks its own generation only; nodes that ran an older one prove
        # nothing about the newest. If no death is sure, only the lease helps, which workers give
        # up by themselves.
        ranks = [n for n in running if n.name in self.members] or running
        if not running or any(n.fenced >= self.generation for n in ranks):
            self._after_fence(now)
            return
        last = max(n.leased() for n in running)
        if self._reseated < last:
            # A node that reaches the log but not this controller keeps its lease until a reseat.
            gone = not any(n.up and n.stuck_at is None for n in running)
            if gone and not self._reseating:
                self._reseating = True
                self._out.append(messages.Reseat(generation=self.generation))
        elif now - self._reseated >= self.settings.lease_s:
            self._after_fence(now)

    def _awaits_members(self, now: float) -> bool:
        """Return whether members may be on their way to a controller that has just begun.

        While it has heard less than half of them, it may itself be what is lost.
        """
        unheard = sum(not self.nodes[name].life for name in self.members)
        few = 2 * unheard > len(self.members)
        return unheard > 0 and now - self._born < (self.settings.settle_s if few else _MISSED_S)

    def _reseated_(self, event: messages.Reseated, now: float) -> None:
        if event.generation == self.generation:
            self._reseating, self._reseated = False, now

    def _wait_for_load(self, now: float) -> None:
        waited = now - self.since
        if not self._tells and waited >= self.settings.steady_s:
            self._steady(now)
        elif waited >= self.settings.resume_s:
            self._fault("", "not all ranks finished loading in time", now, waited)

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
        better = _grown(self.job, self.nodes, self.record, self.members, now, there)
        if better is not None:
            self._planned(f"growing from {self.record.shape} to {better}", now)

    # --- actions: restarts ------------------------------------------------------------------------

    def _planned(
        self, reason: str, now: float, *, within_s: float = math.inf, leaving: bool = False
    ) -> None:
        """Restart by order, after a save of the ranks where they train.

        A node that is `leaving` may have the only copy of its part of a step, in its memory.
        """
        if self.state is State.RUNNING and self.record is not None:
            kept = self._cheapest() == 0 and self._each_step and not leaving
            if kept or not self._tells:
                # Each step is kept already, or the program cannot be asked to save.
                self._fence(reason, now, planned=True)
                return
            self._become(State.SUSPECT, reason, now)
            self._save_until = now + min(self.settings.save_s, within_s)
            self._out.append(messages.SaveNow(generation=self.record.generation))
        elif self.state in _ACTIVE:
            self._fence(reason, now, planned=True)
        elif self.state is not State.FENCE and self._then is not State.PLAN:
            self._after_fence(now)

    def _fault(
        self,
        node: str,
        reason: str,
        now: float,
        detect_s: float = 0.0,
        *,
        known: bool = True,
        ended: messages.Ended | None = None,
    ) -> None:
        """Restart because something failed; `known` as for `Ladder.failed`.

        Parameters
        ----------
        ended
            How a program has ended, if that is what failed.
        """
        mended = bool(node) and self._blame(node, now, known, ended)
        self.ladder.failed(self.step, known=known, mended=mended)
        verdict = self.ladder.verdict(self._cheapest())
        final = ""
        if ended is not None:
            final = self._is_final(ended, mended=mended and self._does_without(node, now))
        self._fence(reason, now, detect_s=detect_s)
        if final:
            self.reason = f"{reason}. {final}"
            self._abort("exit-code", now)
        elif verdict:
            self._abort(verdict, now)

    def _does_without(self, node: str, now: float) -> bool:
        """Whether nodes that are not left out are enough: else one that was is used again."""
        slots = self.nodes.slots(now, self.record)
        try:
            choose(self.job, [slot for slot in slots if slot.node != node])
        except RefusedError:
            return False
        return True

    def _is_final(self, ended: messages.Ended, *, mended: bool) -> str:
        """Return why a program is not started again; empty if it is.

        Parameters
        ----------
        mended
            Whether others go on without its node: if that was the cause, they do not end so.
        """
        if ended.code in self._final:
            return "This code is one of --no-restart-on"
        # Python's code of any error says nothing without the place; a signal is not the program's.
        says = ended.program and (ended.place or ended.code > 1)
        if not says or not self._final.repeat:
            return ""
        if ended.stepped or self.state is State.RUNNING:
            self._early.clear()
            return ""
        key = (ended.code, ended.place)
        again = key in self._early
        nodes = self._early.setdefault(key, set())
        nodes.add(ended.node)
        if again and (not mended or len(nodes) > 1):
            return "The program ends with this code at the same place, before its first step"
        return ""

    def _blame(
        self, node: str, now: float, known: bool = True, ended: messages.Ended | None = None
    ) -> bool:
        """Count a fault of a node; return whether it is left out because of it.

        One that no other replaces is left out only where the job would be given up with it.
        """
        s, out_s = self.settings, self._out_s(node, now)
        spared = out_s < s.out_s and not self._hopeless(node, now, known, ended)
        most = sys.maxsize if spared else s.flaps
        out = self.nodes.blame(node, now, window_s=s.flap_window_s, most=most, out_s=out_s)
        if out:
            within = f"{s.flap_window_s / 60:g} min"
            self.nodes[node].out_why = f"it failed {s.flaps} times within {within}"
            self._say_left_out(self.nodes[node], now)
        return out

    def _hopeless(self, node: str, now: float, known: bool, ended: messages.Ended | None) -> bool:
        """Return whether the job is given up after this fault, and the others can go on."""
        ladder = replace(self.ladder)
        ladder.failed(self.step, known=known)
        given_up = ladder.verdict(self._cheapest()) == "no-progress"
        # Where its program alone ends so again, `_is_final` would end the job.
        if ended is not None:
            given_up |= self._early.get((ended.code, ended.place)) == {ended.node}
        return given_up and self._does_without(node, now)

    def _out_s(self, name: str, now: float) -> float:
        """Return for how long a node is left out: one that none replaces, for a short time."""
        others = sum(n.slots for n in self.nodes if n.name != name and n.usable(now))
        return self.settings.out_s / (1 if others >= self.job.planned.world else _SHORTER)

    def _say_left_out(self, node: Node, now: float, nodes: tuple[str, ...] = ()) -> None:
        """Say that a node is left out, until when and why, and what ends that."""
        until = "until it is taken back"
        if node.out_until < math.inf:
            ends = time.strftime("%H:%M", time.gmtime(self._epoch + node.out_until))
            until = f"for {(node.out_until - now) / 60:.0f} min, until {ends} UTC"
        why = node.out_why or "as a controller before this one decided"
        self._out.append(
            messages.Tell(
                text=f"node {node.name} is left out {until}: {why}",
                aloud=True,
                nodes=nodes,
                command=f"ckptd ctl add {node.name}",
            )
        )

    def _cheapest(self) -> int:
        """Return 0 if all survivors can go on as they are, 1 if workers must be started."""
        if self._then is not State.PLAN:
            return 1  # a parked or stopped job gives its devices back
        here = [node for node in map(self.nodes.__getitem__, self.members) if node.up]
        return 0 if here and all(node.sessions for node in here) else 1

    def _fence(
        self, reason: str, now: float, *, planned: bool = False, detect_s: float = 0.0
    ) -> None:
        self.generation += 1
        self._settling, self._broken, self._planned_restart = False, None, planned
        self._causeless = False
        self.level = self.ladder.level(self._cheapest(), self.step)
        self._fenced_at, self._hurried = now, False
        self._reseating, self._reseated = False, -math.inf
        waited = self.members | {n.name for n in self.nodes if n.running}
        self._pending = sorted(waited, reverse=True)
        self._become(State.FENCE, reason, now, detect_s=detect_s)
        self._out.append(
            messages.Fence(
                nodes=self.nodes.up(), generation=self.generation, level=self._fence_level()
            )
        )

    def _fence_level(self) -> int:
        return 0 if self.level == 0 and self._then is State.PLAN and not self._hurried else 1

    def _after_fence(self, now: float) -> None:
        if self._then is State.ABORTED:
            self._abort("stopped", now)
        elif self._then is State.PARKED:
            self._become(State.PARKED, self.reason, now)
        elif self.level >= DEEPEST:
            self._abort("requeue", now)
        else:
            self._become(State.PLAN, self.reason, now)
            self._relaunch(now)

    def _relaunch(self, now: float) -> None:
        """Restart launchers: those that are gone, and at level 2 all."""
        if self.settings.levels < RELAUNCH:
            return
        known = [self.nodes[name] for name in sorted(self.members)]
        wanted = [n for n in known if not n.up and n.asked != n.life]
        if self.level == RELAUNCH:
            wanted = known
            self._relaunch_until = now + self.settings.relaunch_s
            for node in wanted:
                node.dismissed, node.up, node.running = node.life, False, 0
        for node in wanted:
            node.asked = node.life
        if wanted:
            self._out.append(messages.Relaunch(nodes=tuple(n.name for n in wanted), level=RELAUNCH))

    # --- actions: plans ---------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        self._changed = False
        if self._awaits_launchers(now):
            return
        waited = now - self.since
        patience = self.settings.gather_s if self._gathering else self.settings.patience_s
        if self._gathering and self._coming(now):
            patience += _READY_S
        whole = self.job.planned.world
        few = self.nodes.usable_slots(now) < whole and waited < patience
        choice = None if few else self._choice(now)
        if choice is not None and (choice.shape.world >= whole or waited >= patience):
            self._begin(choice, now)
        elif waited >= max(self.settings.nodes_s, patience):
            self._abort("no-nodes", now)

    def _awaits_launchers(self, now: float) -> bool:
        if now >= self._relaunch_until:
            for node in self.nodes:
                node.dismissed = None  # what is there will have to do
            return False
        if self.nodes.usable_slots(now) >= self.job.planned.world:
            return False  # another node came
        return self._coming(now) or any(n.dismissed is not None and not n.up for n in self.nodes)

    def _coming(self, now: float) -> bool:
        """Whether a node is there that cannot start workers yet, but soon."""
        return any(n.usable(now) and n.slots == 0 for n in self.nodes)

    def _begin(self, choice: Choice, now: float) -> None:
        # Of those that a stand-in never heard no connection broke. Which are lost shows only now:
        # others may have come since the restart began.
        if absent := [name for name in sorted(self.members) if not self.nodes[name].up]:
            text = f"no heartbeat from {first_few(absent, 5)}"
            if self._causeless:
                self.reason = f"{self.reason}; {text}"
            self._acquit(absent[0], now, "" if self._causeless else text)
        self.generation += 1
        self.record = Record(
            generation=self.generation,
            shape=choice.shape,
            members=members_of(choice.places),
            step=self.step,
            reason=self.reason[:2000],
            at=self._epoch + now,
            by=self._by,
            level=self.level,
            failures=self.ladder.failures,
            fruitless=self.ladder.in_vain(self.step),
            out=self._ordered_out(),
            resting=self._resting(now),
            chosen_at=self._epoch + now,
            why=choice.why,
            candidates=choice.candidates,
        )
        self.members = self.record.nodes
        self._done, self._loaded, self._each_step = set(), set(), False
        self._ends = {}
        self._found = math.inf
        self._gathering, self._relaunch_until = False, -math.inf
        for name in sorted(self.members):
            self.nodes[name].running = self.generation
            self.nodes[name].idle_since = None
        self._out += [
            messages.Append(record=self.record),
            messages.Start(record=self.record, level=self.level),
        ]
        said = (choice.why[0], together(choice.candidates[0]))
        self._out += [messages.Tell(text=line) for line in said if line]
        self._become(State.RESHARD, self.reason, now)

    def _ordered_out(self) -> tuple[str, ...]:
        return tuple(sorted(n.name for n in self.nodes if n.out_until == math.inf))

    def _resting(self, now: float) -> tuple[tuple[str, float], ...]:
        left_out = [n for n in self.nodes if now < n.out_until < math.inf]
        # Whole seconds: a clock that was read again is no new wish.
        return tuple(sorted((n.name, float(round(self._epoch + n.out_until))) for n in left_out))

    def _keep_orders(self, now: float) -> None:
        """Write the record again if it lacks what is wanted: all that a follower knows of it."""
        if self.record is None or self.state in (State.DONE, State.ABORTED):
            return
        out, resting = self._ordered_out(), self._resting(now)
        parked = State.PARKED in (self.state, self._then)
        wanted = (out, resting, parked)
        if wanted != (self.record.out, self.record.resting, self.record.parked):
            self.record = msgspec.structs.replace(
                self.record,
                out=out,
                resting=resting,
                parked=parked,
                at=self._epoch + now,
                by=self._by,
            )
            self._out.append(messages.Append(record=self.record))

    def _choice(self, now: float) -> Choice | None:
        current = self.record.shape if self.record else None
        # A node that was left out a while ago comes back as the last of the spares; and one
        # that is often at fault is better than none.
        for clean_s, all_up in ((_CLEAN * self.settings.out_s, False), (0.0, False), (0.0, True)):
            slots = self.nodes.slots(now, self.record, all_up=all_up, clean_s=clean_s)
            try:
                choice = choose(self.job, slots, current)
            except RefusedError as error:
                self._refused = f"there were {error.found}; wanted were {error.wanted}"
                continue
            if clean_s == 0.0 or choice.shape.world >= self.job.planned.world:
                return choice
        return None

    # --- actions: the end -------------------------------------------------------------------------

    def _abort(self, kind: str, now: float) -> None:
        last = f"last: {self.reason}"
        fruitless = f"{self.ladder.fruitless} generations in a row have committed no step; {last}"
        texts = {
            "stopped": f"stopped: {self.reason}",
            "exit-code": f"{self.reason}: the job is not restarted",
            "no-nodes": f"no layout fits the nodes that are left; {self._refused}; {last}. "
            "Bring nodes back and start the job again: it resumes from its log",
            "no-progress": f"{fruitless}. Fix the cause and start the job again",
            "max-restarts": f"faults: {self.ladder.failures}, restarts allowed: "
            f"{self.settings.max_restarts}; {last}",
            "requeue": f"{fruitless}. Submit the job again",
        }
        # Of a save that has just ended the controller may know nothing yet.
        known = f"Step {self.step} or a later one is" if self.step else "No step is known to be"
        text = f"{texts[kind]}. {known} committed."
        self._become(State.ABORTED, text, now)
        self._out.append(messages.Abort(kind=kind, text=text, code=self._code))

    # --- small things -----------------------------------------------------------------------------

    def _become(
        self,
        state: State,
        reason: str,
        now: float,
        *,
        keep_since: bool = False,
        detect_s: float = 0.0,
    ) -> None:
        quiet = self.state in (State.RESHARD, State.RESUME) and not self._tells
        self._moves.append(
            Move(
                at=now,
                before=self.state,
                state=state,
                generation=self.generation,
                level=self.level,
                step=self.step,
                reason=reason,
                planned=self._planned_restart,
                detect_s=detect_s,
                quiet_s=now - self.since if quiet and state in _UP else 0.0,
            )
        )
        self.state, self.reason = state, reason
        self.since = self.since if keep_since else now
        if state is State.PLAN:
            self._then, self._changed = State.PLAN, True

    def _is_over(self, node: str) -> bool:
        """Whether a member has told how all its workers of this generation ended."""
        told = self._ends.get(node)
        return told is not None and told.left == 0

    def _is_current(self, generation: int) -> bool:
        return (
            self.state in _ACTIVE
            and self.record is not None
            and generation == self.record.generation == self.generation
        )


def _what(end: messages.Ended) -> str:
    """Return in words how a worker has ended."""
    text = f": {end.text}" if end.text else ""
    return f"a worker on {end.node} ended with {end.code}{text}"


def _grown(
    job: JobSpec, nodes: Roster, record: Record, members: frozenset[str], now: float, there_s: float
) -> Shape | None:
    """Return the shape on which a step is shorter once newcomers take part; None if there is none.

    Parameters
    ----------
    record, members
        The generation that runs, and its nodes.
    now
        The moment: nodes that are left out at it do not count.
    there_s
        How long a newcomer must have been there.
    """
    if record.shape == job.planned:
        return None
    new = {n.name for n in nodes if n.name not in members and now - n.came >= there_s}
    if not any(nodes[name].usable(now) for name in new):
        return None
    slots = [s for s in nodes.slots(now, record) if s.node in members or s.node in new]
    try:
        better = choose(job, slots, record.shape).shape
    except RefusedError:
        return None
    return better if job.step_cost(better) < job.step_cost(record.shape) else None


_HANDLERS: dict[type[messages.JobEvent], Callable[[Any, Any, float], None]] = {
    messages.NodeUp: StateMachine._node_up,
    messages.Left: StateMachine._left,
    messages.NodeLost: StateMachine._lost,
    messages.Notice: StateMachine._notice,
    messages.Ended: StateMachine._ended,
    messages.Broken: StateMachine._broken_,
    messages.Fenced: StateMachine._fenced,
    messages.Loaded: StateMachine._loaded_,
    messages.Progress: StateMachine._progress,
    messages.Saved: StateMachine._saved,
    messages.Suspected: StateMachine._suspected,
    messages.Order: StateMachine._order,
    messages.Reseated: StateMachine._reseated_,
    messages.Tick: StateMachine._tick,
}

_WAITING: dict[State, Callable[[StateMachine, float], None]] = {
    State.SUSPECT: StateMachine._suspect,
    State.RESHARD: StateMachine._wait_for_load,
    State.RESUME: StateMachine._wait_for_step,
    State.RUNNING: StateMachine._run,
}
