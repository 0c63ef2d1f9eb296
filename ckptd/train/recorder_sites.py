"""Where in the user's program a call comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ckptd.monitor.ring import RingWriter

__all__ = ["Sites"]

_DEEPEST = 48
# Frames of these are not the user's: PyTorch itself, and the recorder.
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).with_name("recorder")))


class Sites:
    """Names call sites by a hash of file and line, the same on all ranks of one program."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._foreign: dict[str, bool] = {}
        self._hashes: dict[tuple[str, int], int] = {}

    def here(self) -> int:
        """Return the hash of the nearest line that is the user's; 0 where there is none.

        Threads that only run PyTorch, as those of autograd, have none.
        """
        frame = sys._getframe(1)
        for _ in range(_DEEPEST):
            file = frame.f_code.co_filename
            if self.foreign(file):
                return self.named(file, frame.f_lineno)
            if frame.f_back is None:
                return 0
            frame = frame.f_back
        return 0

    def foreign(self, file: str) -> bool:
        """Whether a file is the user's."""
        foreign = self._foreign.get(file)
        if foreign is None:
            foreign = self._foreign[file] = not file.startswith(_OURS)
        return foreign

    def named(self, file: str, line: int) -> int:
        """Return the hash of a line."""
        key = (file, line)
        code = self._hashes.get(key)
        if code is None:
            code = self._hashes[key] = self._ring.text(f"{file}:{line}")
        return code
