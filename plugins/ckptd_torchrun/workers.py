"""The workers of torchrun's agent, as seen from a thread beside it.

The agent looks at its workers now and then, and counts every worker that died as a restart. This
sees them end at once, stops them where they are, and kills them at a moment when the agent does not
look.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptd_torchrun.guard import children_of, kill_group

__all__ = ["UNKNOWN_CODE", "Workers"]

UNKNOWN_CODE = -1000
"""The agent took the exit code first."""
_LOOK_S = 0.02
_IDLE_S = 0.5


class Workers:
    """Children of this process that its agent has started as workers.

    Parameters
    ----------
    ended
        Called by a thread of this when a worker has ended, with its code: that of the exit, minus
        the signal's number, or `UNKNOWN_CODE`.

    Attributes
    ----------
    failed
        Whether a worker has ended with another code than 0 since `expect`.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._fds: dict[int, int] = {}
        """By process, of those that have not ended."""
        self._others: set[int] = set()
        self._before: set[int] = set()
        """Children that were there before workers were expected."""
        self._over: set[int] = set()
        """Workers that have ended and that the agent has not waited for yet."""
        self._seen: set[int] = set()
        """All since `expect`."""
        self._lock = threading.Lock()
        self.failed = False
        self._starting = False
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="ckptd-workers", daemon=True)
        self._thread.start()

    def start_other(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that is no worker, with the options of `subprocess.Popen`."""
        with self._lock:
            process = subprocess.Popen(command, **options)
            self._others.add(process.pid)
        return process

    def expect(self) -> None:
        """Take every new child for a worker from now on."""
        with self._lock:
            self._before = children_of(os.getpid())
            self._seen.clear()
            self.failed = False
            self._starting = True
        os.eventfd_write(self._wake, 1)

    def complete(self) -> int:
        """Note the workers that are there, and expect no more; return how many were started."""
        self.look()
        self._starting = False
        return len(self._seen)

    def look(self) -> set[int]:
        """Return the workers that have not ended."""
        with self._lock:
            if self._starting:
                self._note(children_of(os.getpid()))
            return {pid for pid, fd in self._fds.items() if not _is_over(fd)}

    def _note(self, children: set[int]) -> None:
        self._over &= children
        self._before &= children
        known = self._others | self._over | self._before | self._fds.keys()
        for pid in children - known:
            if _is_tracker(pid):
                continue
            try:
                self._fds[pid] = os.pidfd_open(pid)
                self._seen.add(pid)
            except ProcessLookupError:
                continue
            os.eventfd_write(self._wake, 1)

    def freeze(self) -> None:
        """Stop them where they are: no step is made from now on, and their ends are hidden.

        Only once all have been started: one that is stopped before its program is loaded stops the
        thread that starts it as well.
        """
        for pid in self.look():
            kill_group(pid, signal.SIGSTOP)

    def kill(self, within_s: float) -> bool:
        """Kill them, and return whether none is left."""
        end = time.monotonic() + within_s
        while left := self.look():
            for pid in left:
                kill_group(pid)
            if time.monotonic() >= end:
                return False
            self._await(left, end)
        return True

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _await(self, pids: set[int], end: float) -> None:
        with self._lock:
            fds = [self._fds[pid] for pid in pids if pid in self._fds]
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        # One at a time: the loop above looks again.
        poller.poll(max(0.0, min(end - time.monotonic(), _LOOK_S)) * 1000)

    def _watch(self) -> None:
        while not self._closed:
            if self._starting:
                self.look()
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            with self._lock:
                known = dict(self._fds)
            for fd in known.values():
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll((_LOOK_S if self._starting else _IDLE_S) * 1000)}
            if self._wake in ready:
                _drain(self._wake)
            for pid, fd in known.items():
                if fd in ready:
                    self._take(pid, fd)
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
            os.close(self._wake)

    def _take(self, pid: int, fd: int) -> None:
        code = _code_of(pid)
        with self._lock:
            del self._fds[pid]
            os.close(fd)
            if code != UNKNOWN_CODE:
                self._over.add(pid)
        self.failed = self.failed or code != 0
        self._ended(code)


def _drain(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


def _is_tracker(pid: int) -> bool:
    """Return whether this is what `multiprocessing` starts beside functions that are workers."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read(4096)
    except OSError:
        return False


def _is_over(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _code_of(pid: int) -> int:
    """Return the code of a child that has ended, and leave it to the agent to wait for it."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return UNKNOWN_CODE
    if info is None:
        return UNKNOWN_CODE
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
