"""When a save is due: cadence agreed by ranks, signals (preemption, grace), skipped saves.

In it: which signals may ask; the error where the grace was too short; least interval while costs
are unknown.
"""

from __future__ import annotations

import logging
import numbers
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Literal

import numpy as np

from ckptd.base.runtime.announcements import Announcements
from ckptd.base.runtime.ownership import in_child
from ckptd.base.runtime.ranks import Board
from ckptd.base.torch.ranks import Agreement, host_count
from ckptd.checkpoint.format.records import Generation
from ckptd.checkpoint.root.auto import (
    Auto,
    Cost,
    IntervalChoice,
    Mtbf,
    beyond_near,
    choose,
    duration,
    lives_of,
    mtbf_s,
    typical,
)
from ckptd.checkpoint.root.policy import Every, plain_int
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.errors import CkptdError, DeadlineError, UsageError
from ckptd.events.bus import phase

SAVE: Final = "save"
STOP: Final = "stop"

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU}
_ANSWERED = frozenset(signal.Signals) - {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
}
_log = logging.getLogger("ckptd")


class SignalWatch:
    """Handlers for some signals, until `close`; the numbers are `signals`.

    Signals that end a process (TERM, INT, HUP, QUIT, XCPU) ask to save and stop, others to save
    and go on. A handler that was there before is called as well; a second Ctrl-C interrupts as it
    always does.

    Raises
    ------
    UsageError
        No signal, or one that cannot be handled. Python lets only the main thread handle signals.
    """

    def __init__(self, signals: Iterable[int] | int) -> None:
        numbers = _checked(signals)
        self.signals = tuple(numbers)
        self._open = True
        self._pending: dict[str, int] = {}
        self._stop_at: float | None = None
        self._before: dict[int, Any] = {}
        if numbers:
            from ckptd.base.torch.loaderworkers import shield_workers

            _watches.add(self)
            in_child(self._leave_to_parent)
            shield_workers(watched_signals)
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)
            if self._before[number] is None:
                _log.warning("%s had a handler that Python cannot call; it is replaced", _n(number))

    @property
    def active(self) -> bool:
        """Whether anything may ask for a save."""
        return bool(self.signals)

    def pending(self, kind: str) -> int:
        """Return the signal that asks for a ``save`` or a ``stop`` and was not served, else 0."""
        return self._pending.get(kind, 0)

    def serve(self, kind: str) -> None:
        """A save of this kind begins: it serves what has arrived; a stop serves saves as well."""
        for served in (SAVE, STOP) if kind == STOP else (SAVE,):
            self._pending.pop(served, None)
        if kind == STOP and self._stop_at is None:
            self._stop_at = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the signals back in this thread: a process that is started now never gets them.

        A scheduler signals every process of a job, and the writing one has to finish.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def failures(self) -> tuple[float, float]:
        """Seconds between failures of the job, and to go on after one; 0 for what is not known."""
        return 0.0, 0.0

    @property
    def stop_at(self) -> float | None:
        """When the first signal to stop arrived here, or was announced (`time.monotonic`)."""
        return self._stop_at

    def close(self) -> None:
        """Put the handlers back that were there before. Idempotent.

        Where another one was put over ours, or this is not the main thread, ours stays
        and only passes on.
        """
        self._open = False
        _watches.discard(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if before is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _leave_to_parent(self) -> None:
        """Put everything back in a forked child: what ends it is not for the parent's save."""
        self._open = False
        self._pending.clear()
        _watches.discard(self)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._open:
            _pass_on(before, number, frame)
            return
        kind = STOP if number in _ENDING else SAVE
        again = kind in self._pending
        self._pending[kind] = number
        if kind == STOP and self._stop_at is None:
            self._stop_at = time.monotonic()
        # The first Ctrl-C asks for a save, which the handler of Python itself would prevent.
        if callable(before) and (again or before is not signal.default_int_handler):
            before(number, frame)


_watches: set[SignalWatch] = set()
"""The open ones."""
_masks = threading.local()


def watched_signals() -> set[int]:
    """Return the signals that ask for a save in this process."""
    return {number for watch in tuple(_watches) for number in watch.signals}


def _before_fork() -> None:
    # A signal that reached a child before its handlers are put back would be noted, and lost.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, watched_signals())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


# After that of `in_child`, which is registered first.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _checked(signals: Iterable[int] | int) -> list[int]:
    numbers = sorted(
        {_number(s) for s in (signals if isinstance(signals, Iterable) else [signals])}
    )
    if numbers and threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "only the main thread can handle signals",
            where=threading.current_thread().name,
            wanted=f"a Checkpointer that handles {[_n(n) for n in numbers]} in the main thread",
            hint="make the Checkpointer there, or without preemption",
        )
    return numbers


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in _ANSWERED:
        raise UsageError(
            "preemption needs signals that a program can handle",
            where="preemption",
            wanted="Preemption(signals=(signal.SIGTERM, signal.SIGUSR1))",
            found=repr(value),
        )
    return int(value)


