"""A call of an object that is interrupted, or met by another one, at a line of its own code.

`python -m tests.checkpoint.torch.injected NAME CALL WHAT FIRST STEP` injects at line FIRST of the
call, counted as they run, at FIRST + STEP, and so on to its last one, each time with new objects.
It prints a line of JSON for each.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ckptd

CALLS = ("save", "load", "close", "wait", "next")
WHATS = ("interrupt", "save", "load", "close", "wait", "latest", "thread")
_OURS = str(Path(ckptd.__file__).parent)
_WAIT_S = 30.0
"""Far less than what a save waits for a slot, and far more than anything here takes."""


class Job:
    """A checkpointer with one durable step, and a state whose values say their step."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(50_000))])
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = ckptd.Batches(_numbers())
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "data": self.data,
            "at": 0.0,
        }
        self.ck = ckptd.Checkpointer(url, when_failed="warn", timeout_s=_WAIT_S)
        self.fill(1)
        self.ck.save(1, self.state).durable(_WAIT_S)
        next(self.data)

    def fill(self, step: int) -> None:
        self.ck.before_mutation()
        with torch.no_grad():
            self.model[0].fill_(step)
        self.state["at"] = float(step)

    def call(self, name: str, step: int) -> object:
        if name == "save":
            return self.ck.save(step, self.state)
        if name == "load":
            return self.ck.load(self.state)
        if name == "next":
            return next(self.data)
        return getattr(self.ck, name)()


def _numbers() -> Any:
    return torch.utils.data.DataLoader(torch.arange(64), batch_size=1)


class Injector:
    """Runs `act` once, at one of the lines of ckptd that the main thread comes to.

    Not where a ``with`` block ends or a ``try`` begins: Python lets no signal handler run there,
    and what a trace raises there would keep a lock taken for ever.
    """

    def __init__(self, at: int, act: Callable[[], object]) -> None:
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
            if self.seen >= self.at and not ends and text != "try:":
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                self.act()
        return self.trace


def _kind(call: Callable[[], object]) -> str:
    try:
        call()
    except ckptd.CkptdError as error:
        return error.kind
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


def inject(url: str, call: str, what: str, at: int) -> dict[str, Any] | None:
    """Inject once; None where the call has no such line."""
    job = Job(url)
    said = ""

    def act() -> None:
        nonlocal said
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "thread":
            thread = threading.Thread(target=lambda: record(_kind(lambda: job.call("save", 3))))
            thread.start()
            thread.join()
            return
        record(_kind(lambda: job.call(what, 3)))

    def record(word: str) -> None:
        nonlocal said
        said = word

    injector = Injector(at, act)
    job.fill(2)
    sys.settrace(injector.trace)
    try:
        outcome = _kind(lambda: job.call(call, 2))
    finally:
        sys.settrace(None)
    if not injector.where:
        job.ck.close()
        return None
    found = {"call": call, "what": what, "at": at, "where": injector.where}
    found |= {"outcome": outcome, "said": said, "after": after(job), "disk": on_disk(job)}
    return found


def after(job: Job) -> str:
    """Go on as a program would; return how the next save and the end went."""
    words = [_kind(lambda: job.fill(4)), _kind(lambda: _durable(job.call("save", 4)))]
    return " ".join([*words, _kind(job.ck.close)])


def _durable(handle: Any) -> None:
    handle.durable(_WAIT_S)


def on_disk(job: Job) -> str:
    """Return the newest step, and that its values are of that step; ``mixture`` where not."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(50_000))])
    state: dict[str, Any] = {
        "model": model,
        "optim": torch.optim.SGD(model.parameters(), lr=0.1),
        "at": -1.0,
        "data": ckptd.Batches(_numbers()),
    }
    with ckptd.Checkpointer(job.url) as ck:
        steps = []
        for step in (1, 2, 3, 4):
            try:
                ck.load(state, step, only="*")
            except ckptd.NotFoundError:
                continue
            # What is saved as step 3 within is saved while the state is that of step 2.
            wanted = {3: 2}.get(step, step)
            whole = bool((model[0] == wanted).all()) and state["at"] == wanted
            steps.append(str(step) if whole or _loaded_before(model, state) else f"mixture-{step}")
    return ",".join(steps)


def _loaded_before(model: Any, state: dict[str, Any]) -> bool:
    """Whether it is step 1 as a whole: a load came between."""
    return bool((model[0] == 1).all()) and state["at"] == 1.0


def main(name: str, call: str, what: str, first: int, step: int) -> None:
    """Inject at every `step`-th line."""
    at = first
    while True:
        faulthandler.dump_traceback_later(4 * _WAIT_S, exit=True)
        found = inject(f"memory://injected-{name}-{call}-{what}-{at}", call, what, at)
        faulthandler.cancel_dump_traceback_later()
        if found is None:
            return
        print(json.dumps(found), flush=True)
        at += step


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
