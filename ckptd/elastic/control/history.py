"""History for people: recoveries and their parts, goodput, mean time to recover and between faults.

In it: how many recoveries and notes are kept; over how many faults means are taken; the log file of
changes of state.

`Goodput` and `Splitter` are pure: made of changes of state, committed steps and marks of workers.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ckptd.elastic.control.states import Move, State
from ckptd.elastic.messages import Recovery, Timed

MARKS = ("spawned", "imported", "initialised", "loaded", "stepped")
"""Marks that workers report, in order; each with seconds since the order to start arrived."""
_KEPT = 100
_MOST_NOTES = 20
_MOST_MEASURED = 20
_REFUSED_S = 10.0


class Kind(enum.StrEnum):
    """Kind of time in a job's life.

    USEFUL
        Steps that are committed.
    TRAINING
        Steps since the last commit: useful or lost, as it turns out. The only kind that shrinks.
    SAVING
        Calls that held the loop to save.
    LOST
        Steps that have to be made again, and the time in which nothing moved unnoticed.
    RESTARTING
        From the moment at which a fault was known, or a planned restart began, to the first step.
    WAITING
        For nodes.
    PARKED
        Paused by order.
    """

    USEFUL = "useful"
    TRAINING = "training"
    SAVING = "saving"
    LOST = "lost"
    RESTARTING = "restarting"
    WAITING = "waiting"
    PARKED = "parked"


_KINDS = {
    State.RUNNING: Kind.TRAINING,
    State.SUSPECT: Kind.TRAINING,
    State.FENCE: Kind.RESTARTING,
    State.PLAN: Kind.WAITING,
    State.RESHARD: Kind.RESTARTING,
    State.RESUME: Kind.RESTARTING,
    State.PARKED: Kind.PARKED,
}


class Goodput:
    """Adds up the seconds of a job by `Kind`; each second is in one kind.

    Parameters
    ----------
    now
        The moment at which the job, or its controller, began.
    state
        Its state then.
    """

    def __init__(self, now: float = 0.0, state: State = State.PLAN) -> None:
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._state, self._since = state, now
        self._tells = False
        self._saved = 0.0

    def moved(self, move: Move) -> None:
        """Take a change of state."""
        self._spend(move.at)
        quiet = min(max(move.quiet_s, 0.0), self._seconds[Kind.RESTARTING])
        self._seconds[Kind.RESTARTING] -= quiet
        self._seconds[Kind.TRAINING] += quiet
        if move.state is State.FENCE and move.before in (State.RUNNING, State.SUSPECT):
            self._close(Kind.LOST if self._tells else Kind.USEFUL)
        elif move.state is State.DONE:
            self._close(Kind.USEFUL)
        elif move.state is State.ABORTED:
            self._close(Kind.LOST if self._tells else Kind.USEFUL)
        self._state = move.state

    def committed(self, now: float) -> None:
        """Take notice that a step is committed: what was done up to this moment is useful."""
        self._spend(now)
        self._tells = True
        self._close(Kind.USEFUL)

    def saving(self, seconds: float) -> None:
        """Take notice that a save has held the loop for so long since the last commit."""
        self._saved += max(seconds, 0.0)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each kind up to this moment."""
        self._spend(now)
        return {str(kind): spent for kind, spent in self._seconds.items()}

    def _spend(self, now: float) -> None:
        # A change is reported after it was: a look at the seconds may have come in between.
        now = max(now, self._since)
        kind = _KINDS.get(self._state)
        if kind is not None:
            self._seconds[kind] += now - self._since
        self._since = now

    def _close(self, kind: Kind) -> None:
        """Decide about the time since the last commit."""
        spent = self._seconds[Kind.TRAINING]
        saved = min(self._saved, spent)
        self._seconds[Kind.SAVING] += saved
        self._seconds[kind] += spent - saved
        self._seconds[Kind.TRAINING] = self._saved = 0.0


@dataclass
class _Way:
    """A recovery under way, or just over."""

    cause: str
    planned: bool
    before: int
    began: float
    detect: float
    made: int | None
    fence: float = 0.0
    plan: float = 0.0
    parked: float = 0.0
    again: float = 0.0
    started: float = 0.0
    """When the newest generation was begun."""
    loaded: float = 0.0
    ended: float = 0.0
    after: int = 0
    level: int = 0
    step: int = 0


