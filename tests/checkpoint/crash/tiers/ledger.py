"""What trainers were promised, outside of every process that may die: one line a fact, synced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = [
    "Begun",
    "Claiming",
    "Closed",
    "Fact",
    "Held",
    "Killed",
    "Ledger",
    "Promised",
    "Raised",
    "Refused",
    "Restored",
    "Started",
]


class _Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag=True):
    life: int
    rank: int = -1


class Started(_Fact, frozen=True, kw_only=True, tag=True):
    """The orchestrator lets a life begin; `nodes` by rank."""

    nodes: tuple[int, ...]
    clean: bool
    """Nobody is to be killed in it."""


class Restored(_Fact, frozen=True, kw_only=True, tag=True):
    """A rank has loaded, or found nothing (`step` 0)."""

    step: int
    generation: int = 0
    digest: str = ""
    writer: int = -1
    """Life that wrote what was loaded, as the state itself says."""
    snapshot: bool = False
    sources: dict[str, int] = {}


class Claiming(_Fact, frozen=True, kw_only=True, tag=True):
    """Rank 0 is about to continue from `step`: what is later may leave the line at any moment."""

    step: int


class Begun(_Fact, frozen=True, kw_only=True, tag=True):
    """A rank is about to save a state."""

    step: int
    digest: str
    train: str
    """Digest without what differs between lives."""


class Held(_Fact, frozen=True, kw_only=True, tag=True):
    """A rank has handed a save over to the agent that is process `agent`."""

    step: int
    generation: int
    attempt: str
    agent: int
    near: tuple[str, ...]
    root: bool


class Promised(_Fact, frozen=True, kw_only=True, tag=True):
    """A handle says that every rank's share is on a tier."""

    step: int
    generation: int
    attempt: str
    tier: str


class Refused(_Fact, frozen=True, kw_only=True, tag=True):
    """A handle says that a tier will not have the save."""

    step: int
    tier: str
    kind: str
    message: str = ""


class Raised(_Fact, frozen=True, kw_only=True, tag=True):
    """A call of the checkpointer raised."""

    call: str
    step: int
    kind: str
    message: str = ""


class Closed(_Fact, frozen=True, kw_only=True, tag=True):
    """A rank has come to its end; what its handles still called pending, by step."""

    pending: dict[int, tuple[str, ...]] = {}
    last: int = 0


class Killed(_Fact, frozen=True, kw_only=True, tag=True):
    """Written before the signals are sent."""

    arm: int
    victims: str
    moment: str
    pids: dict[str, int]
    folders: tuple[int, ...] = ()


Fact = Started | Claiming | Restored | Begun | Held | Promised | Refused | Raised | Closed | Killed


class Ledger:
    """Appended to by every process; a line is whole or not there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, fact: Fact) -> None:
        """Append; on disk when it returns."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, msgspec.json.encode(fact) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self) -> Iterator[Fact]:
        """Yield all facts so far, in order."""
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                yield msgspec.json.decode(line, type=Fact)
