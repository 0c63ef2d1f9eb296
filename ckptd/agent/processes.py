"""One process of another: whether it runs, in which state, and how it ended.

The kernel tells of an end at once through a pidfd. How it ended is in ``/proc`` until the parent
has collected the process, and from Linux 6.15 on with the pidfd for as long as that is open.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
from contextlib import suppress
from struct import Struct
from typing import Self

from ckptd.monitor.ring.ring import process_birth

__all__ = ["Process", "exit_code_of"]

# ioctl(pidfd, PIDFD_GET_INFO, struct pidfd_info) of <linux/pidfd.h>, first version of the struct.
_INFO = Struct("<QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
_STAT_BYTES = 2048
_MOST_THREADS = 512
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
_STATE, _BIRTH, _EXIT_CODE = 0, 19, 49  # words behind the name in /proc/PID/stat
_CPU = slice(11, 15)  # user, system, and both of children
_IO_LINES = 2  # rchar and wchar, of /proc/PID/io


class Process:
    """A process that is not our child. Made by `Process.find`; to be closed.

    Its files are of this very process: another one with its number later is never taken for it.

    Attributes
    ----------
    pid
        Its number.
    """

    def __init__(self, pid: int, pidfd: int, stat: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._stat = stat
        self._how: int | None = None

    @classmethod
    def find(cls, pid: int, birth: int) -> Self | None:
        """Return the process `pid` that started at `birth`; None if there is no such any more.

        Parameters
        ----------
        pid
            Number in this process's own space of numbers.
        birth
            As of `ckptd.monitor.ring.ring.process_birth`; 0 if unknown, then any process will do.
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
        # Looked at after both were opened: the number cannot have gone to somebody else between.
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

    def turns(self) -> int:
        """Return how often its threads have given way to others, 0 if that cannot be known."""
        total = 0
        with suppress(OSError):
            for task in os.listdir(f"/proc/{self.pid}/task")[:_MOST_THREADS]:
                with suppress(OSError), open(f"/proc/{self.pid}/task/{task}/status", "rb") as file:
                    total += sum(map(int, _SWITCHES.findall(file.read())))
        return total

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
        """Return whether it has not ended; one that nobody collected yet has."""
        if self._pidfd >= 0:
            poll = select.poll()  # select() knows no descriptors above 1023
            poll.register(self._pidfd, select.POLLIN)
            return not poll.poll(0)
        return self.state() not in ("", "Z", "X")

    def exit_code(self) -> int | None:
        """Return how it ended, negative for a signal; None while it runs or if nobody knows."""
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


def exit_code_of(status: int) -> int:
    """Return the exit code that a wait status stands for, negative for a signal."""
    signal = status & 0x7F
    return -signal if signal else status >> 8 & 0xFF
