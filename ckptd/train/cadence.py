"""Deciding whether a save is due, alike on every rank."""

from __future__ import annotations

import logging
import numbers
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from ckptd.elastic.worker import WorkerLink
from ckptd.engine.auto import (
    Auto,
    Choice,
    Cost,
    Mtbf,
    beyond_near,
    choose,
    duration,
    typical,
)
from ckptd.engine.handle import SaveHandle
from ckptd.engine.lives import lives_of, mtbf_s
from ckptd.engine.policy import Every, plain_int
from ckptd.errors import CkptdError, UsageError
from ckptd.format.records import Generation
from ckptd.train.agree import Agreement
from ckptd.train.announcing import Announcements
from ckptd.train.hosts import host_count
from ckptd.train.signals import SAVE, STOP, SignalWatch
from ckptd.train.steptimes import StepTimes

__all__ = ["Cadence", "rule_of"]

_log = logging.getLogger("ckptd")
_CLOCK = "clock"
_SAVES = 5
"""Saves whose medians are a typical one."""
_UNKNOWN_S = 60.0
"""Between two saves while none has become durable, and so none has a cost."""
_WORTH_TELLING = 0.2


class Cadence:
    """Evaluates a rule, and answers signals.

    Rules by step are a function of the step. Rules by clock and signals are decided by rank 0,
    which announces each decision for a coming call (`Announcements`). A rank that got a signal
    posts it on the board, where rank 0 finds it.

    Parameters
    ----------
    rule
        None: every call is due.
    watch
        The signals; without any, and with a rule by step, the board is never asked.
    history
        Returns the records of the root's last generations; called on rank 0 after the first save,
        when the rule wants a failure rate and has none.
    near
        Whether near tiers mend most failures, so that the root is needed for the others only.

    Attributes
    ----------
    choice
        What `Auto` chose last, on rank 0.
    urgent
        Whether a signal asks for the save of this call: it must not be skipped.
    stop_requested
        Whether a signal to stop was answered.
    """

    def __init__(
        self,
        rule: Every | Auto | None,
        agreement: Agreement,
        watch: SignalWatch,
        history: Callable[[], Sequence[Generation]],
        *,
        near: bool = False,
    ) -> None:
        self._rule = rule
        self._agreement = agreement
        self._board = agreement.board
        self._watch = watch
        self._history = history
        self._near = near
        self._announcements = Announcements(self._board)
        self._steps = StepTimes()
        self._since = time.monotonic()
        self._began = False
        self._under_way: list[tuple[SaveHandle, float]] = []
        self._costs: deque[Cost] = deque(maxlen=_SAVES)
        self._durable: int | None = None
        self._fresh = True
        self._hosts: int | None = None
        self._mtbf: Mtbf | None = None
        self._served = 0
        self._posted: set[str] = set()
        self._told_s: float | None = None
        self.urgent = False
        self.choice: Choice | None = None
        self.stop_requested = False

    # -- the calls -------------------------------------------------------------------------------

    def due(self, step: int, last_step: int | None) -> bool:
        """Tell whether `step` is due; every rank asks once a call of ``save``."""
        self._steps.call(time.monotonic(), bool(self._under_way))
        self._collect()
        self._count_hosts()
        asked = self._hear() and (last_step is None or step > last_step)
        self._steps.leave(time.monotonic())
        if self._rule is None:
            return True
        return asked or (isinstance(self._rule, Every) and self._rule.due(step, last_step))

    def saved(self, handle: SaveHandle, blocked_s: float) -> None:
        """Begin the time anew; `handle` is the save that began, which held the loop so long."""
        self._began_anew()
        self._began = True
        self._under_way.append((handle, blocked_s))

    def loaded(self, step: int) -> None:
        """Begin the time anew: the state is that of a checkpoint."""
        self._began_anew()
        self._durable = step

    def durable_step(self) -> int | None:
        """Return the newest step that is known to be durable; None when none is."""
        self._collect()
        return self._durable

    def _began_anew(self) -> None:
        self._since = time.monotonic()
        self._steps.leave(self._since)

    def measured(self, blocked_s: float, durable_s: float) -> None:
        """Take in what a save cost: seconds in the call, and until it was durable."""
        if self._fresh and self._costs:
            # The first save touched fresh memory: it stands for the others only while it is alone.
            self._costs.clear()
            self._fresh = False
        self._costs.append(Cost(blocked_s, self._steps.inflation_s(), durable_s))
        if isinstance(self._rule, Auto) and self._board.rank == 0:
            self.choice = self._chosen(self._rule)
            self._tell(self.choice)

    def _chosen(self, auto: Auto) -> Choice:
        """Choose by what the controller says of this life of the job; it may learn meanwhile."""
        link = WorkerLink.current()
        said = None if link is None else link.welcome
        mtbf = None
        if auto.mtbf_hours is None and said is not None and said.mtbf_s > 0.0:
            mtbf = Mtbf(said.mtbf_s, "measured by the controller")
        if mtbf is None:
            mtbf = self._mtbf = self._mtbf or self._find_mtbf(auto)
        if self._near:
            mtbf = beyond_near(auto, mtbf)
        restart_s = 0.0 if said is None else said.mttr_s
        return choose(auto, typical(self._costs), mtbf, restart_s)

    def _collect(self) -> None:
        """Take in the saves that have ended meanwhile."""
        ended = [pair for pair in self._under_way if pair[0].done]
        # A save may end meanwhile: who asked `done` again would lose it.
        self._under_way = [pair for pair in self._under_way if pair not in ended]
        for handle, blocked_s in ended:
            if handle.progress.phase == "durable" and handle.seconds is not None:
                self._durable = handle.step
                self.measured(blocked_s, handle.seconds)

    # -- clocks and signals ----------------------------------------------------------------------

    def _hear(self) -> bool:
        """Hear what rank 0 decided for this call and follow it; tell whether a save is due."""
        if not self._watch.active and (self._rule is None or not self._rule.by_clock):
            return False
        self._post()
        word = self._announcements.hear(self._decide, self._steps.usual_s)
        self.urgent = word in (SAVE, STOP)
        if self.urgent:
            self._watch.serve(word)
            self._served += 1
            self._posted.clear()
            self.stop_requested = self.stop_requested or word == STOP
        return bool(word)

    def _post(self) -> None:
        """Let rank 0 know of a signal that came here; once for each save that serves signals."""
        if self._board.rank == 0:
            return
        for kind in (SAVE, STOP):
            if (number := self._watch.pending(kind)) and kind not in self._posted:
                self._posted.add(kind)
                self._board.set(self._key(kind), f"{number} {self._board.rank}".encode())

    def _key(self, kind: str) -> str:
        return f"signal/{self._served}/{kind}"

    def _decide(self, announced: Collection[str]) -> str:
        """On rank 0: what to announce, given what is announced already."""
        if STOP in announced:
            return ""
        for kind in (STOP, SAVE):
            if kind not in announced and self._asked(kind):
                return kind
        # One announcement is enough until it has taken effect.
        return _CLOCK if not announced and self._late() else ""

    def _asked(self, kind: str) -> bool:
        if self._watch.pending(kind):
            return True
        remote = self._watch.active and self._board.world > 1
        return remote and self._board.peek(self._key(kind)) is not None

    def _late(self) -> bool:
        elapsed = time.monotonic() - self._since
        if isinstance(self._rule, Every):
            minutes = self._rule.minutes
            return minutes is not None and elapsed >= 60.0 * minutes
        if not isinstance(self._rule, Auto) or self._under_way:
            return False  # a save that came now would wait for the one that drains
        if self.choice is not None:
            return elapsed >= self.choice.interval_s
        return not self._began or elapsed >= min(_UNKNOWN_S, 60.0 * self._rule.max_minutes)

    # -- the failure rate ------------------------------------------------------------------------

    def _count_hosts(self) -> None:
        """Count the nodes at the first call, where every rank takes part."""
        auto = self._rule
        if self._hosts is None and isinstance(auto, Auto) and not (auto.mtbf_hours or auto.nodes):
            self._hosts = host_count(self._agreement)

    def _find_mtbf(self, auto: Auto) -> Mtbf:
        if auto.mtbf_hours is not None:
            return Mtbf(3600.0 * auto.mtbf_hours, "as given")
        lives = self._lives()
        if (seconds := mtbf_s(lives, self._board.world)) is not None:
            return Mtbf(seconds, f"measured over {len(lives)} earlier lives of this job")
        nodes = auto.nodes or self._hosts or 1
        each = 3600.0 * auto.node_mtbf_hours
        plural = "s" if nodes > 1 else ""
        return Mtbf(each / nodes, f"{nodes} node{plural}, one failure in {duration(each)} each")

    def _lives(self) -> list[float]:
        try:
            return lives_of(self._history())
        except CkptdError as error:
            _log.warning("the failures of earlier lives cannot be read: %s", error.message)
            return []

    def _tell(self, choice: Choice) -> None:
        before = self._told_s
        if before is None or abs(choice.interval_s - before) > _WORTH_TELLING * before:
            self._told_s = choice.interval_s
            _log.info("%s", choice)


def rule_of(value: object) -> Every | Auto | None:
    """Return the rule that a user means; a plain number means steps, None every call.

    Raises
    ------
    UsageError
        Kind ``bad-policy``: no rule.
    """
    if value is None or isinstance(value, Every | Auto):
        return value
    if isinstance(value, numbers.Integral):
        return Every.of(plain_int(value))
    raise UsageError(
        "every is not a rule",
        kind="bad-policy",
        where="every",
        wanted="a number of steps, Every(...) or Auto(...)",
        found=repr(value),
    )
