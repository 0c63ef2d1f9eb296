"""Cost of recording for a collective, and for a training step; beside other recorders.

    python bench/recorder.py [--reps N] [--calls N]

One gloo rank and an all-reduce of four numbers, so that the call itself is as cheap as it can be
and the recorder's part as large. Cases: no hook at all; recorded by Python, natively, by counters;
stepped aside (hooks let calls through); PyTorch's flight recorder off (it is on by default);
``TORCH_DISTRIBUTED_DEBUG=DETAIL``; and nvidia-resiliency-ext's straggler sections, if installed.
Settings that a process takes at its start have a process of their own. "No backend" is the same
over PyTorch's fake backend, which does nothing: what the hooks themselves cost. Each round measures
every case once, in random order, one after another; the figures are medians and minima over rounds,
the differences and ratios those to the same round without a hook (of the same backend).

What recording costs a call on a device is measured on the simulated one with a driver that does
nothing, over the fake backend: of events on a real device nothing is known here.

Steps are those of the demo's model under DDP, two samples each, also in turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import common
import torch
import torch.distributed as dist

import ckptd.monitor
from ckptd.monitor.ring import RingReader
from tests.simdevice import installed, run
from tests.simdevice.loading import _Functions

PLAIN = "no hook"
SOURCES = ("python", "native", "counters")
IDLE = "no backend"
STRAGGLER = "nvidia-resiliency-ext sections"
PROCESSES: dict[str, dict[str, str]] = {
    "main": {},
    "flight recorder off": {"TORCH_FR_BUFFER_SIZE": "0"},
    "debug DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    IDLE: {"BENCH_BACKEND": "fake"},
}
CASES = (PLAIN, *SOURCES, "aside", STRAGGLER)


# --- in the process that measures ---------------------------------------------------------------


def microseconds(
    calls: int, around: Any = nullcontext, tensor: torch.Tensor | None = None
) -> float:
    """Return the microseconds of one all-reduce."""
    tensor = torch.zeros(4) if tensor is None else tensor
    plain = around is nullcontext
    start = time.perf_counter()
    for _ in range(calls):
        if plain:
            dist.all_reduce(tensor)
        else:
            with around():
                dist.all_reduce(tensor)
    return (time.perf_counter() - start) / calls * 1e6


@contextmanager
def attached(case: str, folder: str) -> Iterator[None]:
    """Be in a case, unless it is without a hook."""
    if case == PLAIN:
        yield
        return
    os.environ["CKPTD_RECORDER"] = "python" if case == "aside" else case
    recorder = ckptd.monitor.attach(folder)
    if not recorder.on:
        raise SystemExit(f"no {case} recorder here: `ckptd recorder build`")
    if case == "aside":
        recorder.silence()
    try:
        yield
    finally:
        ckptd.monitor.detach()
        recorder.ring.path.unlink()


def straggler() -> tuple[Any, str]:
    """Return the section of nvidia-resiliency-ext, or why there is none."""
    try:
        from nvidia_resiliency_ext.straggler import Detector

        Detector.initialize(report_time_interval=3600.0)
    except Exception as error:  # noqa: BLE001 - whatever it lacks is reported
        return None, repr(error)

    def section() -> AbstractContextManager[None]:
        return Detector.detection_section("call", profile_cuda=False)  # type: ignore[no-any-return]

    return section, ""


def step_maker() -> Any:
    """Return a function that makes one training step of the demo's model."""
    from ckptd_demo.model import VOCABULARY, build
    from ckptd_demo.spec import GptShape

    shape = GptShape()
    model = torch.nn.parallel.DistributedDataParallel(build(shape, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = torch.randint(0, VOCABULARY, (2, shape.seq + 1))

    def step() -> None:
        optimizer.zero_grad()
        model(samples).backward()
        optimizer.step()

    return step


def answer(question: dict[str, Any], steps: list[Any]) -> Any:
    """Return what was asked: microseconds of a call, or milliseconds of a step, in a case."""
    case, what = question["case"], question["what"]
    if case == STRAGGLER:
        section, why = straggler()
        return microseconds(question["number"], section) if section else {"none": why}
    with attached(case, question["folder"]):
        if what == "call":
            microseconds(200)
            return microseconds(question["number"])
        steps[:] = steps or [step_maker()]
        steps[0]()
        start = time.perf_counter()
        for _ in range(question["number"]):
            steps[0]()
        return (time.perf_counter() - start) / question["number"] * 1e3


def join(backend: str) -> None:
    """Be the only rank of a group."""
    if backend == "fake":  # PyTorch's own, which does nothing
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def serve() -> None:
    """Answer questions, one a line."""
    torch.set_num_threads(1)
    join(os.environ.get("BENCH_BACKEND", "gloo"))
    microseconds(500)
    steps: list[Any] = []
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), steps)), flush=True)
    dist.destroy_process_group()


# --- in the process that asks -------------------------------------------------------------------


