"""Processes that do nothing but compute, beside a job that is watched."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

__all__ = ["Load"]

_BURN = "while True:\n    sum(range(100000))"


class Load:
    """Keeps `number` processors busy until it is left."""

    def __init__(self, number: int) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-c", _BURN], stdin=subprocess.DEVNULL)
            for _ in range(number)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
