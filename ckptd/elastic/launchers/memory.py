"""Out-of-memory kills: finds a killed worker in cgroup counters and the kernel's log.

In it: the message: memory that the worker held, and what its control group may use.

A process that gets SIGKILL cannot say why. The kernel counts its kills for lack of memory, for each
control group and for the machine, and logs the process; how much memory a worker held is looked at
while it lives.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ckptd.base.runtime.host import kill_counts
from ckptd.errors import size_text

_LOG_BYTES = 8192
_MOST_LINES = 20_000
_KILLED = re.compile(r"Killed process (\d+) \((.*?)\).*?anon-rss:(\d+)kB")
_UNLIMITED = 1 << 60
_NEW_S = 30.0


class MemoryWatch:
    """Looks at the memory of processes of this machine, and at kills for lack of it."""

    def __init__(self) -> None:
        self._counts = list(kill_counts())
        self._kills = self._count()
        self._held: dict[int, int] = {}
        """Most bytes that each process was seen to hold."""

    def look(self, pid: int) -> None:
        """Note how much a process holds now; of no effect once it has ended."""
        with suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self._held[pid] = int(line.split()[1]) << 10

    def forget(self, pid: int) -> None:
        """Forget a process that has ended."""
        self._held.pop(pid, None)

    def killed(self, pid: int) -> str:
        """Return why a process got SIGKILL, as far as memory tells; a few words for people.

        To be called once for each such death, soon after it.
        """
        before, self._kills = self._kills, self._count()
        more = [now > was for was, now in zip(before, self._kills, strict=True)]
        # What is free on the machine explains no kill by the limit of a control group.
        facts, logged = self._facts(pid, machine=not any(more[:-1])), _logged(pid)
        if logged or any(more[:-1]):
            words = ", ".join(text for text in (logged, facts) if text)
            return f"killed by the kernel, out of memory (OOM): {words}".rstrip(": ")
        if more[-1]:
            return (
                "most likely out of memory (OOM): the kernel recorded an OOM kill on this machine "
                f"just now: {facts}"
            )
        return f"SIGKILL from another process; the kernel recorded no OOM kill: {facts}"

    def _count(self) -> list[int]:
        """Return the kills that were counted, for each control group that is known and for all."""
        out = [_field(file, "oom_kill") for file in self._counts]
        # Of the whole machine: the only one that is counted where a group has no limit.
        return [*out, _field(Path("/proc/vmstat"), "oom_kill")]

    def _facts(self, pid: int, *, machine: bool) -> str:
        held = self._held.get(pid)
        facts = [f"it held {size_text(held)} at most"] if held else []
        for folder in (file.parent for file in self._counts):
            limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
            if 0 < limit < _UNLIMITED:
                most = _number(folder / "memory.peak") or _number(
                    folder / "memory.max_usage_in_bytes"
                )
                facts.append(
                    f"its control group may use {size_text(limit)}"
                    + (f" and has used {size_text(most)}" if most else "")
                )
                break
        if machine:
            meminfo = Path("/proc/meminfo")
            free, total = _field(meminfo, "MemAvailable:"), _field(meminfo, "MemTotal:")
            facts.append(
                f"{size_text(free << 10)} of the machine's {size_text(total << 10)} are free now"
            )
        return ", ".join(facts)


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _field(path: Path, name: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return 0


def _logged(pid: int) -> str:
    """Return what the kernel's log says of a process that was killed for lack of memory.

    It may be readable by root only, and its numbers are those of the machine, which a
    container's differ from: a line of another process is not taken.
    """
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    found = ""
    try:
        for _ in range(_MOST_LINES):
            try:
                line = os.read(fd, _LOG_BYTES).decode(errors="replace")
            except BrokenPipeError:  # it was overwritten meanwhile; the next one is read
                continue
            except OSError:
                break
            match = _KILLED.search(line)
            if match and int(match[1]) == pid and _is_new(line):
                found = f"it held {size_text(int(match[3]) << 10)}, as the kernel's log says"
            if not line:
                break
    finally:
        os.close(fd)
    return found


def _is_new(line: str) -> bool:
    """Whether a line of the kernel's log is of the last moments: ids are used again."""
    with suppress(ValueError, IndexError):
        return time.monotonic() - int(line.split(",", 3)[2]) / 1e6 < _NEW_S
    return False
