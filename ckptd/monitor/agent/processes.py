"""Processes of a node: alive, state, exit code, CPU, I/O, memory, signals awaited, busy or idle.

In it: from which share of CPU or bytes on a process counts as busy.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
from collections.abc import Mapping
from contextlib import suppress
from struct import Struct
from typing import Self

from ckptd.monitor.ring import process_birth

# ioctl(pidfd, PIDFD_GET_INFO, struct pidfd_info) of <linux/pidfd.h>, first version of the struct.
_INFO = Struct("<QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
_STAT_BYTES = 2048
_ENVIRON_BYTES = 1 << 20
_MOST_THREADS = 512
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
_STATE, _PARENT, _FLAGS, _BIRTH, _EXIT_CODE = 0, 1, 6, 19, 49
"""Words behind the name in /proc/PID/stat."""
_EXITING = 0x4  # PF_EXITING of <linux/sched.h>
_SIGNALS = re.compile(rb"^(?:SigPnd|ShdPnd|SigCgt):\s+([0-9a-f]+)$", re.MULTILINE)
_THREADS, _PAGES, _PAGE = 17, 21, os.sysconf("SC_PAGE_SIZE")
_CPU = slice(11, 15)  # user, system, and both of children
_IO_LINES = 2  # rchar and wchar, of /proc/PID/io


class Process:
    """A process that is not our child. Made by `Process.find`; to be closed.

    Its files are of this very process: another one with its number later is never taken for it.

    Attributes
    ----------
    pid, parent
        Its number, and that of the process that had started it when it was found; 0 if unknown.
    """

    def __init__(self, pid: int, pidfd: int, stat: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._stat = stat
        self._how: int | None = None
        words = self._words()
        self.parent = int(words[_PARENT]) if len(words) > _EXIT_CODE else 0

    @classmethod
    def find(cls, pid: int, birth: int) -> Self | None:
        """Return the process `pid` that started at `birth`; None if there is no such any more.

        Parameters
        ----------
        pid
            Number in this process's own space of numbers.
        birth
            As of `ckptd.monitor.ring.process_birth`; 0 if unknown, then any process will do.
        """
        if pid <= 0:
            return None
        pidfd = -1
        with suppress(AttributeError, OSError):  # an old kernel, or no descriptors left
            pidfd = os.pidfd_open(pid)
        try:
            stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            stat = -1
        found = cls(pid, pidfd, stat)
        # Checked after both were opened: the number cannot have gone to another process between.
        if stat < 0 or (birth and process_birth(pid) != birth):
            found.close()
            return None
        return found

    def fileno(self) -> int:
        """Return what becomes readable when the process ends; -1 where the kernel has no such."""
        return self._pidfd

    def state(self) -> str:
        """Return the kernel's letter; empty if the process is gone or may not be looked at."""
        words = self._words()
        return words[_STATE] if words else ""

    def asked_to_end(self, number: int) -> bool:
        """Return whether it may have been sent the signal `number`, as far as the kernel tells.

        One that ends has been, perhaps, and so has one that would not end by it.
        """
        words = self._words()
        if len(words) <= _EXIT_CODE or int(words[_FLAGS]) & _EXITING or not self.runs():
            return True
        try:
            with open(f"/proc/{self.pid}/status", "rb") as file:
                known = [int(mask, 16) for mask in _SIGNALS.findall(file.read())]
        except OSError:
            return True
        return not known or any(mask >> (number - 1) & 1 for mask in known)

    def turns(self) -> int:
        """Return how often its threads have given way to others, 0 if that cannot be known."""
        total = 0
        with suppress(OSError):
            for task in os.listdir(f"/proc/{self.pid}/task")[:_MOST_THREADS]:
                with suppress(OSError), open(f"/proc/{self.pid}/task/{task}/status", "rb") as file:
                    total += sum(map(int, _SWITCHES.findall(file.read())))
        return total

    def usage(self) -> tuple[int, int, int]:
        """Return ticks of CPU so far, resident bytes and threads; zeros where it is gone."""
        words = self._words()
        if len(words) <= _EXIT_CODE:
            return 0, 0, 0
        return sum(map(int, words[_CPU])), int(words[_PAGES]) * _PAGE, int(words[_THREADS])

    def spent(self) -> tuple[int, int]:
        """Return the ticks of CPU that it has used, with children that it has collected, and bytes.

        Bytes are those that it has read and written, whatever from; 0 where that may not be looked
        at.
        """
        words = self._words()
        ticks = sum(map(int, words[_CPU])) if len(words) > _EXIT_CODE else 0
        moved = 0
        with suppress(OSError, ValueError), open(f"/proc/{self.pid}/io", "rb") as file:
            moved = sum(int(line.split()[1]) for line in file.read().splitlines()[:_IO_LINES])
        return ticks, moved

    def runs(self) -> bool:
        """Return whether it has not ended; a zombie has ended."""
        if self._pidfd >= 0:
            poll = select.poll()  # select() knows no descriptors above 1023
            poll.register(self._pidfd, select.POLLIN)
            return not poll.poll(0)
        return self.state() not in ("", "Z", "X")

    def exit_code(self) -> int | None:
        """Return how it ended, negative for a signal; None while it runs or if unknown."""
        if self._how is None and not self.runs():
            self._how = self._from_proc()
            if self._how is None:
                self._how = self._from_pidfd()
        return self._how

    def close(self) -> None:
        """Close its files; harmless when closed."""
        for fd in (self._pidfd, self._stat):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._stat = -1

    def _words(self) -> list[str]:
        if self._stat < 0:
            return []
        try:
            text = os.pread(self._stat, _STAT_BYTES, 0)
        except OSError:  # ESRCH: it has been collected
            return []
        return text.decode(errors="replace").rpartition(")")[2].split()

    def _from_proc(self) -> int | None:
        words = self._words()
        if len(words) <= _EXIT_CODE or words[_STATE] not in ("Z", "X"):
            return None
        return exit_code_of(int(words[_EXIT_CODE])) if words[_EXIT_CODE].isdecimal() else None

    def _from_pidfd(self) -> int | None:
        if self._pidfd < 0:
            return None
        raw = bytearray(_INFO.size)
        raw[:8] = _INFO_EXIT.to_bytes(8, "little")
        try:
            fcntl.ioctl(self._pidfd, _GET_INFO, raw)
        except OSError:  # a kernel before 6.13
            return None
        mask, *_, status = _INFO.unpack(raw)
        return exit_code_of(status) if mask & _INFO_EXIT else None


