"""Messages between the ranks of one host, through shared memory.

Each rank has a segment with two slots that it sends from. A slot holds one message: for whom, how
long, its number; the receiver copies it out and writes the number back, and the slot is free. A
number is written after everything that it speaks of.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.ranks import Board, identity, liveness
from ckptd.checkpoint.load.hostgroup import SharedMemory
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, UsageError
from ckptd.reshard.live.transport import PendingMessage, gone

__all__ = ["ShmTransport"]

_posts = msgpack_decoder(tuple[str, int, tuple[int, str, str]])

U8 = NDArray[np.uint8]

_SLOTS = 2
_HEAD = 4096
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_SPINS = 50
_NUMBER, _PEER, _LENGTH, _TAKEN = range(4)


class _Segment:
    """The slots of one rank."""

    def __init__(self, memory: SharedMemory, message_bytes: int) -> None:
        self._memory = memory
        heads = memory.array[: _SLOTS * 64].view(np.int64).reshape(_SLOTS, 8)
        self.heads: NDArray[np.int64] = heads
        body = memory.array[_HEAD:]
        self.slots = [body[i * message_bytes : (i + 1) * message_bytes] for i in range(_SLOTS)]


class ShmTransport:
    """See `ckptd.reshard.live.transport.Transport`.

    Parameters
    ----------
    board
        Of the ranks, which are all on one host.
    key
        Unique to this transport, the same on all ranks.
    timeout_s
        For all ranks to be there, in seconds.
    """

    buffers = _SLOTS

    def __init__(self, board: Board, key: str, timeout_s: float = 300.0) -> None:
        self.rank, self.world = board.rank, board.world
        self._board = board
        self._key = key
        self._timeout_s = timeout_s
        self._own: _Segment | None = None
        self._peers: dict[int, _Segment] = {}
        self._alive: dict[int, Callable[[], bool] | None] = {}
        self._sent = 0
        self._sends: deque[_Message] = deque()
        self._receives: dict[int, deque[_Message]] = {}
        self._memory: SharedMemory | None = None

    def begin(self, message_bytes: int) -> None:
        """See `ckptd.reshard.live.transport.Transport`.

        Raises
        ------
        StoreError
            There is no room for the segment, or another rank's cannot be opened.
        """
        size = _HEAD + _SLOTS * message_bytes
        memory = SharedMemory.create(size)
        self._memory = memory
        memory.array[:_HEAD] = 0
        self._own = _Segment(memory, message_bytes)
        post = msgspec.msgpack.encode((memory.path, message_bytes, identity()))
        try:
            self._set("there", post)
            for peer in range(self.world):
                raw = self._get("there", peer)
                path, their_bytes, process = _posts.decode(raw)
                if their_bytes != message_bytes:
                    raise UsageError(
                        "ranks have different budgets",
                        wanted=f"messages of {message_bytes} bytes as on rank {self.rank}",
                        found=f"{their_bytes} bytes on rank {peer}",
                    )
                if peer != self.rank:
                    self._alive[peer] = liveness(process)
                    self._peers[peer] = _Segment(SharedMemory.open(path, size), message_bytes)
            # The names go once everybody has everything open: a killed job leaves nothing.
            self._set("open", b"yes")
            for peer in range(self.world):
                self._get("open", peer)
        finally:
            memory.unlink()

    def _set(self, what: str, value: bytes) -> None:
        self._board.set(f"{self._key}/{what}/{self.rank}", value)

    def _get(self, what: str, peer: int) -> bytes:
        return self._board.get(f"{self._key}/{what}/{peer}", self._timeout_s)

    def send(self, peer: int, data: U8) -> PendingMessage:
        """See `ckptd.reshard.live.transport.Transport`."""
        pending = _Message(peer, data, self._pump, self._check_slots)
        self._sends.append(pending)
        self._pump()
        return pending

    def receive(self, peer: int, into: U8) -> PendingMessage:
        """See `ckptd.reshard.live.transport.Transport`."""
        pending = _Message(peer, into, lambda: self._take_all(peer), lambda: self._check(peer))
        self._receives.setdefault(peer, deque()).append(pending)
        return pending

    def close(self) -> None:
        """See `ckptd.reshard.live.transport.Transport`."""
        if self._memory is not None:
            self._memory.unlink()
        self._own, self._memory = None, None
        self._peers.clear()

    # --- slots ----------------------------------------------------------------------------------

    def _segment(self, peer: int | None = None) -> _Segment:
        found = self._own if peer is None else self._peers.get(peer)
        if found is None:
            raise UsageError("a transport is used before it began or after its end", kind="closed")
        return found

    def _pump(self) -> None:
        """Put waiting messages into free slots, in order."""
        own = self._segment()
        while self._sends:
            number = self._sent + 1
            head = own.heads[number % _SLOTS]
            if head[_TAKEN] != head[_NUMBER]:
                return
            pending = self._sends.popleft()
            slot = own.slots[number % _SLOTS]
            if len(pending.data) > len(slot):
                raise UsageError("a message is too long", found=f"{len(pending.data)} bytes")
            slot[: len(pending.data)] = pending.data
            head[_PEER], head[_LENGTH] = pending.peer, len(pending.data)
            head[_NUMBER] = self._sent = number
            pending.done = True

    def _take_all(self, peer: int) -> None:
        """Take all messages of a rank that are there and waited for."""
        waiting = self._receives[peer]
        while waiting:
            before = len(waiting)
            self._take(peer)
            if len(waiting) == before:
                return

    def _take(self, peer: int) -> None:
        """Take the next message of a rank for this one, if it is there."""
        found = self._segment(peer)
        mine = [(n, i) for i, h in enumerate(found.heads) if (n := self._waits(h))]
        if not mine:
            return
        number, slot = min(mine)
        head = found.heads[slot]
        pending = self._receives[peer].popleft()
        if int(head[_LENGTH]) != len(pending.data):
            raise CkptdError(
                "a message has another length than was expected",
                where=f"from rank {peer}",
                wanted=f"{len(pending.data)} bytes",
                found=f"{int(head[_LENGTH])} bytes",
            )
        pending.data[:] = found.slots[slot][: len(pending.data)]
        head[_TAKEN] = number
        pending.done = True

    def _waits(self, head: NDArray[np.int64]) -> int:
        """Return the number of a slot's message if it waits for this rank; 0 if not.

        For whom it is must be read before it is known that nobody has taken it: the slot may have
        another message meanwhile, the number of which is not there yet.
        """
        number, peer = int(head[_NUMBER]), int(head[_PEER])
        return number if peer == self.rank and head[_TAKEN] != number else 0

    def _check_slots(self) -> None:
        """Raise when a rank is gone that has not emptied its slot."""
        for head in self._segment().heads:
            if head[_NUMBER] != head[_TAKEN]:
                self._check(int(head[_PEER]))

    def _check(self, peer: int) -> None:
        alive = self._alive.get(peer)
        if alive is not None and not alive():
            raise gone(peer, "its process has ended")


class _Message:
    """A message that waits for its slot, or to be put into one.

    Parameters
    ----------
    attempt
        Gets on with all messages of its kind, if that is possible now.
    suspects
        Raises when a rank is gone without which it cannot get on.
    """

    def __init__(
        self,
        peer: int,
        data: U8,
        attempt: Callable[[], None],
        suspects: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.data = data
        self.done = False
        self._attempt = attempt
        self._suspects = suspects

    def wait(self, timeout_s: float) -> bool:
        """See `ckptd.reshard.live.transport.PendingMessage`."""
        end = time.monotonic() + timeout_s
        pause, tries = _FIRST_PAUSE_S, 0
        while not self._through():
            if time.monotonic() >= end:
                self._suspects()
                return False
            tries += 1
            time.sleep(0 if tries < _SPINS else pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S) if tries >= _SPINS else pause
        return True

    def _through(self) -> bool:
        if not self.done:
            self._attempt()
        return self.done
