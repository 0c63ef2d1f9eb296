"""Spans: measures activities, for which save and tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple, Self

from ckptd.errors import CkptdError
from ckptd.events.bus import emit, listening
from ckptd.events.event import SaveId, Span, now_ns


class Scope(NamedTuple):
    """The save and the tier that the running code works for."""

    save: SaveId | None
    tier: str


_NOTHING = Scope(None, "")
_scope: ContextVar[Scope] = ContextVar("ckptd_events", default=_NOTHING)


def current() -> Scope:
    """Return the save and the tier that `about` named around this code."""
    return _scope.get()


@contextmanager
def about(save: SaveId | None = None, tier: str | None = None) -> Iterator[None]:
    """Name the save and the tier of all spans within; what is None stays as it is.

    Threads that are started within do not inherit it.
    """
    now = _scope.get()
    token = _scope.set(Scope(save or now.save, now.tier if tier is None else tier))
    try:
        yield
    finally:
        _scope.reset(token)


class span:
    """Emit the time that a ``with`` block takes as a `Span`.

    Outside of any save nothing is emitted.

    Parameters
    ----------
    name
        One of `ckptd.events.SAVE_PHASES` or `LOAD_PHASES`.
    nbytes
        Bytes moved or looked at; may be set within the block, and so may `referred`.
    tier, save
        By default those of `about`.
    since_ns
        When it began, on the monotonic clock, if that was before the block.
    """

    __slots__ = ("_name", "_save", "_start", "_tier", "nbytes", "referred")

    def __init__(
        self,
        name: str,
        *,
        nbytes: int = 0,
        tier: str | None = None,
        save: SaveId | None = None,
        since_ns: int = 0,
    ) -> None:
        self._name = name
        self._start = since_ns
        self._save = save
        self._tier = tier
        self.nbytes = nbytes
        self.referred = 0

    def __enter__(self) -> Self:
        self._start = self._start or time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if listening():
            took = time.monotonic_ns() - self._start
            sizes = self.nbytes, self.referred
            _send(self._name, self._save, self._tier, took, took, sizes, error)


class Activity:
    """An activity that happens in many pieces, and is emitted as one `Span`; thread-safe.

    Parameters
    ----------
    name, tier, save
        As in `span`.
    """

    def __init__(self, name: str, *, tier: str | None = None, save: SaveId | None = None) -> None:
        self._name = name
        self._tier = tier
        self._save = save
        self._lock = threading.Lock()
        self._first = self._last = 0
        self.busy_ns = 0
        self.nbytes = 0

    @contextmanager
    def piece(self, nbytes: int = 0) -> Iterator[None]:
        """Count what the block takes."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(start, time.monotonic_ns(), nbytes)

    def add(self, start_ns: int, end_ns: int, nbytes: int = 0) -> None:
        """Count a piece by its times on the monotonic clock, in nanoseconds."""
        with self._lock:
            self._first = min(self._first or start_ns, start_ns)
            self._last = max(self._last, end_ns)
            self.busy_ns += end_ns - start_ns
            self.nbytes += nbytes

    def emit(self, error: BaseException | None = None) -> None:
        """Emit the sum, if there was a piece."""
        if self._first and listening():
            late = time.monotonic_ns() - self._last
            took = self._last - self._first
            sizes = self.nbytes, 0
            _send(self._name, self._save, self._tier, took, self.busy_ns, sizes, error, late)


def _send(
    name: str,
    save: SaveId | None,
    tier: str | None,
    took: int,
    busy: int,
    sizes: tuple[int, int],
    error: BaseException | None,
    ago: int = 0,
) -> None:
    scope = _scope.get()
    save = save or scope.save
    if save is None:
        return
    kind = ""
    if error is not None:
        kind = error.kind if isinstance(error, CkptdError) else type(error).__name__[:64]
    emit(
        Span(
            name=name,
            **save.fields(),
            tier=scope.tier if tier is None else tier,
            start_ns=now_ns() - ago - took,
            duration_ns=took,
            busy_ns=busy,
            bytes=sizes[0],
            referred=sizes[1],
            error=kind,
        )
    )
