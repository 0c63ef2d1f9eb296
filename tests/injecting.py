"""A call of an object that is interrupted, or met by another one, at a line of its own code."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import linecache
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import ckptd
from tests import programs
from tests.processes import PATIENCE_S

__all__ = ["WAIT_S", "Injector", "Job", "kind_of", "play", "run", "wrong"]

WAIT_S = 30.0
"""Far less than what a call waits for another, and far more than anything here takes."""
_MEET_S = 0.2
_OURS = str(Path(ckptd.__file__).parent)


class Job(Protocol):
    """Objects that calls are made of, and values that say their step."""

    def call(self, name: str, step: int) -> object:
        """Make the call."""

    def after(self, call: str, what: str, outcome: str) -> str:
        """Go on as a program would, and end; return "" where all is right, else what is not."""


class Injector:
    """Runs `act` once, at one of the lines of ckptd that the main thread comes to.

    It is that of a number, counted as they run, or the first one with a text.

    Not where a ``with`` block ends or a ``try`` begins: Python lets no signal handler run there,
    and what a trace raises there would keep a lock taken for ever.
    """

    def __init__(self, at: int | str, act: Callable[[], object]) -> None:
        self.at, self.act = at, act
        self.seen = 0
        self.where = ""
        self.lines: dict[FrameType, int] = {}

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            self.seen += 1
            last, self.lines[frame] = self.lines.get(frame, 0), frame.f_lineno
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            ends = text.startswith("with ") and last >= frame.f_lineno
            here = self.at in text if isinstance(self.at, str) else self.seen >= self.at
            if here and not ends and text != "try:":
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                self.act()
        return self.trace


def kind_of(call: Callable[[], object]) -> str:
    """Return how a call ends; what is no error of ours goes on."""
    try:
        call()
    except ckptd.CkptdError as error:
        return error.kind
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


class _Dies:
    """Makes a call when it is collected, as a destructor of the program may."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.itself = call, self

    def __del__(self) -> None:
        self.call()


def lines_of(job: Job, call: str) -> int:
    """Return how many lines of ckptd a call comes to."""
    injector = Injector(1 << 40, lambda: None)
    _traced(injector, lambda: job.call(call, 2))
    return injector.seen


def _traced(injector: Injector, call: Callable[[], object]) -> str:
    sys.settrace(injector.trace)
    try:
        return kind_of(call)
    finally:
        sys.settrace(None)


def inject(job: Job, call: str, what: str, at: int | str) -> dict[str, Any] | None:
    """Inject once; None where the call has no such line.

    Parameters
    ----------
    what
        ``interrupt``, or another call: by its name as a signal handler makes it, ``thread:NAME`` in
        a second thread, ``del:NAME`` in a destructor.
    """
    way, _, name = what.rpartition(":")
    said: list[str] = []
    threads: list[threading.Thread] = []

    def other() -> None:
        said.append(kind_of(lambda: job.call(name, 3)))

    def act() -> None:
        if what == "interrupt":
            raise KeyboardInterrupt
        if way == "thread":
            threads.append(threading.Thread(target=other))
            threads[0].start()
            threads[0].join(_MEET_S)  # it may wait for what this one holds
        elif way == "del":
            _Dies(other)
            gc.collect()
        else:
            other()

    gc.disable()  # or it is collected elsewhere
    injector = Injector(at, act)
    outcome = _traced(injector, lambda: job.call(call, 2))
    gc.enable()
    for thread in threads:
        thread.join()
    if not injector.where:
        return None
    found = {"call": call, "what": what, "at": at, "where": injector.where, "outcome": outcome}
    return found | {"said": "".join(said)}


def play(make: Callable[[str], Job], points: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Inject in each call; print JSON for each time. A process that hangs ends, and shows where.

    Parameters
    ----------
    points
        At how many lines of each call, evenly; 0: at every line; or the text of a line.
    """
    for call, what in pairs:
        places: Iterable[int | str] = [points]
        if points == "0":
            places = itertools.count(1)
        elif points.isdecimal():
            faulthandler.dump_traceback_later(4 * WAIT_S, exit=True)
            job = make(f"{call}-{what.replace(':', '-')}-0")
            total, many = lines_of(job, call), int(points)
            job.after(call, "nothing", "done")
            places = sorted({1 + total * (2 * n + 1) // (2 * many) for n in range(many)})
        for number, at in enumerate(places, 1):
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(4 * WAIT_S, exit=True)
            job = make(f"{call}-{what.replace(':', '-')}-{number}")
            found = inject(job, call, what, at)
            outcome = "nothing" if found is None else found["outcome"]
            wrong = job.after(call, what, outcome)
            if found is None:
                break
            print(json.dumps(found | {"wrong": wrong}), flush=True)
        faulthandler.cancel_dump_traceback_later()


def run(module: str, *arguments: str, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    """Run a module of tests that plays; return what it printed."""
    done = programs.run("-m", module, *arguments, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what hung, mixed steps, kept later calls from being right, or had no clear answer."""
    clear = ("", "done", "under-way", "closed", "crashed")
    return [one for one in found if one["wrong"] or one["said"] not in clear]
