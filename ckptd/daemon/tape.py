"""The last messages as they came: what the timeline, the trace and a recording are made of."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

__all__ = ["Frame", "Tape"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes
    ----------
    at
        When it came, monotonic seconds.
    kind
        ``sheet`` or ``found``.
    body
        Its bytes.
    """

    at: float
    kind: str
    body: bytes


class Tape:
    """Keeps the newest frames, as many as `most_bytes` hold; may be used by several threads."""

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._frames: deque[Frame] = deque()
        self._lock = threading.Lock()

    def add(self, frame: Frame) -> None:
        """Keep a frame; the oldest ones go where there is no room."""
        with self._lock:
            self._frames.append(frame)
            self._bytes += len(frame.body)
            while self._bytes > self._most:
                self._bytes -= len(self._frames.popleft().body)

    def since(self, at: float) -> list[Frame]:
        """Return the frames that came at `at` or later, oldest first."""
        with self._lock:
            out: list[Frame] = []
            for frame in reversed(self._frames):
                if frame.at < at:
                    break
                out.append(frame)
        return out[::-1]

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes
