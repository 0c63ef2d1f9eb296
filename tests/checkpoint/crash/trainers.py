"""Trainers of two ranks in one process that dies; their workers are processes and outlive it.

Run as ``python -m tests.checkpoint.crash.trainers JSON``. It prints the workers' process ids as a
JSON list.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveHandle
from tests.checkpoint.crash.life import Life, save_on
from tests.processes import PATIENCE_S

__all__ = ["Trainers", "run_trainers"]


class Trainers(msgspec.Struct, frozen=True):
    """Two lives, and what becomes of rank 0's worker before the trainers die.

    Attributes
    ----------
    worker_0
        ``stop`` (SIGSTOP) or ``kill`` it, once its part is there and rank 1's is not begun; or
        ``idle``: rank 0 does not save at all. Rank 1's part is there when the trainers die.
    """

    lives: tuple[Life, Life]
    worker_0: str


def run_trainers(trainers: Trainers) -> list[int]:
    """Run them to their death; return the process ids of the workers."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.checkpoint.crash.trainers",
            msgspec.json.encode(trainers).decode(),
        ],
        stdout=subprocess.PIPE,
        timeout=2 * PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == -signal.SIGKILL, ended.returncode
    return [int(pid) for pid in json.loads(ended.stdout)]


def _wait_written(handle: SaveHandle) -> None:
    limit = time.monotonic() + PATIENCE_S
    # Between two looks the other worker may have committed it as well.
    while handle.progress.phase not in ("committing", "durable"):
        if time.monotonic() > limit or handle.done:
            raise RuntimeError(f"never written: {handle.progress}, {handle.error}")
        time.sleep(0.005)


def main() -> None:
    """Save, do to worker 0 what is wanted, die."""
    trainers = msgspec.json.decode(sys.argv[1], type=Trainers)
    first = LocalBoard(0, 2)
    boards = [first, LocalBoard(1, 2, first)]
    clients = [
        WriterClient(life.spec.wrapped(life.faults) if life.faults else life.spec, board)
        for life, board in zip(trainers.lives, boards, strict=True)
    ]
    if trainers.worker_0 != "idle":
        _wait_written(save_on(clients[0], trainers.lives[0]))
    if trainers.worker_0 == "stop":
        os.kill(clients[0].pid, signal.SIGSTOP)
    _wait_written(save_on(clients[1], trainers.lives[1]))
    print(json.dumps([c.pid for c in clients]), flush=True)
    if trainers.worker_0 == "kill":
        os.kill(clients[0].pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
