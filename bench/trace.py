"""What one save and one load run through: files, functions, calls, threads.

    scripts/trace [save|load] [--repeat] [--list] [--json] [--package ckptd]

The state is an ``nn.Linear`` with AdamW after one step, on one rank; the root is in memory, where
the writing process is a thread. A save is traced from the call to `durable`; it is the first one
of a `Checkpointer`, or with ``--repeat`` the third. A load is that of a new `Checkpointer`.
Everything is done once before, on another root, so that nothing is counted that runs at import.
``--package torch.distributed.checkpoint`` traces DCP instead, with the same state, into a temporary
folder. Functions are those with a name: no lambdas, no comprehensions, no bodies of modules.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
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


def folder_of(package: str) -> str:
    """Return where a package lies."""
    __import__(package)
    return str(Path(sys.modules[package].__file__ or "").parent)


def main() -> None:
    """Trace what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("save", "load"), help="default: both")
    parser.add_argument("--repeat", action="store_true", help="the third save, not the first")
    parser.add_argument("--package", default="ckptd", choices=("ckptd", DCP))
    parser.add_argument("--list", action="store_true", help="the functions, file by file")
    parser.add_argument("--json", action="store_true", help="counts and functions as JSON")
    options = parser.parse_args()
    case = dcp_case if options.package == DCP else ckptd_case
    found = {}
    for what in [options.what] if options.what else ["save", "load"]:
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
