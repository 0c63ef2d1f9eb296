"""Signs of hardware: kernel log, RDMA and network ports, pressure; plugins of ``ckptd.health``.

In it: how often a source is asked and how long it may take; patterns and weights of signs; from
which pressure on.

Nothing waits for a source: one that hangs, as reading a broken device may, costs its own signs and
nothing else. No sign is a verdict: `ckptd.monitor.rules.signs` says what they do to one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from ckptd.base.runtime.host import kill_counts
from ckptd.errors import one_line
from ckptd.monitor.report import Sign
from ckptd.monitor.rules.said import class_of
from ckptd.monitor.rules.signs import SIGN_S
from ckptd.monitor.verdict import VerdictKind
from ckptd.plugins import HEALTH, entries, load_plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger("ckptd.monitor")
KMSG = "/dev/kmsg"
_EVERY_S = 2.0
_DEADLINE_S = 20.0
"""A look that takes longer is logged; until it ends there is no other one."""
_MOST_SIGNS = 16
"""Of one source."""
_MOST_SOURCES = 16
_MOST_SENT, _MOST_KINDS, _MOST_WEIGHT = 64, 16, 0.9
_TEXT, _WORD, _DIGITS = 200, 100, 20
_LONGEST_S = 1e6
_RECORD_BYTES = 8192
_MOST_RECORDS = 200_000
_FILE_BYTES = 4096
_MOST_PORTS = 256
_V = VerdictKind
_ANY = (_V.CRASH, _V.HANG, _V.COMM_HANG, _V.SLOW_RANK, _V.CORRUPTION)
_LINK = (_V.COMM_HANG, _V.SLOW_LINK, _V.SLOW_RANK, _V.CRASH)
_DISK = (_V.HANG, _V.SLOW_RANK)


class HealthSource(Protocol):
    """An entry point of the group ``ckptd.health``: it makes a function that looks at the hardware.

    It is called once, in a thread of its own, and gives a function that is called every 2 s while
    ranks run: it returns the signs of that moment. None means that this host lacks that hardware.
    Whatever either raises is logged, and either may take its time.
    """

    def __call__(self) -> Callable[[], Iterable[Sign]] | None:
        """Return what looks; None where there is nothing to look at."""


# --- the sources, each in its thread --------------------------------------------------------------


class Health:
    """Asks all sources while `awake`, and keeps what they show. To be closed.

    Parameters
    ----------
    sources
        By name; ours, and those of the entry points, by default.

    Attributes
    ----------
    awake
        Whether ranks run.
    """

    def __init__(self, sources: Mapping[str, HealthSource] | None = None) -> None:
        self.awake = True
        self._sources = sources
        self._found: dict[tuple[str, str], tuple[float, Sign]] = {}
        self._since: dict[str, float] = {}
        """Sources that are being asked."""
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        self._thread("all", self._begin)

    def close(self, timeout_s: float = 1.0) -> None:
        """End; a look that still goes on after `timeout_s` is left alone, in its thread."""
        self._ending.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:  # the first starts the others
            thread.join(max(end - time.monotonic(), 0.0))

    def signs(self) -> tuple[Sign, ...]:
        """Return what was seen in the last two minutes, the newest first; waits for nothing."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, since in self._since.items() if now - since > _DEADLINE_S]
            found = sorted(self._found.values(), key=lambda one: -one[0])
        for name in late:
            self._tell(name, f"it has not answered for {_DEADLINE_S:.0f} s")
        return tuple(
            msgspec.structs.replace(sign, age_s=max(now - at, 0.0))
            for at, sign in found[:_MOST_SENT]
            if now - at <= SIGN_S
        )

    def _begin(self) -> None:
        chosen = self._sources
        if chosen is None:
            more = {e.name: _loaded(e) for e in entries(HEALTH) if e.name not in SOURCES}
            chosen = {**SOURCES, **more}
        for name, make in islice(chosen.items(), _MOST_SOURCES):
            self._thread(name, partial(self._follow, name[:_WORD], make))

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"ckptd-health-{name}"[:64], daemon=True)
        thread.start()
        self._threads.append(thread)

    def _follow(self, name: str, make: HealthSource) -> None:
        look: Callable[[], Iterable[Sign]] | None = None
        while not self._ending.is_set():
            if self.awake:
                with self._lock:
                    self._since[name] = time.monotonic()
                try:
                    look = look or make()
                    if look is None:
                        return
                    found: dict[str, Sign] = {}
                    for sign in islice(look(), _MOST_SIGNS):
                        _add(found, sign, name)
                    self._keep(found)
                except Exception as error:  # noqa: BLE001 - one source costs no other one
                    self._tell(name, repr(error))
                    if look is None:
                        return
                finally:
                    with self._lock:
                        del self._since[name]
            self._ending.wait(_EVERY_S)

    def _keep(self, found: Mapping[str, Sign]) -> None:
        now = time.monotonic()
        with self._lock:
            for what, sign in found.items():
                self._found[sign.source, what] = (now - sign.age_s, sign)
                mine = sorted(
                    (at, key) for key, (at, _) in self._found.items() if key[0] == sign.source
                )
                for _, key in mine[:-_MOST_SIGNS]:
                    del self._found[key]

    def _tell(self, name: str, what: str) -> None:
        with self._lock:
            new = (name, what) not in self._told and len(self._told) < _MOST_SENT
            if new:
                self._told.add((name, what))
        if new:
            _log.warning("the health source %s: %s", name, what[:_TEXT])


