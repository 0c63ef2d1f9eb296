"""What the threads of a rank are doing, asked of the kernel and of py-spy and never of the rank.

A rank that is stopped, spins, or holds the GIL is looked at all the same, and is not disturbed:
py-spy reads its memory without stopping it. Where the kernel forbids that, the text says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ckptd.monitor.report import Stack

__all__ = ["py_spy", "take_stack", "take_stacks"]

TIMEOUT_S = 5.0
_AT_ONCE = 4
_MOST_CHARACTERS = 1 << 16
_MOST_THREADS = 64
_STATUS = ("State:", "Threads:", "VmRSS:", "VmSwap:", "TracerPid:")
_FORBIDDEN = ("Permission denied", "Operation not permitted", "EPERM")


def take_stacks(pids: Iterable[tuple[int, int]], timeout_s: float = TIMEOUT_S) -> dict[int, Stack]:
    """Return the stacks of ranks, by rank.

    Parameters
    ----------
    pids
        Ranks and their processes.
    timeout_s
        For each of them; several are looked at at once.
    """
    wanted = dict(pids)
    with ThreadPoolExecutor(_AT_ONCE, "ckptd-stacks") as pool:
        found = pool.map(lambda pid: take_stack(pid, timeout_s), wanted.values())
        return dict(zip(wanted, found, strict=True))


def take_stack(pid: int, timeout_s: float = TIMEOUT_S) -> Stack:
    """Return the stacks of one process; never raises: why there are none is the text."""
    began = time.monotonic()
    kernel = _kernel(pid)
    if not kernel:
        return Stack(text=f"process {pid} has ended\n")
    python, taken = _python(pid, timeout_s)
    return Stack(
        text=_short(f"{python}\n{kernel}"),
        how="py-spy" if taken else "kernel",
        taken_s=time.monotonic() - began,
    )


def py_spy() -> str | None:
    """Return where py-spy is: beside this Python, or on the path; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _python(pid: int, timeout_s: float) -> tuple[str, bool]:
    """Return stacks of Python, and whether they could be had."""
    program = py_spy()
    if program is None:
        return "no stacks of Python: py-spy, of the extra monitor, is not installed\n", False
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no stacks of Python: py-spy was not done after {timeout_s:.0f} s\n", False
    except OSError as error:
        return f"no stacks of Python: {program}: {error.strerror}\n", False
    if done.returncode == 0:
        return done.stdout.decode(errors="replace"), True
    said = done.stderr.decode(errors="replace").strip()[-1000:]
    if any(word in said for word in _FORBIDDEN):
        said += "\n(a container without CAP_SYS_PTRACE, or kernel.yama.ptrace_scope, forbids it)"
    return f"no stacks of Python: py-spy says: {said}\n", False


def _kernel(pid: int) -> str:
    """Return what the kernel shows of a process and its threads; empty if it is gone."""
    place = Path(f"/proc/{pid}")
    try:
        status = (place / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    lines = ["In the kernel:", *(f"  {line}" for line in status if line.startswith(_STATUS))]
    threads = []
    with suppress(OSError):
        threads = sorted(os.listdir(place / "task"), key=int)[:_MOST_THREADS]
    lines += [_thread(place / "task" / thread) for thread in threads]
    return "\n".join([*lines, *_frames(place / "stack")]) + "\n"


def _thread(place: Path) -> str:
    """Return one line: where a thread is in the kernel."""
    try:
        stat = (place / "stat").read_text(errors="replace")
        name, _, rest = stat.partition("(")[2].rpartition(")")
        where = (place / "wchan").read_text(errors="replace").strip()
    except OSError as error:
        return f"  thread {place.name}: {error.strerror}"
    doing = f"in {where}" if where not in ("", "0") else "not waiting in the kernel, or not told"
    return f"  thread {place.name} {name!r}: {rest.split()[0]}, {doing}"


def _frames(path: Path) -> list[str]:
    """Return the main thread's stack in the kernel, where we may see it: root only."""
    try:
        return ["  main thread:", *(f"    {line}" for line in path.read_text().splitlines())]
    except OSError:
        return []


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[: half - 100]}\n... cut ...\n{text[-half:]}"
