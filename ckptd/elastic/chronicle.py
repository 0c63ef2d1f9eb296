"""What a controller keeps for people: changes of state, recoveries, goodput, sentences."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ckptd.elastic.goodput import Goodput
from ckptd.elastic.messages import Timed
from ckptd.elastic.splits import Recovery, Splitter
from ckptd.elastic.states import Move, State

__all__ = ["Chronicle"]

_MOST_TOLD = 20
_MOST_MEASURED = 20
_REFUSED_S = 10.0


class Chronicle:
    """Follows a state machine.

    Parameters
    ----------
    events
        File to which each change of state is appended as a line of JSON; None for none. A line is
        written at once and not made durable; once one cannot be written, or the file not opened,
        none is any more, which is said.
    epoch
        Seconds since 1970 at which the moments were 0.
    say
        Is given each sentence for people.
    """

    def __init__(
        self,
        events: Path | None = None,
        *,
        epoch: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._epoch = time.time() - time.monotonic() if epoch is None else epoch
        self._say = say
        self._file: BinaryIO | None = None
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        self._splitter = Splitter(self._epoch)
        self._goodput = Goodput(time.monotonic())
        self._faults = 0
        self._refused_at = -math.inf
        self._first: float | None = None
        self.changes = 0
        """Rises with everything that is kept."""
        if events is not None:
            self._open(events)

    @property
    def told(self) -> tuple[str, ...]:
        """The last sentences for people, the oldest first."""
        return tuple(self._told)

    @property
    def recoveries(self) -> tuple[dict[str, Any], ...]:
        """The last recoveries as plain data, the oldest first."""
        return tuple(msgspec.to_builtins(one) for one in self._splitter.recoveries)

    @property
    def mttr_s(self) -> float:
        """How long the last recoveries from faults took, on average; 0 before the first."""
        faults = [one.total for one in self._splitter.recoveries if not one.planned]
        last = faults[-_MOST_MEASURED:]
        return sum(last) / len(last) if last else 0.0

    def goodput(self, now: float) -> dict[str, float]:
        """Return the seconds of each kind up to `now`."""
        return self._goodput.seconds(now)

    def mtbf_s(self, now: float) -> float:
        """Return the seconds between two faults so far, on average; 0 before the first."""
        if not self._faults or self._first is None:
            return 0.0
        return max(now - self._first, 0.0) / self._faults

    def tell(self, text: str) -> None:
        """Keep a sentence for people."""
        self.changes += 1
        self._told.append(text)
        self._write({"event": "told", "at": time.time(), "text": text})
        if self._say is not None:
            self._say(text)

    def refused(self, text: str) -> None:
        """Keep that a connection was refused; of many in a row, only the first."""
        # Whoever reaches the port can do this without end, and must not fill the disk.
        if time.monotonic() - self._refused_at > _REFUSED_S:
            self._write({"event": "refused", "at": time.time(), "text": text})
            self.tell(f"a connection was refused: {text}")
        self._refused_at = time.monotonic()

    def timed(self, timed: Timed) -> None:
        """Keep how far a node's workers were."""
        self.changes += 1
        self._splitter.marked(timed.generation, timed.marks)
        row = {"generation": timed.generation, "node": timed.node, "marks": timed.marks}
        self._write({"event": "timed", "at": time.time(), **row})

    def committed(self, step: int, now: float) -> None:
        """Keep that a step is committed."""
        self.changes += 1
        self._splitter.made(step)
        self._goodput.committed(now)

    def moved(self, moves: Iterable[Move]) -> None:
        """Keep changes of state."""
        for move in moves:
            self.changes += 1
            row = msgspec.to_builtins(move)
            self._write({"event": "moved", **row, "at": self._epoch + move.at})
            self._count(move)

    def _count(self, move: Move) -> None:
        self._splitter.moved(move)
        self._goodput.moved(move)
        if self._first is None and move.state is State.RUNNING:
            self._first = move.at
        if move.state is State.FENCE and not move.planned:
            self._faults += self._first is not None
        if move.state is State.RUNNING and self._splitter.recoveries:
            last = self._splitter.recoveries[-1]
            if last.after == move.generation:
                self._recovered(last)

    def _recovered(self, recovery: Recovery) -> None:
        self._write({"event": "recovered", **msgspec.to_builtins(recovery)})

    def _open(self, events: Path) -> None:
        try:
            self._file = events.open("ab", buffering=0)
        except OSError as error:
            # A job must not be without a controller for want of a file that people read.
            self.tell(f"no events are kept in {events}: {error.strerror or error}")

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            # A full disk must not end the controller.
            self.close()
            self.tell(f"no more events are kept: {error.strerror or error}")

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
