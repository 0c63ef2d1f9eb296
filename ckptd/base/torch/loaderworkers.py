"""Data loader workers: kept alive through signals (SIGTERM) that ask their trainer for a save.

In it: which modules' workers; which signals.

Schedulers signal every process of a job (Slurm, systemd, ``kill -- -PGID``). Workers of a loader
would die of that, and torch raises in the trainer before it comes to the save. So a worker that
begins while such signals are watched disregards them. It still ends with its trainer, and where the
trainer ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from ckptd.base.runtime.ownership import in_child

_OF_LOADERS = ("torch.utils.data.", "torchdata.")
_END = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 3) - 3
"""Ends a worker: it disregards SIGTERM, which does not say from which process it comes."""
_END_S = 2.0
_signals: Callable[[], Iterable[int]] = frozenset


def shield_workers(signals: Callable[[], Iterable[int]]) -> None:
    """Have workers of loaders, from now on, disregard the signals that are watched as they begin.

    Parameters
    ----------
    signals
        Returns those signals.
    """
    global _signals
    if _signals is frozenset:
        BaseProcess.start = _started(BaseProcess.start)  # type: ignore[assignment, method-assign]
    _signals = signals


def _started(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    @wraps(start)
    def started(process: BaseProcess) -> None:
        target: Any = getattr(process, "_target", None)
        signals = frozenset(_signals())
        if not signals or not str(getattr(target, "__module__", "")).startswith(_OF_LOADERS):
            start(process)
            return
        process._target = partial(_shielded, signals, target)  # type: ignore[attr-defined]
        # Until the worker can answer them it must not be ended by them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        started: Any = process._popen  # type: ignore[attr-defined]
        started.terminate = partial(_end, started, os.getpid())

    return started


def _end(process: Any, parent: int) -> None:
    """End a worker as torch's own handler of SIGTERM would, without a word."""
    if os.getpid() != parent:
        return  # a child that ends would end what it has inherited
    process._send_signal(_END)
    if process.wait(_END_S) is None:  # it holds the interpreter
        process.kill()


# -- in the worker ---------------------------------------------------------------------------------


def _shielded(
    signals: frozenset[int], target: Callable[..., None], *args: Any, **more: Any
) -> None:
    shield = _Shield(signals)
    torchs = signal_handling._set_worker_signal_handlers

    def handlers() -> None:
        torchs()  # of SIGTERM as well
        shield.put_up()

    signal_handling._set_worker_signal_handlers = handlers
    shield.put_up()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    target(*args, **more)


class _Shield:
    def __init__(self, signals: frozenset[int]) -> None:
        self._signals = signals
        in_child(self._take_down)

    def put_up(self) -> None:
        signal.signal(_END, _leave)
        for number in self._signals:
            # A handler and not SIG_IGN, which programs that the worker starts would inherit.
            signal.signal(number, _disregard)
            signal.siginterrupt(number, False)

    def _take_down(self) -> None:
        """In a process that the worker has forked: that one must end as any other."""
        for number in (*self._signals, _END):
            signal.signal(number, signal.SIG_DFL)


def _disregard(number: int, frame: FrameType | None) -> None:
    pass


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)