class Splitter:
    """Makes recoveries out of what a controller sees.

    Parameters
    ----------
    epoch
        Seconds since 1970 at which the moments were 0.
    """

    def __init__(self, epoch: float = 0.0) -> None:
        self._epoch = epoch
        self._state = State.PLAN
        self._since = 0.0
        self._generation = 0
        """That trained last."""
        self._way: _Way | None = None
        self._marks: dict[int, dict[str, float]] = {}
        self._made: int | None = None
        self._done: deque[tuple[_Way, Recovery]] = deque(maxlen=_KEPT)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """The last 100, the oldest first; the last one may still get finer."""
        return tuple(recovery for _, recovery in self._done)

    def moved(self, move: Move) -> None:
        """Take a change of state."""
        way = self._way
        if way is not None:
            self._account(way, move)
        if move.state is State.FENCE:
            self._fenced(move)
        elif move.state is State.RESHARD and way is not None:
            way.started = way.loaded = move.at
            way.after, way.level, way.step = move.generation, move.level, move.step
            if way.cause in move.reason:  # who was lost is known by now
                way.cause = move.reason
        elif move.state is State.RESUME and way is not None:
            way.loaded = move.at
        elif move.state is State.RUNNING:
            self._running(move)
        elif move.state in (State.DONE, State.ABORTED):
            self._way = None
        self._state, self._since = move.state, move.at

    def marked(self, generation: int, marks: Mapping[str, float]) -> None:
        """Take marks of one node: the slowest node counts. Unknown marks are not looked at."""
        known = self._marks.setdefault(generation, {})
        for name in MARKS:
            if name in marks:
                known[name] = max(known.get(name, 0.0), marks[name])
        while len(self._marks) > _KEPT:
            del self._marks[min(self._marks)]
        if self._done and self._done[-1][0].after == generation:
            way = self._done.pop()[0]
            self._done.append((way, self._recovery(way)))

    def started_s(self, generation: int) -> float:
        """Return the seconds until the last mark that the ranks of a generation have told of."""
        return max(self._marks.get(generation, {}).values(), default=0.0)

    def made(self, step: int) -> None:
        """Take the number of a step that ranks have made, committed or not."""
        self._made = step if self._made is None else max(self._made, step)

    def _account(self, way: _Way, move: Move) -> None:
        """Put the time of the state that ends into its part."""
        spent = move.at - self._since
        if self._state is State.FENCE:
            way.fence += spent
        elif self._state is State.PLAN:
            way.plan += spent
        elif self._state is State.PARKED:
            way.parked += spent

    def _fenced(self, move: Move) -> None:
        way = self._way
        if way is None:
            self._way = _Way(
                cause=move.reason,
                planned=move.planned,
                before=self._generation,
                began=move.at - move.detect_s,
                detect=move.detect_s,
                made=self._made,
            )
        elif self._state in (State.RESHARD, State.RESUME, State.SUSPECT):
            way.again += move.at - way.started
            way.planned = way.planned and move.planned

    def _running(self, move: Move) -> None:
        self._generation = move.generation
        way, self._way = self._way, None
        if way is not None and way.after:
            # Of a program that tells of no step, from when its ranks could make one.
            way.ended = move.at - max(move.quiet_s - self.started_s(move.generation), 0.0)
            self._done.append((way, self._recovery(way)))
        self._made = None

    def _recovery(self, way: _Way) -> Recovery:
        parts = self._parts(way)
        lost = None if way.made is None else max(way.made - way.step, 0)
        return Recovery(
            at=self._epoch + way.ended,
            cause=way.cause,
            planned=way.planned,
            before=way.before,
            after=way.after,
            level=way.level,
            detect=way.detect,
            fence=way.fence,
            plan=way.plan,
            spawn=parts[0],
            import_=parts[1],
            init=parts[2],
            load=parts[3],
            first_step=way.ended - way.started - sum(parts),
            again=way.again,
            parked=way.parked,
            total=way.ended - way.began,
            steps_lost=lost,
        )

    def _parts(self, way: _Way) -> list[float]:
        """Return the time before each mark since the one before it, of the start that succeeded."""
        marks = dict(self._marks.get(way.after, {}))
        whole = way.ended - way.started
        if "loaded" not in marks and way.loaded > way.started:
            marks["loaded"] = way.loaded - way.started
        parts, until = [], 0.0
        for name in MARKS[:-1]:
            at = min(max(marks.get(name, until), until), whole)
            parts.append(at - until)
            until = at
        return parts


