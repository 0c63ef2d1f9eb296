"""What a controller does when it has to: fence, plan, start, give up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ckptd.elastic.ladder import DEEPEST, RELAUNCH, Ladder
from ckptd.elastic.membership import Record, check_log, members_of
from ckptd.elastic.messages import (
    Abort,
    Action,
    Append,
    Ended,
    Fence,
    Relaunch,
    Save,
    Start,
    Tell,
)
from ckptd.elastic.policy import Choice, Job, choose
from ckptd.elastic.roster import MOST_DOUBLED, Node, Roster
from ckptd.elastic.states import ControllerSettings, ExitCodes, Move, State
from ckptd.errors import RefusedError

__all__ = ["ACTIVE", "CLEAN", "PAUSED_BEFORE", "Decisions"]

_READY_S = 60.0
"""By so much longer the first start waits for nodes that are there and not ready yet."""
CLEAN = 24
"""Times `ControllerSettings.out_s` after which a node that was left out is like any other."""
PAUSED_BEFORE = "paused before the controller was restarted"
ACTIVE = (State.RUNNING, State.SUSPECT, State.RESHARD, State.RESUME)


class Decisions:
    """The half of a `StateMachine` that changes its state; see there."""

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
        """What follows the fence."""
        self._save_until = self._relaunch_until = -math.inf
        self._fenced_at = self._loaded_at = now
        self._looked = now
        """When newcomers were looked at."""
        self._hurried = False
        """Whether those that did not come out are being killed."""
        self._code = 0
        self._final = ExitCodes(self.settings.no_restart_on)
        self._ends: dict[str, Ended] = {}
        """What each member has told of its workers' ends in this generation."""
        self._early: dict[tuple[int, str], set[str]] = {}
        """Nodes whose program has ended before its first step, by code and place, since a step."""
        self._refused = ""
        self._changed = True
        """Whether a plan that was refused may succeed now: looking costs time."""
        self._broken: tuple[float, str, str] | None = None
        """When a collective failed, on which node, and what is known of it."""
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
        self._out: list[Action] = []
        self._moves: list[Move] = []

    # --- restarts ---------------------------------------------------------------------------------

    def _planned(
        self, reason: str, now: float, *, within_s: float = math.inf, leaving: bool = False
    ) -> None:
        """Restart because somebody wants it, but let the ranks save first where they train.

        Who is `leaving` may hold the only copy of its part of a step in its memory.
        """
        if self.state is State.RUNNING and self.record is not None:
            kept = self._cheapest() == 0 and self._each_step and not leaving
            if kept or not self._tells:
                # Each step is kept already, or the program cannot be asked to save.
                self._fence(reason, now, planned=True)
                return
            self._become(State.SUSPECT, reason, now)
            self._save_until = now + min(self.settings.save_s, within_s)
            self._out.append(Save(generation=self.record.generation))
        elif self.state in ACTIVE:
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
        ended: Ended | None = None,
    ) -> None:
        """Restart because something failed; `known` as for `Ladder.failed`.

        Parameters
        ----------
        ended
            How a program has ended, if that is what failed.
        """
        mended = bool(node) and self._blame(node, now)
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

    def _is_final(self, ended: Ended, *, mended: bool) -> str:
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

    def _blame(self, node: str, now: float) -> bool:
        """Count a fault of a node; return whether it is left out because of it."""
        s = self.settings
        out = self.nodes.blame(node, now, window_s=s.flap_window_s, most=s.flaps, out_s=s.out_s)
        if out:
            self._out.append(Tell(text=f"{node} was at fault {s.flaps} times: it is left out"))
        return out

    def _cheapest(self) -> int:
        """Return 0 if all survivors can go on as they are, 1 if workers must be started."""
        if self._then is not State.PLAN:
            return 1  # who is parked or stopped gives its devices back
        here = [node for node in map(self.nodes.__getitem__, self.members) if node.up]
        return 0 if here and all(node.sessions for node in here) else 1

    def _fence(
        self, reason: str, now: float, *, planned: bool = False, detect_s: float = 0.0
    ) -> None:
        self.generation += 1
        self._settling, self._broken, self._planned_restart = False, None, planned
        self.level = self.ladder.level(self._cheapest(), self.step)
        self._fenced_at, self._hurried = now, False
        self._reseating, self._reseated = False, -math.inf
        waited = self.members | {n.name for n in self.nodes if n.running}
        self._pending = sorted(waited, reverse=True)
        self._become(State.FENCE, reason, now, detect_s=detect_s)
        self._out.append(
            Fence(nodes=self.nodes.up(), generation=self.generation, level=self._fence_level())
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
        """Have launchers started anew: those that are gone, and at level 2 all."""
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
            self._out.append(Relaunch(nodes=tuple(n.name for n in wanted), level=RELAUNCH))

    # --- plans ------------------------------------------------------------------------------------

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
            return False  # somebody else came
        return self._coming(now) or any(n.dismissed is not None and not n.up for n in self.nodes)

    def _coming(self, now: float) -> bool:
        """Whether a node is there that cannot start workers yet, but soon."""
        return any(n.usable(now) and n.slots == 0 for n in self.nodes)

    def _begin(self, choice: Choice, now: float) -> None:
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
        )
        self.members = self.record.nodes
        self._done, self._loaded, self._each_step = set(), set(), False
        self._ends = {}
        self._found = math.inf
        self._gathering, self._relaunch_until = False, -math.inf
        for name in sorted(self.members):
            self.nodes[name].running = self.generation
            self.nodes[name].idle_since = None
        self._out += [Append(record=self.record), Start(record=self.record, level=self.level)]
        self._out += [Tell(text=line) for line in choice.why[:1]]
        self._become(State.RESHARD, self.reason, now)

    def _ordered_out(self) -> tuple[str, ...]:
        return tuple(sorted(n.name for n in self.nodes if n.out_until == math.inf))

    def _resting(self, now: float) -> tuple[tuple[str, float], ...]:
        left_out = [n for n in self.nodes if now < n.out_until < math.inf]
        # Whole seconds: a clock that was read anew is no new wish.
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
            self._out.append(Append(record=self.record))

    def _choice(self, now: float) -> Choice | None:
        current = self.record.shape if self.record else None
        # Who was left out a while ago comes back as the last of the spares; and a node that is
        # often at fault is better than none.
        for clean_s, all_up in ((CLEAN * self.settings.out_s, False), (0.0, False), (0.0, True)):
            slots = self.nodes.slots(now, self.record, all_up=all_up, clean_s=clean_s)
            try:
                choice = choose(self.job, slots, current)
            except RefusedError as error:
                self._refused = f"there were {error.found}; wanted were {error.wanted}"
                continue
            if clean_s == 0.0 or choice.shape.world >= self.job.planned.world:
                return choice
        return None

    # --- the end ----------------------------------------------------------------------------------

    def _abort(self, kind: str, now: float) -> None:
        last = f"last: {self.reason}"
        fruitless = f"{self.ladder.fruitless} generations in a row have committed no step; {last}"
        texts = {
            "stopped": f"stopped: {self.reason}",
            "exit-code": f"{self.reason}: it is not started again",
            "no-nodes": f"no layout fits the nodes that are left; {self._refused}; {last}. Bring "
            "nodes back and start the job again: it goes on from its log",
            "no-progress": f"{fruitless}. Mend the cause and start the job again",
            "max-restarts": f"{self.ladder.failures} faults, and {self.settings.max_restarts} "
            f"restarts are allowed; {last}",
            "requeue": f"{fruitless}. The job is to be submitted again",
        }
        text = f"{texts[kind]}. The last committed step is {self.step}."
        self._become(State.ABORTED, text, now)
        self._out.append(Abort(kind=kind, text=text, code=self._code))

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
            )
        )
        self.state, self.reason = state, reason
        self.since = self.since if keep_since else now
        if state is State.PLAN:
            self._then, self._changed = State.PLAN, True

    def _is_member(self, node: str) -> bool:
        return node in self.members

    def _is_over(self, node: str) -> bool:
        """Whether a member has told how all its workers of this generation ended."""
        told = self._ends.get(node)
        return told is not None and told.left == 0

    def _is_current(self, generation: int) -> bool:
        return (
            self.state in ACTIVE
            and self.record is not None
            and generation == self.record.generation == self.generation
        )

    def _silence(self, node: Node, now: float) -> float:
        """Return for how long nothing is known of a node, in seconds."""
        return now - max(node.seen, self._born)
