"""`WeightCarrier`: contract of another way for the bytes than a server's socket.

Servers always say which version there is, and which ranks hold it. A carrier brings the parts
of tensors themselves: over a process group, or by a device's or a network's own means. It reads a
slot that is held, and is asked for blocks, as one-sided transports are.
`ckptd.testing.carrier` has the tests that every carrier has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.save.arena import Slot
from ckptd.publish.link import ServerLink, VersionMemory
from ckptd.publish.messages import BlockRead, PublishedTensor

U8 = NDArray[np.uint8]
T = TypeVar("T")

PartsReader = Callable[[int, Sequence[PublishedTensor], Sequence[BlockRead]], U8]
"""``(version, tensors, blocks) -> bytes``: reads slots of this rank; raises where it cannot."""


class SlotReader(Protocol):
    """A worker's access to one rank of the publisher; see `ckptd.publish.link.ServerLink`."""

    @property
    def local(self) -> bool:
        """Whether memory can be mapped."""

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """Return the server's answer to a question."""

    def map(self, number: int) -> VersionMemory:
        """Return the memory of a version."""

    def reads(
        self, number: int, requests: Iterable[tuple[tuple[BlockRead, ...], U8]]
    ) -> Iterator[U8]:
        """Fill each buffer with parts of the tensors that were asked after last, and yield it."""


class LinkedReader:
    """A `SlotReader` but for `reads`: asks the server of a rank all else.

    Parameters
    ----------
    link
        To that server.
    """

    local = False

    def __init__(self, link: ServerLink) -> None:
        self._link = link

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """See `SlotReader`."""
        return self._link.ask(question, kind, wait_s)

    def map(self, number: int) -> VersionMemory:
        """See `SlotReader`."""
        return self._link.map(number)


class WeightCarrier(Protocol):
    """Made by every rank of the publisher and of its workers, at the same time."""

    def serve(self, read: PartsReader) -> None:
        """Answer what workers ask of this rank of the publisher, until `close`."""

    def expose(self, slot: Slot) -> None:
        """Allow workers to read a slot themselves, where they can: it has just been made.

        Its control page tells which version is in it; see `ckptd.publish.link.MappedVersion`.
        """

    def fill(self, slot: Slot, tensors: Iterable[tuple[int, Any]]) -> Callable[[], object]:
        """Copy tensors of a version, each with its first byte, to where `expose` allows reads.

        Behind what the current streams of their devices have by now. What this returns waits for
        it: it is called by another thread, before the version is whole.
        """

    def withdraw(self, slot: Slot) -> None:
        """Refuse reads of a slot from now on: its memory goes next."""

    def reader(self, giver: int, link: Any) -> SlotReader:
        """Return what reads from a rank of the publisher; `link` is to its server."""

    def close(self) -> None:
        """End it. Idempotent."""
