"""Worker threads: what is left behind where the caller is cut short."""

from __future__ import annotations

import threading
import time

import pytest

from ckptd.base.runtime.pool import run_all
from tests.processes import PATIENCE_S


def test_nothing_is_written_once_an_interrupted_call_has_ended() -> None:
    """A task that went on would write to memory that the next load has filled."""
    begun = threading.Event()
    ended: list[int] = []

    def work(task: int) -> None:
        begun.set()
        time.sleep(0.2)
        ended.append(task)

    def interrupt() -> int:
        begun.wait(PATIENCE_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([1, 2], work, threads=1, stall_s=10.0, what="x", pulse=interrupt, leave_s=10.0)
    assert ended == [1]
