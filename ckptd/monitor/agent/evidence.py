"""Evidence on a node: stacks (py-spy, kernel), last output, kernel lines, flight recorder dumps.

In it: how long a stack may take, how many at once, how much text is kept; files that ranks print
to.

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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptd.errors import CkptdError
from ckptd.monitor.agent.health import KMSG, kernel_log
from ckptd.monitor.agent.probes import measure
from ckptd.monitor.agent.processes import environment
from ckptd.monitor.report import LinkProbe, ProbeResult, Stack
from ckptd.monitor.rules.said import FLIGHT, KERNEL, class_of, process_of, together
from ckptd.plugins import DUMPS, entries, load_plugin

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
    output = (
        done.stderr.decode(errors="replace").strip().partition("\n\nStack backtrace:")[0][-1000:]
    )
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
_File = tuple[int, int]
"""Its device and number."""


def output_files(pid: int) -> tuple[str, ...]:
    """Return the names of the files that a process prints to, errors first."""
    found = []
    for fd in (2, 1):
        with suppress(OSError):
            if stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{fd}").st_mode):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return tuple(found)


def last_output(
    pid: int | None, files: Iterable[str] = (), printing: Mapping[_File, set[int]] | None = None
) -> str:
    """Return the end of the files that a process prints to; of a pipe or a terminal, nothing.

    Parameters
    ----------
    pid
        The process; None if it has ended, and `files` are what it printed to.
    printing
        Ranks by file. What several print to one file has a line before it that says so.
    """
    found: dict[_File, str] = {}
    for name in files if pid is None else [f"/proc/{pid}/fd/{fd}" for fd in (2, 1)]:
        path = Path(name)
        with suppress(OSError):
            place = path.stat()
            if stat.S_ISREG(place.st_mode) and place.st_size:  # to open a pipe would be to read it
                with path.open("rb") as file:
                    file.seek(max(0, place.st_size - _MOST_LOG))
                    tail = file.read(_MOST_LOG).decode(errors="replace")
                at = place.st_dev, place.st_ino
                found[at] = together((printing or {}).get(at, ())) + tail.removesuffix("\n")
    return "\n".join(found.values())


def _printing(files: Mapping[int, Iterable[str]]) -> Mapping[_File, set[int]]:
    """Return the ranks that print to each file."""
    found = defaultdict[_File, set[int]](set)
    for rank, names in files.items():
        for name in names:
            with suppress(OSError):
                place = os.stat(name)
                found[place.st_dev, place.st_ino].add(rank)
    return found


_KERNEL_S = 120.0
_MOST_KERNEL = 20


def kernel_lines(ranks: Mapping[int, int]) -> list[tuple[int | None, str]]:
    """Return the kernel's last lines about a fault, with the rank; none where they are not seen.

    Parameters
    ----------
    ranks
        Ranks by process. What concerns other processes of this machine is left out.
    """
    found = deque[tuple[int | None, str]](maxlen=_MOST_KERNEL)
    try:
        fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for at, text in kernel_log(fd):
            kind = class_of(text) if time.time() - at < _KERNEL_S else None
            if kind is None:
                continue
            process = process_of(text)
            if process in ranks or (process is None and kind.name != "host memory"):
                clock = time.strftime("%Y-%m-%d %T", time.localtime(at))
                found.append((ranks.get(process or 0), f"{KERNEL}: {clock} {text}"))
    finally:
        os.close(fd)
    return list(found)


_DUMPED_S = 120.0
_MOST_DUMP = 8 << 20
_DUMP_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def dump_file(pid: int, rank: int) -> str:
    """Return where PyTorch puts a rank's dump of its flight recorder, by its environment."""
    environ = environment(pid)
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    usual = f"{cache}/torch/comm_lib_trace_rank_"
    return next((environ[name] for name in _DUMP_NAMES if environ.get(name)), usual) + str(rank)


def dump_lines(name: str) -> list[str]:
    """Return the last calls of a dump of the last two minutes as lines; none without a dump."""
    try:
        info = os.stat(name)
    except (OSError, ValueError):
        return []
    old = time.time() - info.st_mtime > _DUMPED_S
    if old or not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_DUMP:
        return []
    try:
        for entry in entries(DUMPS):
            if entry.name == "lines":
                found = load_plugin(entry, "it reads dumps of the flight recorder")(Path(name))
                return [f"{FLIGHT}: {line}" for line in found]
    except (CkptdError, OSError, ValueError) as error:
        _log.warning("%s", error)
    return []


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
        self._files: dict[int, tuple[int, tuple[str, ...], str]] = {}
        """Process of each rank, where it prints to, and where its flight recorder dumps."""
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

    def follow(self, rank: int, pid: int | None) -> None:
        """Drop what was kept of a rank, and keep where its next process prints to."""
        with self._lock:
            self._kept.pop(rank, None)
            files = () if pid is None else output_files(pid)
            self._files[rank] = (pid or 0, files, dump_file(pid or 0, rank))

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
        with self._lock:
            files = dict(self._files)
        names = {rank: where for rank, (_, where, _) in files.items()}
        printing = _printing(names)
        logs = {r: last_output(pid, names.get(r, ()), printing) for r, pid in pids.items()}
        for r in pids.keys() & files.keys():
            logs[r] = "\n".join([logs[r], *dump_lines(files[r][2])]).strip("\n")
        logs = {rank: log for rank, log in logs.items() if log}
        for rank, line in kernel_lines({pid: rank for rank, (pid, *_) in files.items()}):
            mine = min(pids) if rank is None else rank
            logs[mine] = f"{logs.get(mine, '')}\n{line}".lstrip()
        found = {rank: stack for rank, stack in found.items() if stack.how or rank not in logs}
        self._report(found, logs, ())

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
