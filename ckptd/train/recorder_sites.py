"""Where in the user's program a call comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

from ckptd.monitor.ring import RingWriter

__all__ = ["Sites"]

_DEEPEST = 48
# Programs that make code as they run would else be held in memory with all of it.
_MOST_CODES = 4096
# Frames of these are not the user's: PyTorch itself, and the recorder.
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).with_name("recorder")))


class Sites:
    """Names call sites by a hash of file and line, the same on all ranks of one program."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._foreign: dict[str, bool] = {}
        self._hashes: dict[tuple[str, int], int] = {}
        # By the address of a code object, which is held so that no other gets it: that object, and
        # hashes by the place in it. To ask a frame for its line takes as long as its function is.
        self._places: dict[int, tuple[CodeType, dict[int, int]]] = {}

    def here(self, above: int = 1) -> int:
        """Return the hash of the nearest line that is the user's; 0 where there is none.

        Threads that only run PyTorch, as those of autograd, have none. `above` is how many of the
        frames that call this are known to be no user's.
        """
        frame = sys._getframe(above).f_back
        known = self._foreign
        for _ in range(_DEEPEST):
            if frame is None:
                return 0
            code = frame.f_code
            foreign = known.get(code.co_filename)
            if foreign is None:
                foreign = self.foreign(code.co_filename)
            if foreign:
                places = self._places.get(id(code))
                if places is not None:
                    site = places[1].get(frame.f_lasti)
                    if site is not None:
                        return site
                return self._place(code, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        return 0

    def _place(self, code: CodeType, at: int, line: int) -> int:
        """Return the hash of a line, and remember it by its place."""
        site = self.named(code.co_filename, line)
        if len(self._places) >= _MOST_CODES:
            self._places.clear()
        self._places.setdefault(id(code), (code, {}))[1][at] = site
        return site

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
