"""Words of rank 0 that the other ranks take ahead, so that no call waits for them.

In it: how many calls ahead; how long it is waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

import msgspec

from ckptd.base.runtime.ranks import Board, posted
from ckptd.decoding import msgpack_decoder

AHEAD = 2
"""Rank 0 decides this many calls ahead, so that the others find the answer and do not wait."""
LOOK_S = 1.0
"""Time between two announcements in seconds, as far as steps allow."""
_LONGEST_STRIDE = 100
_PATIENCE_S = 600.0
_KEPT = 64
_told = msgpack_decoder(tuple[str, int])

Decide = Callable[[Collection[str]], str]
"""Given what is announced and has not taken effect, returns a word, or nothing."""


class Announcements:
    """A word for some calls; each names the call of the next one.

    Thousands of ranks that step a hundred times a second must not read the board each time, so rank
    0 chooses the calls about a second apart. It announces `AHEAD` calls before, and in training
    whose steps take that second, where the wait is nothing and a grace time is short, at that very
    call.

    Parameters
    ----------
    name
        Tells several announcers of one board apart.
    """

    def __init__(self, board: Board, name: str = "due") -> None:
        self._board = board
        self._name = name
        self._call = 0
        self._look = 1
        self._unannounced = 1
        self._announced: dict[int, tuple[str, int]] = {}
        self._old: deque[int] = deque()

    def word(self, decide: Decide, step_s: float | None) -> str:
        """Return the word for this call, ``""`` for most; every rank asks at each call.

        Parameters
        ----------
        decide
            Called on rank 0 only.
        step_s
            Usual seconds between two calls, as rank 0 knows them.
        """
        self._call += 1
        if self._board.world == 1:
            return decide(())
        if self._board.rank == 0:
            self._announce(decide, step_s)
        if self._call < self._look:
            return ""
        word, self._look = self._take(self._look)
        return word

    def _announce(self, decide: Decide, step_s: float | None) -> None:
        stride, ahead = _pace(step_s)
        while self._unannounced <= self._call + ahead:
            word = decide([w for w, _ in self._announced.values() if w])
            look, self._unannounced = self._unannounced, self._unannounced + stride
            self._announced[look] = (word, self._unannounced)
            told = msgspec.msgpack.encode((word, self._unannounced))
            self._board.set(f"{self._name}/{look}", told)
            self._old.append(look)
        while len(self._old) > _KEPT:
            self._board.delete(f"{self._name}/{self._old.popleft()}")

    def _take(self, look: int) -> tuple[str, int]:
        if self._board.rank == 0:
            return self._announced.pop(look)
        raw = self._board.get(f"{self._name}/{look}", _PATIENCE_S)
        return posted(_told, raw)


def _pace(step_s: float | None) -> tuple[int, int]:
    """Return the calls between two announcements, and how many calls ahead they are made."""
    if step_s is None:
        return 1, AHEAD
    if step_s >= LOOK_S:
        return 1, 0
    return min(_LONGEST_STRIDE, max(1, int(LOOK_S / max(step_s, 1e-6)))), AHEAD
