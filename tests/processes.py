"""Processes of the tests: which live, how they are ended, and waiting for what they do."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

__all__ = [
    "LEASE_S",
    "PATIENCE_S",
    "agents_in",
    "free_port",
    "kill",
    "lives",
    "stop",
    "until",
    "wait_for_end",
    "wait_for_stop",
]

T = TypeVar("T")
PATIENCE_S = 240.0
"""Less than a test's own time-out, which shows the stacks, while this says what was waited for."""
LEASE_S = 2.5 * PATIENCE_S
"""Of a job that must not wait for its lease: a recovery that does is given up first."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


def until(
    ask: Callable[[], T],
    what: str | Callable[[], str] = "",
    within_s: float = PATIENCE_S,
    *,
    turn: Callable[[], object] | None = None,
) -> T:
    """Ask again until the answer is true, and return it.

    Parameters
    ----------
    ask
        What is asked.
    what
        What is waited for, or a function that returns it once the wait was in vain (a log, say).
    within_s
        Seconds after which `TimeoutError` is raised.
    turn
        Called between two questions in place of a pause, by a test that turns a loop itself.
    """
    end = time.monotonic() + within_s
    pause = _FIRST_PAUSE_S
    while not (answer := ask()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {within_s:g} s: {what() if callable(what) else what}")
        if turn is not None:
            turn()
        else:
            time.sleep(pause)
            # What takes long is asked for seldom: on a busy machine the questions cost it time.
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    return answer


def free_port() -> int:
    """Return a port of the loopback address that was free a moment ago.

    It lies below the range from which the kernel chooses ports: a port of that range may get
    another owner before the test binds it.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = [*range(10_000, int(given[0]))] or [0]
    for _ in range(100):
        with suppress(OSError):
            with socket.create_server(("127.0.0.1", secrets.choice(ports))) as server:
                port: int = server.getsockname()[1]
            return port
    raise OSError("100 ports of the loopback address were tried, and none is free")


def lives(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and is not yet waited for does not."""
    return _state(Path(f"/proc/{pid}")) not in "ZX"


def kill(pid: int) -> None:
    """Kill a process; returns when it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    """Return when a process has ended, though its parent may not have waited for it."""
    until(lambda: not lives(pid), f"process {pid} ends")


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP; returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_for_stop(pid)


def wait_for_stop(pid: int) -> None:
    """Return when no thread of a process runs any more, since it was stopped."""
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(task) in "TtZX" for task in tasks.iterdir()), f"process {pid} stops")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def agents_in(folder: Path) -> list[int]:
    """Return the node agents whose sockets lie in `folder`."""
    wanted = [b"ckptd.checkpoint.agent", str(folder).encode()]
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