def _add(found: dict[str, Sign], sign: Sign, source: str) -> None:
    """Add a sign as it may be sent; what is the same of several devices is one sign."""
    what, text = one_line(str(sign.what))[:_WORD], one_line(str(sign.text))[:_TEXT]
    found[what] = Sign(
        what=what,
        text=f"{found[what].text}; {text}"[:_TEXT] if what in found else text,
        kinds=tuple(str(kind)[:_WORD] for kind in islice(sign.kinds, _MOST_KINDS)),
        weight=sign.weight if 0 <= sign.weight <= _MOST_WEIGHT else 0.5,  # of NaN as well
        source=source,
        age_s=sign.age_s if 0 <= sign.age_s < _LONGEST_S else 0.0,
    )


# --- our sources ----------------------------------------------------------------------------------

_KERNEL = {
    "device fault": (_ANY, 0.6),
    "machine check": (_ANY, 0.6),
    "link fault": (_LINK, 0.5),
    "file system": ((*_DISK, _V.CRASH), 0.4),
    "device program": ((_V.CRASH, _V.HANG), 0.2),
}
"""Classes of lines of the kernel, what they speak for, and their weight."""


def kernel_log(fd: int) -> Iterator[tuple[float, str]]:
    """Yield what was not read yet of the kernel's log: seconds since 1970, and the line."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:  # lines were overwritten: go on behind them
            continue
        except OSError:  # the end, mostly
            return
        if not record:
            return
        head, _, text = record.decode(errors="replace").partition(";")
        with suppress(ValueError, IndexError, OverflowError):
            yield booted + int(head.split(",")[2]) / 1e6, one_line(text.partition("\n")[0])


def kernel(path: str = KMSG) -> Callable[[], Iterator[Sign]] | None:
    """Look for lines of the kernel on devices, links and file systems."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # most containers do not let it be read
        return None

    def look() -> Iterator[Sign]:
        for at, text in kernel_log(fd):
            age_s = time.time() - at
            kind = class_of(text) if age_s < SIGN_S else None
            if kind is not None and kind.name in _KERNEL:
                kinds, weight = _KERNEL[kind.name]
                yield Sign(what=kind.name, text=text, kinds=kinds, weight=weight, age_s=age_s)

    weakref.finalize(look, os.close, fd)
    return look


_DOWN = ("counters/link_downed", "counters/link_error_recovery", "carrier_down_count")
_ERRORS = (
    "counters/symbol_error",
    "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "statistics/rx_crc_errors",
)
_FEW_ERRORS = 10
"""So many between two looks are nothing: links have rare bit errors."""


def links(root: Path = Path("/sys/class")) -> Callable[[], Iterator[Sign]] | None:
    """Look for ports of RDMA and of network cards that go down, or count errors."""
    patterns = ("infiniband/*/ports/*", "net/*/device")
    found = [path for pattern in patterns for path in islice(root.glob(pattern), _MOST_PORTS)]
    ports = [path.parent if path.name == "device" else path for path in found]
    before: dict[Path, dict[str, int]] = {}
    ups: set[Path] = set()

    def look() -> Iterator[Sign]:
        nonlocal ups
        for port in ports:
            was, state = before.get(port, {}), _text(port / "state") + _text(port / "operstate")
            now = {n: value for n in (*_DOWN, *_ERRORS) if (value := _number(port / n)) is not None}
            before[port] = was | now
            rose = {n: max(value - was.get(n, value), 0) for n, value in now.items()}
            downs, errors = (sum(rose.get(n, 0) for n in group) for group in (_DOWN, _ERRORS))
            up = "ACTIVE" in state or "up" in state
            ups |= {port} if up else set()
            fallen = port in ups and not up
            name = "/".join(part for part in port.relative_to(root).parts[1:] if part != "ports")
            if downs or fallen:
                text = f"{name} {'is' if fallen else 'went'} down"
                yield Sign(what="link down", text=text, kinds=_LINK, weight=0.5)
            if errors > _FEW_ERRORS:
                text = f"{name} counts {errors} new errors"
                yield Sign(what="link errors", text=text, kinds=_LINK, weight=0.3)

    return look if ports else None


_STALLED = {"io": (20.0, 80.0), "memory": (10.0, 50.0)}
"""Percents of the last 10 s in which all tasks, or some, wait."""


def pressure(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> Callable[[], Iterator[Sign]]:
    """Look for tasks that wait for disks or memory, and for ends by a limit of memory."""
    kills = next(kill_counts(groups, proc / "self/cgroup"), proc)
    killed = [_field(kills, "oom_kill")]

    def look() -> Iterator[Sign]:
        for what, most in _STALLED.items():
            path = proc / "pressure" / what
            share = {name: _field(path, name, "avg10=") for name in ("full", "some")}
            if share["full"] >= most[0] or share["some"] >= most[1]:
                text = f"some tasks waited for {what} {share['some']:.0f} % of the last 10 s, all "
                text += f"at once {share['full']:.0f} %"
                yield Sign(what=f"{what} stall", text=text, kinds=_DISK, weight=0.3)
        now = _field(kills, "oom_kill")
        if now > killed[0]:
            text = f"the kernel ended {now - killed[0]:.0f} processes at this group's memory limit"
            yield Sign(what="memory limit", text=text, kinds=(_V.CRASH,), weight=0.4)
        killed[0] = now

    return look


SOURCES: Mapping[str, HealthSource] = {"kernel": kernel, "links": links, "pressure": pressure}


def _text(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_FILE_BYTES).decode(errors="replace")
    return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) < _DIGITS else None


def _field(path: Path, name: str, before: str = "") -> float:
    """Return the number behind a line's first word; 0.0 for none."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name] and len(words) > 1:
            with suppress(ValueError):
                return float(words[1].removeprefix(before))
    return 0.0


def _loaded(entry: EntryPoint) -> HealthSource:
    """Return what loads a plugin's source in its own thread and calls it."""
    return lambda: load_plugin(entry, f"it is of the group {HEALTH}")()
