"""Signals that ask for a save: the handler sets a flag, the next call of ``save`` looks at it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from ckptd.errors import DeadlineError, UsageError
from ckptd.save.handle import SaveHandle

__all__ = ["GRACE_S", "SAVE", "STOP", "SignalWatch", "lost"]

SAVE: Final = "save"
STOP: Final = "stop"
GRACE_S = 30.0
"""What Slurm (KillWait), Kubernetes and torchrun wait between TERM and KILL, in seconds."""

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
        Kind ``bad-policy``: no signal, or one that cannot be handled. Kind ``main-thread``: Python
        lets only the main thread handle signals.
    """

    def __init__(self, signals: Iterable[int] | int) -> None:
        numbers = _checked(signals)
        self.signals = tuple(numbers)
        self._open = True
        self._pending: dict[str, int] = {}
        self._stop_at: float | None = None
        self._before: dict[int, Any] = {}
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
    def stop_at(self) -> float | None:
        """When the first signal to stop arrived here, or was heard of (`time.monotonic`)."""
        return self._stop_at

    def close(self) -> None:
        """Put the handlers back that were there before. Idempotent.

        Where somebody has put another one over ours, or this is not the main thread, ours stays
        and only passes on.
        """
        self._open = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if before is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, before)

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
            kind="main-thread",
            where=threading.current_thread().name,
            wanted=f"a Checkpointer with save_on={[_n(n) for n in numbers]} in the main thread",
            hint="make the Checkpointer there, or without save_on",
        )
    return numbers


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in _ANSWERED:
        raise UsageError(
            "save_on wants signals that a program can answer",
            kind="bad-policy",
            where="save_on",
            wanted="(signal.SIGTERM, signal.SIGUSR1)",
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
        hint="the writing process finishes it if it may live; ask the scheduler for more time"
        " (Slurm: --signal=TERM@120) and say so with grace_s",
    )


def _bytes(handle: SaveHandle) -> str:
    progress = handle.progress
    return f"{progress.done_bytes} of {progress.total_bytes} bytes written"
