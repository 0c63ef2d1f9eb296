"""A board in a folder: for ranks that are processes, without a job store."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ckptd.errors import DeadlineError

__all__ = ["FileBoard"]


class FileBoard:
    """Keys are files; see `ckptd.base.runtime.ranks.Board`."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._folder = Path(folder)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "+")

    def set(self, key: str, value: bytes) -> None:
        """See `Board`."""
        half = self._folder / f"~{os.getpid()}-{time.monotonic_ns()}"
        half.write_bytes(value)
        half.rename(self._path(key))

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Board`."""
        end = time.monotonic() + timeout_s
        while (value := self.peek(key)) is None:
            if time.monotonic() > end:
                raise DeadlineError("nobody published a value", kind="board", where=key)
            time.sleep(0.005)
        return value

    def peek(self, key: str) -> bytes | None:
        """See `Board`."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """See `Board`."""
        self._path(key).unlink(missing_ok=True)
