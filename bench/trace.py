"""Trace of one save and one load: files, functions, calls, threads.

    scripts/trace [save|load] [--repeat] [--list] [--json] [--package ckptd]
    scripts/trace --cost save|load [--repeat] [--tensors 4000] [--json]

The state is an ``nn.Linear`` with AdamW after one step, on one rank; the root is in memory, where
the writing process is a thread. A save is traced from the call to `durable`; it is the first one
of a `Checkpointer`, or with ``--repeat`` the third. A load is that of a new `Checkpointer`.
Everything is done once before, on another root, so that nothing is counted that runs at import.
``--package torch.distributed.checkpoint`` traces DCP instead, with the same state, into a temporary
folder. Functions are those with a name: no lambdas, no comprehensions, no bodies of modules.

``--cost`` tells where the time of the calling thread goes, stage by stage: calls for each tensor,
and CPU milliseconds in functions of that package themselves, what they call in C included. There
the root is a folder, the writing process is one, and the state is a module of many small tensors
with AdamW, so that planning is what costs. Watching costs too, about as much as the calls do:
shares count, and the sum is more than a call takes by itself.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import common

DCP = "torch.distributed.checkpoint"


@dataclass
class Trace:
    """Calls of functions of one package, whatever thread made them."""

    folder: str
    calls: Counter[CodeType] = field(default_factory=Counter)
    threads: set[int] = field(default_factory=set)
    counting: bool = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; the function that `sys.setprofile` calls."""
        code = frame.f_code
        if self.counting and event == "call" and code.co_filename.startswith(self.folder):
            if not code.co_name.startswith("<"):
                self.calls[code] += 1
            self.threads.add(threading.get_ident())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and those that start meanwhile; count while `counting` says so."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def of(self, act: Callable[[], object]) -> None:
        """Do it, and count what runs."""
        self.counting = True
        act()
        self.counting = False

    @property
    def files(self) -> dict[str, list[str]]:
        """Return the functions of each file."""
        found: dict[str, set[str]] = {}
        for code in self.calls:
            path = code.co_filename[len(self.folder) :].lstrip("/")
            found.setdefault(path, set()).add(code.co_qualname)
        return {path: sorted(names) for path, names in sorted(found.items())}

    def document(self) -> dict[str, Any]:
        """Return what was counted."""
        return {
            "files": len(self.files),
            "functions": len(self.calls),
            "calls": self.calls.total(),
            "threads": len(self.threads),
        }


def state() -> dict[str, Any]:
    """Return a module and its optimizer, which has stepped once."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def ckptd_case(what: str, trace: Trace, repeat: bool, place: str) -> None:
    """Save into a root in memory, and load from it."""
    import ckptd

    live = state()
    root = f"memory://{place}"

    def save(checkpointer: ckptd.Checkpointer, step: int) -> None:
        checkpointer.save(step, live).durable()

    with trace.watching():
        with ckptd.Checkpointer(root) as checkpointer:
            steps = [1, 2, 3] if what == "load" or repeat else [1]
            for step in steps[:-1]:
                save(checkpointer, step)
            if what == "save":
                trace.of(partial(save, checkpointer, steps[-1]))
        if what == "load":
            with ckptd.Checkpointer(root) as checkpointer:
                trace.of(partial(checkpointer.load, live))


def dcp_case(what: str, trace: Trace, repeat: bool, place: str) -> None:
    """Save into a temporary folder and load from it, as DCP's tutorial does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    live = state()

    def values() -> dict[str, Any]:
        model, optimizer = get_state_dict(live["model"], live["optimizer"])
        return {"model": model, "optimizer": optimizer}

    with tempfile.TemporaryDirectory(suffix=place) as folder, trace.watching():
        verbs = {
            "save": lambda: dcp.save(values(), checkpoint_id=folder, no_dist=True),
            "load": lambda: dcp.load(values(), checkpoint_id=folder, no_dist=True),
        }
        if what == "load" or repeat:
            verbs["save"]()
        trace.of(verbs[what])


