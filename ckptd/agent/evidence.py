"""Stacks and probes, taken beside the watcher's loop and kept until somebody asks.

A launcher may kill a rank before the daemon has made up its mind. So the stacks of a rank that
looks stuck are taken early, and those of the others when one dies; they are what a later question
finds.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from ckptd.agent.probes import measure
from ckptd.agent.stacks import take_stacks
from ckptd.monitor.report import LinkProbe, ProbeResult, Stack

__all__ = ["EvidenceTaker"]

_log = logging.getLogger("ckptd.agent")
_MOST_WAITING = 256
_NOT_HERE = "its process has ended, or runs in another container; nothing was kept of it\n"
_AGAIN_S = 2.0
"""The same rank is not looked at more often than this."""

_Work = queue.Queue[Callable[[], None] | None]
_Pid = TypeVar("_Pid", int, int | None)
_Report = Callable[[dict[int, Stack], tuple[ProbeResult, ...]], None]


class EvidenceTaker:
    """Takes evidence in two threads, one for stacks and one for links. To be closed.

    Parameters
    ----------
    secret
        The job's, for probes.
    report
        Is told, in one of these threads, what was asked for.
    """

    def __init__(self, secret: bytes, report: _Report) -> None:
        self._secret = secret
        self._report = report
        self._kept: dict[int, tuple[int, Stack]] = {}
        self._asked: dict[tuple[int, bool], float] = {}
        self._lock = threading.Lock()
        self._work: dict[str, _Work] = {}
        self._threads: list[threading.Thread] = []

    def close(self, timeout_s: float = 1.0) -> None:
        """End; what is under way may end by itself later."""
        for waiting in self._work.values():
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def keep(self, pids: Mapping[int, int], note: str) -> None:
        """Take stacks of ranks now, for later; `note` says why, as their first line.

        Parameters
        ----------
        pids
            Processes by rank.
        """
        wanted = self._due(pids, asked=False)
        if wanted:
            self._do("ckptd-stacks", lambda: self._keep(wanted, note))

    def wanted(self, pids: Mapping[int, int | None]) -> None:
        """Take stacks of ranks and report them, with those that were kept for them.

        Parameters
        ----------
        pids
            Processes by rank; None for one that has ended.
        """
        due = self._due(pids, asked=True)
        if due:
            self._do("ckptd-stacks", lambda: self._take(due))

    def probe(self, probes: tuple[LinkProbe, ...]) -> None:
        """Measure links one after another, and report each round at its end."""
        if probes:
            self._do(
                "ckptd-probes",
                lambda: self._report({}, tuple(measure(p, self._secret) for p in probes)),
            )

    def forget(self, rank: int) -> None:
        """Drop what was kept of a rank, of whose next life nothing of it is true."""
        with self._lock:
            self._kept.pop(rank, None)

    # --- in the threads -------------------------------------------------------------------------

    def _keep(self, pids: Mapping[int, int], note: str) -> None:
        for rank, stack in take_stacks(pids.items()).items():
            if stack.how:
                text = f"Taken at {_clock()}, as {note}:\n{stack.text}"
                with self._lock:
                    self._kept[rank] = (pids[rank], msgspec.structs.replace(stack, text=text))

    def _take(self, pids: Mapping[int, int | None]) -> None:
        fresh = take_stacks((rank, pid) for rank, pid in pids.items() if pid is not None)
        found = {rank: self._joined(rank, pid, fresh.get(rank)) for rank, pid in pids.items()}
        self._report(found, ())

    def _joined(self, rank: int, pid: int | None, fresh: Stack | None) -> Stack:
        """Return the fresh stacks of a rank and the kept ones behind them."""
        with self._lock:
            of, kept = self._kept.get(rank, (pid, None))
        if kept is None or (pid is not None and of != pid):
            return fresh or Stack(text=_NOT_HERE)
        if fresh is None or not fresh.how:
            return kept
        return msgspec.structs.replace(fresh, text=f"{fresh.text}\n{kept.text}")

    # --- the threads ----------------------------------------------------------------------------

    def _due(self, pids: Mapping[int, _Pid], *, asked: bool) -> dict[int, _Pid]:
        now = time.monotonic()
        due: dict[int, _Pid] = {}
        for rank, pid in pids.items():
            if now - self._asked.get((rank, asked), -_AGAIN_S) >= _AGAIN_S:
                self._asked[rank, asked] = now
                due[rank] = pid
        return due

    def _do(self, name: str, work: Callable[[], None]) -> None:
        waiting = self._work.get(name)
        if waiting is None:
            waiting = self._work[name] = queue.Queue(_MOST_WAITING)
            thread = threading.Thread(target=_serve, args=(waiting,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            waiting.put_nowait(work)
        except queue.Full:
            _log.warning("%s: too much is asked for at once", name)


def _serve(waiting: _Work) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except Exception:  # noqa: BLE001 - the next question may be answered all the same
            _log.exception("evidence could not be taken")


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
