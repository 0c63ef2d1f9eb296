"""Delivery of events to subscribers (queue and its size), forks; a rank's phase for the recorder.

`emit` takes no lock that anybody holds for long and calls nothing that waits, so that it may be
called from any thread, from signal handlers and from destructors.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Protocol

from ckptd.events.event import AnyEvent

_log = logging.getLogger("ckptd")

Callback = Callable[[AnyEvent], None]
CAPACITY = 4096
"""Events that wait for one subscriber, at most."""


class Subscription:
    """One subscriber; made by `subscribe`.

    Attributes
    ----------
    dropped
        Events that came while the queue was full.
    failed
        Calls that raised; the first is logged.
    """

    def __init__(self, callback: Callback, capacity: int, *, inline: bool, relayed: bool) -> None:
        self.dropped = 0
        self.failed = 0
        self.relayed = relayed
        self._callback = callback
        self._capacity = capacity
        self._queue: SimpleQueue[AnyEvent | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if not inline:
            self._thread = threading.Thread(target=self._run, name="ckptd-events", daemon=True)
            self._thread.start()

    def offer(self, event: AnyEvent) -> None:
        """Take an event, or drop it; never raises, never waits."""
        if self._thread is None:
            self._call(event)
        elif self._queue.qsize() >= self._capacity:
            self.dropped += 1
        else:
            self._queue.put(event)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all events so far have been delivered; False when that takes too long."""
        if self._thread is None or not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what has come and hear no more. Idempotent."""
        _remove(self)
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._call(item)

    def _call(self, event: AnyEvent) -> None:
        try:
            self._callback(event)
        except Exception:  # noqa: BLE001 - a listener must not disturb the job
            self.failed += 1
            if self.failed == 1:
                _log.warning("a subscriber of events failed", exc_info=True)


_subscribers: tuple[Subscription, ...] = ()
_changing = threading.RLock()  # of the thread that a signal handler stopped there, say
_first: list[Callable[[], None]] = []


def subscribe(
    callback: Callback, *, capacity: int = CAPACITY, inline: bool = False, relayed: bool = False
) -> Subscription:
    """Call `callback` with every event from now on, in a thread of its own.

    Parameters
    ----------
    capacity
        Events that may wait for it; further ones are dropped and counted.
    inline
        Call it in the thread that emits instead: for callbacks that neither wait nor take a lock.
    relayed
        Also with events of other processes that were handed on to this one (`relay`).
    """
    global _subscribers
    subscription = Subscription(callback, capacity, inline=inline, relayed=relayed)
    with _changing:
        _subscribers = (*_subscribers, subscription)
    return subscription


def _remove(subscription: Subscription) -> None:
    global _subscribers
    with _changing:
        _subscribers = tuple(s for s in _subscribers if s is not subscription)


def at_first_event(call: Callable[[], None]) -> None:
    """Call a function once, before this process's first event is delivered."""
    _first.append(call)


def listening() -> bool:
    """Tell whether anybody would hear an event: whether making one is worth it."""
    if _first:
        _begin()
    return bool(_subscribers)


def emit(event: AnyEvent) -> None:
    """Tell all subscribers; never raises, never waits."""
    if _first:
        _begin()
    for subscriber in _subscribers:
        subscriber.offer(event)


def relay(event: AnyEvent) -> None:
    """Tell those who want to hear of other processes: this event happened in one of them."""
    for subscriber in _subscribers:
        if subscriber.relayed:
            subscriber.offer(event)


def _begin() -> None:
    calls = _first.copy()
    _first.clear()
    for call in calls:
        try:
            call()
        except Exception:  # noqa: BLE001 - as in Subscription
            _log.warning("events are not recorded", exc_info=True)


def _after_fork() -> None:
    """Forget the parent's subscribers: their threads did not come along."""
    global _subscribers, _changing
    _subscribers = ()
    _changing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


# -- what a rank is about: the monitor's recorder listens, once it is attached ---------------------


class ActivityListener(Protocol):
    """Hears what a rank is about; never raises for what fails in itself."""

    def phase(self, phase: str, /) -> AbstractContextManager[None]:
        """Be in a phase within the block: ``"ckpt"``."""

    def at_step(self, number: int, /) -> None:
        """Be at step `number`: it was loaded, or is saved."""

    def regroup(self, generation: int, rank: int, world: int, /) -> object:
        """Go on as a rank of another generation."""


_listener: ActivityListener | None = None


def listen(listener: ActivityListener | None) -> None:
    """Set the one listener of everything that follows; None: there is none."""
    global _listener
    _listener = listener


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say what the rank is about within the block; also a decorator."""
    if _listener is None:
        yield
        return
    with _listener.phase(name):
        yield


def at_step(number: int) -> None:
    """Say which step was loaded or is saved."""
    if _listener is not None:
        _listener.at_step(number)


def regroup(generation: int, rank: int, world: int) -> None:
    """Say that this process goes on as a rank of another generation."""
    if _listener is not None:
        _listener.regroup(generation, rank, world)
