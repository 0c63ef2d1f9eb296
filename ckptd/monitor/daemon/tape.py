"""Newest messages of agents, up to a number of bytes, for recordings and traces."""

from __future__ import annotations

import threading
from collections import deque

from ckptd.errors import StoreError
from ckptd.monitor.recording import RecordedFrame, RecordingWriter

_FRAME_BYTES = 100
"""Bytes of a frame besides its body."""


class MessageBuffer:
    """Keeps the newest frames, as many as `most_bytes` hold; may be used by several threads.

    Parameters
    ----------
    most_bytes
        Of all frames together.
    file
        Where every frame is recorded as well, until that fails.

    Attributes
    ----------
    failed
        Why nothing is recorded to the file any more; None as long as it is.
    """

    def __init__(self, most_bytes: int = 64 << 20, file: RecordingWriter | None = None) -> None:
        self.failed: StoreError | None = None
        self._most = most_bytes
        self._bytes = 0
        self._frames: deque[RecordedFrame] = deque()
        self._lock = threading.Lock()
        self._file = file

    def add(self, frame: RecordedFrame) -> None:
        """Keep a frame; the oldest ones go where there is no room."""
        with self._lock:
            self._frames.append(frame)
            self._bytes += len(frame.body) + _FRAME_BYTES
            while self._bytes > self._most:
                self._bytes -= len(self._frames.popleft().body) + _FRAME_BYTES
            if self._file is not None and self.failed is None:
                try:
                    self._file.add(frame)
                except StoreError as error:
                    self.failed = error

    def since(self, at: float) -> list[RecordedFrame]:
        """Return the frames that came at `at` or later, oldest first."""
        with self._lock:
            out: list[RecordedFrame] = []
            for frame in reversed(self._frames):
                if frame.at < at:
                    break
                out.append(frame)
        return out[::-1]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
