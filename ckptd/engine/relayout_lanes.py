"""The buffers that messages are sent from and received into: two a lane, so that work overlaps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.relayout_stream import Window
from ckptd.engine.relayout_watch import Watch
from ckptd.engine.transport import Pending, Transport
from ckptd.errors import CkptdError

__all__ = ["BUFFERS", "Intake", "Lane"]

U8 = NDArray[np.uint8]

BUFFERS = 4
"""Buffers of both lanes."""

Planned = tuple[list[Window], list[tuple[Window, int, int]]]
"""A message, and where each of its windows lies."""


class Lane:
    """Two buffers that are sent from, one after the other."""

    def __init__(
        self, transport: Transport, limit: int, watch: Watch, stop: threading.Event
    ) -> None:
        self._transport = transport
        self._watch = watch
        self._stop = stop
        self._buffers = [np.empty(limit, dtype=np.uint8) for _ in range(2)]
        self._pending: list[tuple[Pending, int] | None] = [None, None]
        self._turn = 0

    def buffer(self) -> U8:
        """Return the next buffer, as soon as it is free."""
        self._wait(self._turn)
        return self._buffers[self._turn]

    def send(self, peer: int, nbytes: int) -> None:
        """Begin to send the buffer that `buffer` gave."""
        data = self._buffers[self._turn][:nbytes]
        self._pending[self._turn] = (self._transport.send(peer, data), peer)
        self._turn = 1 - self._turn

    def send_bytes(self, peer: int, data: U8) -> None:
        """Send some bytes, in as many messages as it takes."""
        limit = len(self._buffers[0])
        for at in range(0, len(data), limit):
            part = data[at : at + limit]
            self.buffer()[: len(part)] = part
            self.send(peer, len(part))

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for turn in (self._turn, 1 - self._turn):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        if self._stop.is_set():
            raise CkptdError("the move has ended on this rank", kind="transport")
        pending = self._pending[turn]
        if pending is not None:
            self._watch.through(*pending, "sending")
            self._pending[turn] = None


class Intake:
    """Two buffers that are received into."""

    def __init__(self, transport: Transport, limit: int, watch: Watch) -> None:
        self._transport = transport
        self._limit = limit
        self._watch = watch
        self._buffers = [np.empty(limit, dtype=np.uint8) for _ in range(2)]

    def receive_bytes(self, peer: int, nbytes: int) -> U8:
        """Return some bytes."""
        out = np.empty(nbytes, dtype=np.uint8)
        for at in range(0, nbytes, self._limit):
            part = out[at : at + self._limit]
            self._watch.through(self._transport.receive(peer, part), peer, "receiving")
        return out

    def receive(self, peer: int, planned: Iterator[Planned]) -> Iterator[tuple[Planned, U8]]:
        """Yield messages and their bytes; the next is on its way while one is looked at."""
        free = deque(self._buffers)
        waiting: deque[tuple[Planned, U8, U8, Pending]] = deque()
        more = True
        while True:
            while more and free:
                plan = next(planned, None)
                if plan is None:
                    more = False
                    break
                _, at, length = plan[1][-1]
                buffer = free.popleft()
                data = buffer[: at + length]
                waiting.append((plan, buffer, data, self._transport.receive(peer, data)))
            if not waiting:
                return
            plan, buffer, data, pending = waiting.popleft()
            self._watch.through(pending, peer, "receiving")
            yield plan, data
            free.append(buffer)