def _n(number: int) -> str:
    return signal.Signals(number).name


def lost(handles: Sequence[SaveHandle], durable: int | None, grace_s: float) -> DeadlineError:
    """Return the error that says what the grace time was too short for.

    Parameters
    ----------
    handles
        The saves at the end of that time.
    durable
        The newest step that is known to be durable.
    """
    open_ = [h for h in handles if not h.done]
    steps = ", ".join(str(h.step) for h in open_)
    was = [f"step {h.step} {h.progress.phase}: {_bytes(h)}" for h in open_]
    newest = "no checkpoint is" if durable is None else f"step {durable} is the newest that is"
    return DeadlineError(
        f"step {steps} was not durable when the grace time ended; {newest}",
        kind="grace",
        wanted=f"durable within {grace_s:g} s of the signal",
        found="; ".join(was),
        hint="the writing process finishes it unless it is killed; ask the scheduler for more time"
        " (Slurm: --signal=TERM@120) and give it as Preemption(grace_s=...)",
    )


def _bytes(handle: SaveHandle) -> str:
    progress = handle.progress
    return f"{progress.done_bytes} of {progress.total_bytes} bytes written"


_WINDOW = 64


class StepTimes:
    """Seconds between the calls of ``save``, without what those calls take."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=_WINDOW)
        self._draining: deque[float] = deque(maxlen=_WINDOW)
        self._drained = 0
        self._left: float | None = None

    def call(self, now: float, draining: bool) -> None:
        """A call begins; `draining` tells whether a save was under way since the last one."""
        if self._left is None:
            return
        (self._draining if draining else self._calm).append(now - self._left)
        self._drained += draining

    def leave(self, now: float) -> None:
        """The call returns."""
        self._left = now

    @property
    def usual_s(self) -> float | None:
        """Median of the last steps; None before there are two calls."""
        steps = self._calm or self._draining
        return float(np.median(steps)) if steps else None

    def inflation_s(self) -> float:
        """Return what the steps since the last answer lost to draining, in seconds.

        Medians, because an evaluation between two steps is no fault of a save. 0 while no step
        without a save is known.
        """
        lost = 0.0
        if self._calm and self._draining:
            slower = float(np.median(self._draining) - np.median(self._calm))
            lost = max(0.0, slower) * self._drained
        self._draining.clear()
        self._drained = 0
        return lost


WhenFailed = Literal["raise", "warn"]


class Admission:
    """Skips saves alike on every rank: rank 0 looks at its own slots, the others ask the board.

    Ranks that skipped apart from one another would count their attempts differently, and no later
    save of theirs would ever be complete.

    Parameters
    ----------
    timeout_s
        Longest wait for rank 0, in seconds.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self._calls = 0
        self.skipped = 0
        """Saves that were due and skipped."""

    @phase("ckpt")
    def grants(self, step: int, full: bool) -> bool:
        """Tell whether the save of `step` begins; every rank asks once a save that is due.

        Parameters
        ----------
        full
            Whether this rank has no free slot.

        Raises
        ------
        DeadlineError
            Rank 0 does not come to this save.
        """
        self._calls += 1
        if self._board.rank == 0:
            self._board.set(f"admit/{self._calls}", b"0" if full else b"1")
            self._board.delete(f"admit/{self._calls - 64}")
        granted = self._board.get(f"admit/{self._calls}", self._timeout_s) == b"1"
        if not granted:
            self.skipped += 1
            _log.warning(
                "step %d is not saved: earlier saves are still being written (%d skipped so far)",
                step,
                self.skipped,
            )
        return granted


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
        self._logged_s: float | None = None
        self.urgent = False
        self.choice: IntervalChoice | None = None
        self.stop_requested = False

    # -- the calls -------------------------------------------------------------------------------

    def due(self, step: int, last_step: int | None) -> bool:
        """Tell whether `step` is due; every rank asks once a call of ``save``."""
        self._steps.call(time.monotonic(), bool(self._under_way))
        self._collect()
        auto = self._rule
        if self._hosts is None and isinstance(auto, Auto) and not (auto.mtbf_hours or auto.nodes):
            self._hosts = host_count(self._agreement)  # at the first call: every rank takes part
        asked = self._is_asked() and (last_step is None or step > last_step)
        self._steps.leave(time.monotonic())
        if self._rule is None:
            return True
        return asked or (isinstance(self._rule, Every) and self._rule.due(step, last_step))

    def saved(self, handle: SaveHandle, blocked_s: float) -> None:
        """Begin the time again; `handle` is the save that began, which held the loop so long."""
        self._began_anew()
        self._began = True
        self._under_way.append((handle, blocked_s))

    def loaded(self, step: int) -> None:
        """Begin the time again: the state is that of a checkpoint."""
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
            # The first save touched fresh memory: it represents the others only while it is alone.
            self._costs.clear()
            self._fresh = False
        self._costs.append(Cost(blocked_s, self._steps.inflation_s(), durable_s))
        if isinstance(self._rule, Auto) and self._board.rank == 0:
            self.choice = self._chosen(self._rule)
            self._log_choice(self.choice)

    def _chosen(self, auto: Auto) -> IntervalChoice:
        """Choose by what the controller has measured of this life of the job, if it has."""
        between_s, restart_s = self._watch.failures
        mtbf = None
        if auto.mtbf_hours is None and between_s > 0.0:
            mtbf = Mtbf(between_s, "measured by the controller")
        if mtbf is None:
            mtbf = self._mtbf = self._mtbf or self._find_mtbf(auto)
        if self._near:
            mtbf = beyond_near(auto, mtbf)
        return choose(auto, typical(self._costs), mtbf, restart_s)

    def _collect(self) -> None:
        """Take in the saves that have ended meanwhile."""
        ended = [pair for pair in self._under_way if pair[0].done]
        # A save may end meanwhile: asking `done` again would lose it.
        self._under_way = [pair for pair in self._under_way if pair not in ended]
        for handle, blocked_s in ended:
            if handle.progress.phase == "durable" and handle.seconds is not None:
                self._durable = handle.step
                self.measured(blocked_s, handle.seconds)

    # -- clocks and signals ----------------------------------------------------------------------

    def _is_asked(self) -> bool:
        """Follow what rank 0 decided for this call; return whether it asks for a save."""
        if not self._watch.active and (self._rule is None or not self._rule.by_clock):
            return False
        self._post()
        word = self._announcements.word(self._decide, self._steps.usual_s)
        self.urgent = word in (SAVE, STOP)
        if self.urgent:
            self._watch.serve(word)
            self._served += 1
            self._posted.clear()
            self.stop_requested = self.stop_requested or word == STOP
        return bool(word)

    def _post(self) -> None:
        """Tell rank 0 of a signal that came here; once for each save that serves signals."""
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
            return self._rule.late(elapsed)
        if not isinstance(self._rule, Auto) or self._under_way:
            return False  # a save that came now would wait for the one that drains
        if self.choice is not None:
            return elapsed >= self.choice.interval_s
        return not self._began or elapsed >= min(_UNKNOWN_S, 60.0 * self._rule.max_minutes)

    # -- the failure rate ------------------------------------------------------------------------

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

    def _log_choice(self, choice: IntervalChoice) -> None:
        before = self._logged_s
        if before is None or abs(choice.interval_s - before) > _WORTH_TELLING * before:
            self._logged_s = choice.interval_s
            _log.info("%s", choice)


def rule_of(value: object) -> Every | Auto | None:
    """Return the rule that a user means; a plain number means steps, None every call.

    Raises
    ------
    UsageError
        No rule.
    """
    if value is None or isinstance(value, Every | Auto):
        return value
    if isinstance(value, numbers.Integral):
        return Every.of(plain_int(value))
    raise UsageError(
        "invalid every=",
        where="every",
        wanted="a number of steps, Every(...) or Auto(...)",
        found=repr(value),
    )