class RecoveryHistory:
    """Follows a state machine.

    Parameters
    ----------
    events
        File to which each change of state is appended as a line of JSON; None for none. A line is
        written at once and not made durable; once one cannot be written, or the file not opened,
        none is any more, which is said.
    say
        Is given each sentence for people.
    """

    def __init__(
        self,
        events: Path | None = None,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._epoch = time.time() - time.monotonic()
        self._say = say
        self._file: BinaryIO | None = None
        self._notes: deque[str] = deque(maxlen=_MOST_NOTES)
        self._splitter = Splitter(self._epoch)
        self._goodput = Goodput(time.monotonic())
        self._faults = 0
        self._refused_at = -math.inf
        self._first: float | None = None
        self.changes = 0
        """Rises with everything that is kept."""
        if events is not None:
            self._open(events)

    @property
    def told(self) -> tuple[str, ...]:
        """The last sentences for people, the oldest first."""
        return tuple(self._notes)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """The last recoveries, the oldest first."""
        return self._splitter.recoveries

    @property
    def mttr_s(self) -> float:
        """How long the last recoveries from faults took, on average; 0 before the first."""
        faults = [one.total for one in self._splitter.recoveries if not one.planned]
        last = faults[-_MOST_MEASURED:]
        return sum(last) / len(last) if last else 0.0

    def goodput(self, now: float) -> dict[str, float]:
        """Return the seconds of each kind up to `now`."""
        return self._goodput.seconds(now)

    def mtbf_s(self, now: float) -> float:
        """Return the seconds between two faults so far, on average; 0 before the first."""
        if not self._faults or self._first is None:
            return 0.0
        return max(now - self._first, 0.0) / self._faults

    def tell(self, text: str) -> None:
        """Keep a sentence for people."""
        self.changes += 1
        self._notes.append(text)
        self._write({"event": "told", "at": time.time(), "text": text})
        if self._say is not None:
            self._say(text)

    def refused(self, text: str) -> None:
        """Keep that a connection was refused; of many in a row, only the first."""
        # Any process that reaches the port can do this without end, and must not fill the disk.
        if time.monotonic() - self._refused_at > _REFUSED_S:
            self._write({"event": "refused", "at": time.time(), "text": text})
            self.tell(f"a connection was refused: {text}")
        self._refused_at = time.monotonic()

    def timed(self, timed: Timed) -> None:
        """Keep how far a node's workers were."""
        self.changes += 1
        self._splitter.marked(timed.generation, timed.marks)
        row = {"generation": timed.generation, "node": timed.node, "marks": timed.marks}
        self._write({"event": "timed", "at": time.time(), **row})

    def committed(self, step: int, now: float) -> None:
        """Keep that a step is committed."""
        self.changes += 1
        self._splitter.made(step)
        self._goodput.committed(now)

    def moved(self, moves: Iterable[Move]) -> None:
        """Keep changes of state."""
        for move in moves:
            self.changes += 1
            row = msgspec.to_builtins(move)
            self._write({"event": "moved", **row, "at": self._epoch + move.at})
            self._count(move)

    def _count(self, move: Move) -> None:
        self._splitter.moved(move)
        # Without a Checkpointer the first step is not told: from when its ranks could make one.
        started = self._splitter.started_s(move.generation)
        self._goodput.moved(msgspec.structs.replace(move, quiet_s=move.quiet_s - started))
        if self._first is None and move.state is State.RUNNING:
            self._first = move.at
        if move.state is State.FENCE and not move.planned:
            self._faults += self._first is not None
        if move.state is State.RUNNING and self._splitter.recoveries:
            last = self._splitter.recoveries[-1]
            if last.after == move.generation:
                self._recovered(last)

    def _recovered(self, recovery: Recovery) -> None:
        self._write({"event": "recovered", **msgspec.to_builtins(recovery)})

    def _open(self, events: Path) -> None:
        try:
            self._file = events.open("ab", buffering=0)
        except OSError as error:
            # A job must not be without a controller for lack of a file that people read.
            self.tell(f"no events are kept in {events}: {error.strerror or error}")

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            # A full disk must not end the controller.
            self.close()
            self.tell(f"no more events are kept: {error.strerror or error}")

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