class Asked:
    """A process that measures."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--case", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def __call__(self, **question: Any) -> Any:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(json.dumps(question) + "\n")
        pipe_in.flush()
        while line := pipe_out.readline():
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise SystemExit(f"{question} was not answered")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(options: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rounds of calls and of steps."""
    dice = random.Random(1)
    rounds: dict[str, list[dict[str, Any]]] = {"call": [], "step": []}
    folder = tempfile.mkdtemp(dir=options.dir)
    with ExitStack() as stack:
        asked = {n: stack.enter_context(Asked(s)) for n, s in PROCESSES.items()}
        calls = [("main", case) for case in CASES]
        calls += [(name, PLAIN) for name in PROCESSES if name != "main"]
        calls += [(IDLE, case) for case in ("python", "native", "aside")]
        steps = [("main", case) for case in (PLAIN, *SOURCES)]
        for _ in range(options.reps * 4):
            for what, cases in (("call", calls), ("step", steps)):
                number = options.calls if what == "call" else options.steps
                found = {}
                for name, case in dice.sample(cases, len(cases)):
                    about = {"case": case, "what": what, "number": number, "folder": folder}
                    shown = case if name == "main" else name
                    shown += f", {case}" if name == IDLE and case != PLAIN else ""
                    found[shown] = asked[name](**about)
                rounds[what].append(found)
                print(json.dumps(found), file=sys.stderr)
    return rounds


def reading(folder: str, calls: int) -> dict[str, float]:
    """Return the microseconds that a reader needs for a view of few and of all calls."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ["CKPTD_RECORDER"] = "python"
    recorder = ckptd.monitor.attach(folder)
    microseconds(5000)
    out = {}
    with RingReader(recorder.ring.path) as reader:
        for name, wanted in (("64 calls", 64), ("all calls", None)):
            start = time.perf_counter()
            for _ in range(max(calls // 20, 1)):
                reader.view(wanted)
            out[name] = (time.perf_counter() - start) / max(calls // 20, 1) * 1e6
    ckptd.monitor.detach()
    dist.destroy_process_group()
    return out


@contextmanager
def idle_driver() -> Iterator[None]:
    """Replace the driver of the simulated devices: events cost no time, by functions of libc.

    An event that is 0 was never recorded: it has come.
    """
    simulated = installed().driver
    functions = _Functions()
    library = ctypes.CDLL(None)
    for name, form in _Functions._fields_:
        # Of the first argument, which is 0: an event that is not there, the first device.
        zero = form(lambda *_: 0.0) if name == "elapsed" else ctypes.cast(library.labs, form)
        setattr(functions, name, zero)
    simulated.sim_connect(ctypes.byref(functions))
    yield


def on_device(calls: int, folder: str) -> dict[str, float]:
    """Return the microseconds that recording costs a call on a device, a simulated one.

    The least of many rounds, less the least without a hook. Without what the device's own driver
    takes for the two events of a call.
    """
    join("fake")
    tensor = torch.ones(4, device="cuda")
    least = dict.fromkeys((PLAIN, "python", "native"), math.inf)
    # What makes tensors be of a device is Python; the call passes that by.
    with idle_driver(), torch._C._DisableTorchDispatch():
        for _ in range(20):
            for case in least:
                with attached(case, folder):
                    microseconds(50, tensor=tensor)
                    least[case] = min(least[case], microseconds(calls, tensor=tensor))
    dist.destroy_process_group()
    return {case: us - least[PLAIN] for case, us in least.items() if case != PLAIN}


def rows(rounds: list[dict[str, Any]], digits: int) -> tuple[list[list[str]], list[str]]:
    """Return a row a case, and what is to be said of cases that could not be measured."""
    out, notes = [], []
    for case in rounds[0]:
        if isinstance(rounds[0][case], dict):
            notes.append(f"{case}: not measured, {rounds[0][case]['none']}")
            continue
        values = [r[case] for r in rounds]
        base = IDLE if case.startswith(IDLE) else PLAIN
        more = statistics.median(r[case] - r[base] for r in rounds)
        least = min(values) - min(r[base] for r in rounds)
        share = statistics.median(r[case] / r[base] for r in rounds) - 1
        figures = (statistics.median(values), min(values), more, least)
        out.append([case, *(f"{x:.{digits}f}" for x in figures), f"{100 * share:+.1f} %"])
    order = [PLAIN, *SOURCES, "aside", *PROCESSES]
    out.sort(key=lambda row: order.index(row[0]) if row[0] in order else len(order))
    return out, notes


def main() -> None:
    options = common.arguments(__doc__, calls=2000, steps=8)
    if options.case == "serve":
        serve()
        return
    load = os.getloadavg()
    rounds = measure(options)
    read = reading(options.dir, options.calls)
    head = ["all-reduce", "median us", "least us", "more, median", "more, of least", "share"]
    table, notes = rows(rounds["call"], 2)
    text = f"{len(rounds['call'])} rounds.\n\n{common.table(head, table)}\n\n"
    head = ["step of the demo", "median ms", "least ms", "more, median", "more, of least", "share"]
    text += common.table(head, rows(rounds["step"], 2)[0]) + "\n\n"
    text += common.table(["reader asks for", "us"], [[k, f"{v:.0f}"] for k, v in read.items()])
    by_name = importlib.import_module(Path(__file__).stem)  # another process has to find it
    more = run(by_name.on_device, options.calls, tempfile.mkdtemp(dir=options.dir), deadline_s=300)
    text += "\n\n" + common.table(
        ["more for a call on a device", "least us"], [[k, f"{v:.2f}"] for k, v in more.items()]
    )
    text += "".join(f"\n\n{note}" for note in notes)
    data = {"rounds": rounds, "reading": read, "on device": more, "load": [load, os.getloadavg()]}
    common.publish("recorder", common.command(), text, data)


if __name__ == "__main__":
    main()
