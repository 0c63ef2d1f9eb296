"""Sees to it that workers do not outlive torchrun's agent, nor their lease.

An agent that is killed cannot end its workers, and they are in sessions of their own: they would
train on, unseen. So a small process waits for the agent's death, and for the end of the lease,
which an agent that is only stopped would not see. It is run by its path, with nothing but the
standard library, since it is started with every agent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterable

__all__ = ["TOKEN_VARIABLE", "children_of", "kill_group", "main", "marked"]

TOKEN_VARIABLE = "CKPTD_TORCHRUN"
"""Marks what an agent has started; its value is the agent's own."""
_LOOK_S = 0.05
_AFTER_S = (0.0, 0.02, 0.05, 0.1, 0.3)
"""Pauses between looks for workers that were being started when their agent died."""
_OURS = (
    b"-m\0ckptd.checkpoint.agent",
    b"-m\0ckptd.monitor.agent.watched",
    b"-m\0ckptd.checkpoint.save.writer",
)
"""Keepers of snapshots, and writers of what was handed over, must outlive a trainer."""


def children_of(pid: int) -> set[int]:
    """Return the processes that `pid` has started and not yet waited for."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.update(int(child) for child in file.read().split())
    except FileNotFoundError:
        # The process has ended, or this kernel has no such list.
        return {p for p in _processes() if _parent(p) == pid}
    except ProcessLookupError:
        return found
    return found


def marked(token: str) -> set[int]:
    """Return the processes that an agent's workers are, or have started, by the agent's mark.

    Not what ckptd has started to outlive trainers.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    return {
        pid
        for pid in _processes()
        if mark in _read(f"/proc/{pid}/environ").split(b"\0")
        and not any(ours in _read(f"/proc/{pid}/cmdline") for ours in _OURS)
    }


def kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a worker and all of its process group, if it leads one of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _processes() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    after_name = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(after_name[1]) if len(after_name) > 1 else 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


def _leased_until(path: str) -> float:
    """Return the moment of CLOCK_MONOTONIC in the lease's file; infinite if none."""
    raw = _read(path)
    number = struct.unpack("=Q", raw)[0] if len(raw) == 8 else 0
    return number / 1e9 if number else float("inf")


def main(agent: int, token: str, lease: str) -> None:
    """Wait for the death of `agent`; kill its workers then, and whenever their lease is over.

    Parameters
    ----------
    agent
        The process that has started this one.
    token
        Its mark.
    lease
        File of the lease; see ``CKPTD_LEASE``.
    """
    mine = os.getpid()
    workers: set[int] = set()
    poller = select.poll()
    # It may have died before this process ran, and its workers live all the same.
    with contextlib.suppress(ProcessLookupError):
        poller.register(os.pidfd_open(agent), select.POLLIN)
    while os.getppid() == agent and not poller.poll(_LOOK_S * 1000):
        workers = children_of(agent) - {mine}
        if time.monotonic() >= _leased_until(lease):
            for pid in marked(token):
                kill_group(pid)
    for pid in workers & marked(token):
        kill_group(pid)
    for pause in _AFTER_S:
        time.sleep(pause)
        for pid in marked(token):
            kill_group(pid)
    shutil.rmtree(os.path.dirname(lease), ignore_errors=True)


if __name__ == "__main__":
    faulthandler.enable(2)
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
