"""Where the time of each recovery went: pure, from changes of state and marks of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ckptd.elastic.states import Move, State

__all__ = ["MARKS", "Recovery", "Splitter"]

MARKS = ("spawned", "imported", "initialised", "loaded", "stepped")
"""What workers tell of, in its order; seconds from the arrival of the order to start."""
_KEPT = 100


class Recovery(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"before": "from", "after": "to", "import_": "import"},
):
    """One restart, from the last sign that all was well to the next committed step; seconds.

    The parts add up to `total`. A part that nobody told of is 0, and its time is in the next one.

    Attributes
    ----------
    at
        Seconds since 1970 at which it was over.
    cause
        Why, in a few words.
    planned
        Whether somebody wanted it; of a planned one, the time of the save before it is not counted:
        ranks train meanwhile.
    before, after
        The generations; in other encodings ``from`` and ``to``.
    level
        How deep it went.
    detect, fence, plan
        Until the controller knew; until nobody of the old generation ran; until there was a layout.
    spawn, import_, init, load, first_step
        Until the slowest rank had its process, its imports, its process group, its state, and until
        a step was committed.
    again
        Attempts that failed on the way.
    parked
        Time for which the job was paused meanwhile.
    total
        All of it.
    steps_lost
        Steps that were made again; null if nobody told which were made.
    """

    at: float
    cause: str
    planned: bool
    before: int
    after: int
    level: int
    detect: float
    fence: float
    plan: float
    spawn: float
    import_: float
    init: float
    load: float
    first_step: float
    again: float
    parked: float
    total: float
    steps_lost: int | None


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
            way.ended = move.at
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
