"""Pools of threads for one pass: small tasks, stopped by the first error; number of cores.

In it: the error of a pass that makes no progress.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from ckptd.errors import DeadlineError

T = TypeVar("T")


def cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def run_all(
    tasks: Iterable[T],
    work: Callable[[T], None],
    *,
    threads: int,
    stall_s: float,
    what: str,
    pulse: Callable[[], int] | None = None,
    leave_s: float = 0.0,
) -> None:
    """Call ``work(task)`` for every task, in `threads` threads, starting them in order.

    Parameters
    ----------
    tasks
        Drawn one by one, under a lock.
    work
        Releases the GIL where it matters.
    threads
        At least one.
    stall_s
        Longest time in seconds that may pass without a task ending.
    what
        What is being done, for the error.
    pulse
        A number that changes while a long task gets on, such as bytes done: then it does not
        count as stalled.
    leave_s
        How long to wait for tasks under way where this thread is interrupted, in seconds: as long
        as they may write to what the caller has for others then.

    Raises
    ------
    BaseException
        What the earliest failing task raised; tasks under way are waited for, others not begun.
    DeadlineError
        kind ``stalled``: no task ended for `stall_s` seconds. Threads may still hang in a call
        that the system does not give back; nothing waits for them.
    """
    pool = _Pool(enumerate(tasks), work)
    pool.start(threads)
    pool.wait(stall_s, what, pulse or (lambda: 0), leave_s)


class _Pool(Generic[T]):
    def __init__(self, tasks: Iterator[tuple[int, T]], work: Callable[[T], None]) -> None:
        self._tasks = tasks
        self._work = work
        self._draw = threading.Lock()
        self._changed = threading.Condition()
        self._running = 0
        self._ended = 0
        self._stop = False
        self._errors: list[tuple[int, BaseException]] = []

    def start(self, threads: int) -> None:
        self._running = threads
        for i in range(threads):
            # Daemons: a thread stuck in a dead mount must not keep the process from ending.
            threading.Thread(target=self._run, name=f"ckptd-read-{i}", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._stop and self._one():
                pass
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _one(self) -> bool:
        """Draw a task and do it; False when there is none left."""
        index = -1
        try:
            with self._draw:
                index, task = next(self._tasks)
            self._work(task)
        except StopIteration:
            return False
        except BaseException as error:  # noqa: BLE001 - raised by `wait` in the caller's thread
            with self._changed:
                self._errors.append((index, error))
                self._stop = True
        self._ended += 1
        return True

    def wait(self, stall_s: float, what: str, pulse: Callable[[], int], leave_s: float) -> None:
        seen, until = (-1, 0), 0.0
        try:
            with self._changed:
                while self._running:
                    if (self._ended, pulse()) != seen:
                        seen, until = (self._ended, pulse()), time.monotonic() + stall_s
                    elif time.monotonic() > until:
                        raise DeadlineError(
                            f"{what} made no progress",
                            kind="stalled",
                            wanted=f"a step within {stall_s:.0f} s",
                            hint="check that the file system or object store is reachable",
                        )
                    self._changed.wait(min(1.0, stall_s))
        except DeadlineError:
            raise  # the tasks hang
        except BaseException:
            self._leave(time.monotonic() + leave_s)
            raise
        finally:
            self._stop = True
        if self._errors:
            raise min(self._errors, key=lambda e: e[0])[1]

    def _leave(self, until: float) -> None:
        """Wait for what is under way; an interrupt that comes again is one already."""
        self._stop = True
        while (left := until - time.monotonic()) > 0:
            with suppress(BaseException), self._changed:
                if self._changed.wait_for(lambda: not self._running, left):
                    return


def batches(
    items: Iterable[T], size: Callable[[T], int], most: int, count: int = sys.maxsize
) -> Iterator[list[T]]:
    """Group neighbours up to `most` bytes, so that thousands of small ones do not cost a read each.

    A larger item is a group of its own. No group has more than `count` items.
    """
    batch: list[T] = []
    held = 0
    for item in items:
        nbytes = size(item)
        if batch and (held + nbytes > most or len(batch) == count):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes
    if batch:
        yield batch