def environment(pid: int) -> Mapping[str, str]:
    """Return the environment with which a process was started; empty if that is not ours to see."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(_ENVIRON_BYTES).decode(errors="replace").split("\0")
        return {name: value for name, _, value in (word.partition("=") for word in words)}
    return {}


def sleeps(pid: int) -> bool:
    """Return whether all threads of the process `pid` sleep: it is in the middle of nothing."""
    states = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task")[:_MOST_THREADS]:
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[_STATE])
    return bool(states) and all(state == b"S" for state in states)


def exit_code_of(status: int) -> int:
    """Return the exit code that a wait status represents, negative for a signal."""
    signal = status & 0x7F
    return -signal if signal else status >> 8 & 0xFF


# --- what a process does --------------------------------------------------------------------------


_EVERY_S = 1.0
_BUSY_S = 5.0
"""Seconds after its last sign of work that a process counts as busy: it may wait for a disk."""
_LEAST_SHARE = 0.03
"""Of a core; a heartbeat takes a tenth of it."""
_LEAST_BYTES = 4096
_MOST_CHILDREN = 64
_MOST_LOOKED_AT = 64
_TICKS = 100  # of the kernel's clock in /proc, the same on all Linux machines of today


class Doing:
    """Activity of one process; call `look` now and then.

    Attributes
    ----------
    starved_s
        Seconds that it was ready to run and waited for a CPU, since the first look or `forget`:
        of each interval the wait of the thread that waited most.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, int, int] | None = None
        self._delays: dict[str, int] = {}
        self._busy = float("-inf")
        self.starved_s = 0.0

    def forget(self) -> None:
        """Begin again: it has moved, and was not looked at meanwhile."""
        self._before, self._busy, self.starved_s = None, float("-inf"), 0.0

    def look(self, process: Process, interpreted: int, now: float) -> bool:
        """Return whether the process has done something lately.

        Parameters
        ----------
        process
            Which.
        interpreted
            A stamp that moves while its main thread runs Python code.
        now
            Monotonic seconds.
        """
        before = self._before
        if before is None or now - before[0] >= _EVERY_S:
            ticks, moved = _spent(process)
            earlier, self._delays = self._delays, _delays(process.pid)
            self._before = (now, ticks, moved, interpreted)
            if before is not None:
                share = (ticks - before[1]) / _TICKS / (now - before[0])
                wrote = moved - before[2] >= _LEAST_BYTES
                if share >= _LEAST_SHARE or wrote or interpreted != before[3]:
                    self._busy = now
                longest = max((d - earlier.get(t, d) for t, d in self._delays.items()), default=0)
                self.starved_s += min(longest * 1e-9, now - before[0])
        return now - self._busy <= _BUSY_S


def _delays(pid: int) -> dict[str, int]:
    """Return for how many nanoseconds each thread of a process has waited for a CPU so far."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task")[:_MOST_LOOKED_AT]:
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                    found[thread] = int(file.read().split()[1])
    return found


def _spent(process: Process) -> tuple[int, int]:
    """Return ticks of CPU and bytes read and written, of a process and its living children."""
    ticks, moved = process.spent()
    with suppress(OSError, ValueError):
        with open(f"/proc/{process.pid}/task/{process.pid}/children", "rb") as file:
            children = [int(word) for word in file.read().split()]
        for child in children[:_MOST_CHILDREN]:
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{child}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
                ticks += sum(map(int, words[11:15]))
    return ticks, moved
