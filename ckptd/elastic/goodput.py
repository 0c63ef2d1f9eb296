"""What the time of a job went into: pure, from changes of state and committed steps."""

from __future__ import annotations

import enum

from ckptd.elastic.states import Move, State

__all__ = ["Goodput", "Kind"]


class Kind(enum.StrEnum):
    """What time goes into.

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
        # A change is told after it was: a look at the seconds may have come in between.
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
