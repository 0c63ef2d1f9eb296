"""`Worker`: one process and its group: signals, SIGKILL, whether it is dead or stopped."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ckptd.elastic.messages import RankAssignment
from ckptd.elastic.workerend import WorkerEnd


@dataclass
class Worker:
    """One process that is, was or will be a rank.

    Attributes
    ----------
    number
        Its name between launcher and zygote.
    generation, seat, local_rank
        What it runs, or ran last.
    slot
        Of its node, by which its local rank names a device; None where there are not so many.
    pid, pidfd
        0 and -1 until the zygote has forked it.
    gate
        Where the rest of its environment is written; -1 once that is done.
    end
        Its connection; None while there is none.
    session
        Whether it can leave its generation without ending.
    out
        Whether it has.
    killed
        Whether this launcher has killed it.
    dead
        Whether it is known not to run.
    code
        Its exit code, negative for a signal; None until the zygote has told.
    fresh
        Whether its process was made for its generation.
    failed
        Whether its device has failed it.
    error_file
        Where it leaves its exception, if its program uses torch's ``record``.
    orphan
        Whether its zygote is gone, and cannot tell its code.
    """

    number: int
    generation: int
    seat: RankAssignment
    local_rank: int
    slot: int | None = None
    pid: int = 0
    pidfd: int = -1
    gate: int = -1
    end: WorkerEnd | None = None
    session: bool = False
    out: bool = False
    killed: bool = False
    dead: bool = False
    code: int | None = None
    fresh: bool = True
    failed: bool = False
    error_file: str = ""
    orphan: bool = False

    @property
    def idle(self) -> bool:
        """Whether it waits for a generation to go on in."""
        return self.out and not self.dead and not self.killed and self.end is not None

    def forked(self, pid: int) -> None:
        """Note that it is there."""
        self.pid = pid
        with suppress(ProcessLookupError):  # its parent has died, and init has reaped it
            self.pidfd = os.pidfd_open(pid)

    def open_gate(self, environ: dict[str, str]) -> None:
        """Start it with `environ` besides."""
        gate, self.gate = self.gate, -1
        # What is written goes out when the file is closed, to a process that may have died.
        with suppress(BrokenPipeError), os.fdopen(gate, "wb") as file:
            file.write(msgspec.msgpack.encode(environ))

    def close_gate(self) -> None:
        """Have it end without having run anything, if it waits."""
        if self.gate >= 0:
            os.close(self.gate)
            self.gate = -1

    def kill(self) -> None:
        """Kill it and its group; once it has run nothing, and never will, it counts as dead."""
        self.killed = True
        if self.gate >= 0:
            self.close_gate()
            self.dead = self.dead or self.pid == 0
        self.signal(signal.SIGKILL)

    def tell_to_end(self, number: signal.Signals) -> None:
        """Signal it to end, or kill it where it has not begun; its exit code is then no failure."""
        if self.gate >= 0:
            self.kill()
        self.killed = True
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Signal its group, and itself where it leads none yet."""
        if self.pid == 0 or self.code is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def sweep(self) -> None:
        """Kill what it has left behind in its group; only while its id is still its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def look(self) -> None:
        """See whether it has ended, without its mother's help."""
        if self.pid and not self.dead:
            self.dead = self.pidfd < 0 or bool(select.select([self.pidfd], [], [], 0.0)[0])

    def forget(self) -> None:
        """Close its descriptors. Idempotent."""
        self.close_gate()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Workers:
    """All of them, by number, until they are forgotten."""

    def __init__(self) -> None:
        self._all: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._all.values()))

    def add(self, worker: Worker) -> None:
        """Take one more."""
        self._all[worker.number] = worker

    def get(self, number: int) -> Worker | None:
        """Return the one of that number, if it is not forgotten."""
        return self._all.get(number)

    def remove(self, worker: Worker) -> None:
        """Forget one that is dead."""
        worker.forget()
        self._all.pop(worker.number, None)

    def live(self, which: Callable[[Worker], bool] = lambda _: True) -> list[Worker]:
        """Return those that are not known to be dead, and are `which`."""
        return [w for w in self if not w.dead and which(w)]

    def of_session(self, pid: int) -> Worker | None:
        """Return the worker that process `pid` is, or belongs to."""
        with suppress(ProcessLookupError, PermissionError):
            leader = os.getsid(pid)
            return next((w for w in self if w.pid == leader), None)
        return None


def is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer keeps a process from running."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
