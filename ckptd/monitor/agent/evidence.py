"""Stacks and last output of ranks, and link probes, taken beside the watcher's loop.

A launcher may kill a rank before the daemon asks for its stacks. So the stacks of a rank that looks
stuck are taken early, and those of the others when one dies; they are kept for a later request.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptd.monitor.agent.probes import measure
from ckptd.monitor.report import LinkProbe, ProbeResult, Stack

# --- stacks of processes --------------------------------------------------------------------------


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
    output = done.stderr.decode(errors="replace").strip()[-1000:]
    if any(word in output for word in _FORBIDDEN):
        output += "\n(a container without CAP_SYS_PTRACE, or kernel.yama.ptrace_scope, forbids it)"
    return f"no stacks of Python: py-spy says: {output}\n", False


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
    doing = f"in {where}" if where not in ("", "0") else "not waiting in the kernel, or hidden"
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


# --- what processes have printed ------------------------------------------------------------------

_MOST_LOG = 8192


def last_output(pid: int) -> str:
    """Return the end of the files that a process prints to; of a pipe or a terminal, nothing."""
    found: dict[tuple[int, int], str] = {}
    for fd in (2, 1):
        path = Path(f"/proc/{pid}/fd/{fd}")
        with suppress(OSError):
            place = path.stat()
            if stat.S_ISREG(place.st_mode) and place.st_size:  # to open a pipe would be to read it
                with path.open("rb") as file:
                    file.seek(max(0, place.st_size - _MOST_LOG))
                    tail = file.read(_MOST_LOG).decode(errors="replace")
                found[place.st_dev, place.st_ino] = tail.removesuffix("\n")
    return "\n".join(found.values())


# --- evidence -------------------------------------------------------------------------------------


_log = logging.getLogger("ckptd.monitor")
_MOST_WAITING = 256
_NOT_HERE = "its process has ended, or runs in another container; no stack was kept\n"
_AGAIN_S = 2.0
"""The same rank is not looked at more often than this."""

_Work = queue.Queue[Callable[[], None] | None]
_Pid = TypeVar("_Pid", int, int | None)
_Report = Callable[[dict[int, Stack], dict[int, str], tuple[ProbeResult, ...]], None]


class EvidenceTaker:
    """Takes evidence in two threads, one for stacks and one for links. To be closed.

    Parameters
    ----------
    secret
        The job's, for probes.
    report
        Called in one of these threads with what was asked for.
    """

    def __init__(self, secret: bytes, report: _Report) -> None:
        self._secret = secret
        self._report = report
        self._kept: dict[int, tuple[int, Stack]] = {}
        self._asked: dict[tuple[int, bool], float] = {}
        self._lock = threading.Lock()
        self._work: dict[str, _Work] = {}
        self._threads: list[threading.Thread] = []

    def close(self, timeout_s: float = 1.0) -> None:
        """End; what is under way may end by itself later."""
        for waiting in self._work.values():
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def keep(self, pids: Mapping[int, int], note: str) -> None:
        """Take stacks of ranks now, for later; `note` says why, as their first line.

        Parameters
        ----------
        pids
            Processes by rank.
        """
        wanted = self._due(pids, asked=False)
        if wanted:
            self._do("ckptd-stacks", lambda: self._keep(wanted, note))

    def wanted(self, pids: Mapping[int, int | None]) -> None:
        """Take stacks and last output of ranks and report them, with stacks that were kept.

        Parameters
        ----------
        pids
            Processes by rank; None for one that has ended.
        """
        due = self._due(pids, asked=True)
        if due:
            self._do("ckptd-stacks", lambda: self._take(due))

    def probe(self, probes: tuple[LinkProbe, ...]) -> None:
        """Measure links one after another, and report each round at its end."""
        if probes:
            self._do(
                "ckptd-probes",
                lambda: self._report({}, {}, tuple(measure(p, self._secret) for p in probes)),
            )

    def forget(self, rank: int) -> None:
        """Drop what was kept of a rank: none of it is true of the rank's next process."""
        with self._lock:
            self._kept.pop(rank, None)

    # --- in the threads -------------------------------------------------------------------------

    def _keep(self, pids: Mapping[int, int], note: str) -> None:
        for rank, stack in take_stacks(pids.items()).items():
            if stack.how:
                text = f"Taken at {_clock()}, as {note}:\n{stack.text}"
                with self._lock:
                    self._kept[rank] = (pids[rank], msgspec.structs.replace(stack, text=text))

    def _take(self, pids: Mapping[int, int | None]) -> None:
        fresh = take_stacks((rank, pid) for rank, pid in pids.items() if pid is not None)
        found = {rank: self._joined(rank, pid, fresh.get(rank)) for rank, pid in pids.items()}
        logs = {rank: last_output(pid) for rank, pid in pids.items() if pid is not None}
        self._report(found, {rank: log for rank, log in logs.items() if log}, ())

    def _joined(self, rank: int, pid: int | None, fresh: Stack | None) -> Stack:
        """Return the fresh stacks of a rank and the kept ones behind them."""
        with self._lock:
            of, kept = self._kept.get(rank, (pid, None))
        if kept is None or (pid is not None and of != pid):
            return fresh or Stack(text=_NOT_HERE)
        if fresh is None or not fresh.how:
            return kept
        return msgspec.structs.replace(fresh, text=f"{fresh.text}\n{kept.text}")

    # --- the threads ----------------------------------------------------------------------------

    def _due(self, pids: Mapping[int, _Pid], *, asked: bool) -> dict[int, _Pid]:
        now = time.monotonic()
        due: dict[int, _Pid] = {}
        for rank, pid in pids.items():
            if now - self._asked.get((rank, asked), -_AGAIN_S) >= _AGAIN_S:
                self._asked[rank, asked] = now
                due[rank] = pid
        return due

    def _do(self, name: str, work: Callable[[], None]) -> None:
        waiting = self._work.get(name)
        if waiting is None:
            waiting = self._work[name] = queue.Queue(_MOST_WAITING)
            thread = threading.Thread(target=_serve, args=(waiting,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            waiting.put_nowait(work)
        except queue.Full:
            _log.warning("%s: too many requests at once; one is dropped", name)


def _serve(waiting: _Work) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except Exception:  # noqa: BLE001 - the next question may be answered all the same
            _log.exception("evidence could not be taken")


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