def many(tensors: int) -> dict[str, Any]:
    """Return a module and its optimizer, which has stepped once, with so many small tensors."""
    import torch

    shapes = [torch.nn.Parameter(torch.ones(16)) for _ in range(tensors // 4)]
    model = torch.nn.ParameterList(shapes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in shapes:
        parameter.grad = torch.ones(16)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def stage_of(path: str, ours: str) -> str:
    """Return the package to which a function's file belongs."""
    if path.startswith(ours):
        return "ckptd/" + "/".join(Path(path[len(ours) :].lstrip("/")).parts[:-1])
    _, _, package = path.partition("site-packages/")
    return package.partition("/")[0].removesuffix(".py") or "Python's own"


def cost(what: str, repeat: bool, tensors: int) -> list[dict[str, Any]]:
    """Return for each stage its share of the time that the calling thread spends in one call."""
    import ckptd

    live = many(tensors)
    profile = cProfile.Profile(time.thread_time, builtins=False)
    with tempfile.TemporaryDirectory() as folder:
        with ckptd.Checkpointer(folder) as checkpointer:
            for step in range(1, 3 if repeat or what == "load" else 1):
                checkpointer.save(step, live).durable()
            if what == "save":
                handle = profile.runcall(checkpointer.save, 3, live)
                handle.durable()
        if what == "load":
            with ckptd.Checkpointer(folder) as checkpointer:
                if repeat:
                    checkpointer.load(live)
                profile.runcall(checkpointer.load, live)
    stages: dict[str, list[float]] = {}
    for entry in profile.getstats():
        if isinstance(entry.code, CodeType):
            stage = stages.setdefault(stage_of(entry.code.co_filename, folder_of("ckptd")), [0, 0])
            stage[0] += entry.callcount
            stage[1] += entry.inlinetime
    whole = sum(seconds for _, seconds in stages.values())
    rows = [
        {
            "stage": stage,
            "calls a tensor": calls / tensors,
            "CPU ms": 1e3 * seconds,
            "share": seconds / whole,
        }
        for stage, (calls, seconds) in stages.items()
    ]
    rows.sort(key=lambda row: -row["share"])
    sums = {key: sum(row[key] for row in rows) for key in ("calls a tensor", "CPU ms", "share")}
    return [*rows, {"stage": "all", **sums}]


def folder_of(package: str) -> str:
    """Return where a package lies."""
    __import__(package)
    return str(Path(sys.modules[package].__file__ or "").parent)


def main() -> None:
    """Trace what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("save", "load"), help="default: both")
    parser.add_argument("--repeat", action="store_true", help="the third save, a second load")
    parser.add_argument("--cost", action="store_true", help="CPU time by stage")
    parser.add_argument("--tensors", type=int, default=4000, help="of the state of --cost")
    parser.add_argument("--package", default="ckptd", choices=("ckptd", DCP))
    parser.add_argument("--list", action="store_true", help="the functions, file by file")
    parser.add_argument("--json", action="store_true", help="counts and functions as JSON")
    options = parser.parse_args()
    verbs = [options.what] if options.what else ["save", "load"]
    if options.cost:
        costs = {what: cost(what, options.repeat, options.tensors) for what in verbs}
        if options.json:
            json.dump(costs, sys.stdout, indent=1)
            return
        for what, told in costs.items():
            print(common.table([what, *list(told[0])[1:]], [list(row.values()) for row in told]))
        return
    case = dcp_case if options.package == DCP else ckptd_case
    found = {}
    for what in verbs:
        for place in ("before", "traced"):
            found[what] = Trace(folder_of(options.package))
            case(what, found[what], options.repeat, f"{what}-{place}")
    if options.json:
        told = {what: t.document() | {"by_file": t.files} for what, t in found.items()}
        json.dump(told, sys.stdout, indent=1)
        return
    rows = [[what, *trace.document().values()] for what, trace in found.items()]
    print(common.table(["what", "files", "functions", "calls", "threads"], rows))
    for what, trace in found.items() if options.list else ():
        print(f"\n{what}")
        for path, names in trace.files.items():
            print(f"  {path}: {', '.join(names)}")


if __name__ == "__main__":
    main()
