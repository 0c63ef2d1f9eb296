"""Which processes live, as the kernel says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["agents_in", "lives", "stop"]


def lives(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP; returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 30.0
    while any(_state(task) not in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end, "the process does not stop"
        time.sleep(0.005)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def agents_in(folder: Path) -> list[int]:
    """Return the node agents whose sockets lie in `folder`."""
    wanted = [b"ckptd.agent", str(folder).encode()]
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and lives(int(name)):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(word in words for word in wanted):
                found.append(int(name))
    return found
