"""What a rank is about, for a listener that writes it down: the monitor's recorder, once attached.

Where nobody listens each of these reads one name and returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

__all__ = ["ActivityListener", "at_step", "listen", "phase", "regroup"]


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
    """Let `listener` hear all that follows, and no other; None ends that."""
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
