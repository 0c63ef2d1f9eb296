"""What does a checkpoint of a state on a GPU cost a training loop?

    python bench/gpu.py                    # measure: under eight minutes
    python bench/gpu.py --check            # the checks of tests/train/cuda_checks.py, no pytest
    python bench/gpu.py --gb 20 --steps 8 --cases ckptd

A stack of linear layers trains in bfloat16 with AdamW in float32. Each case is a fresh process:
what a plain page-locked copy moves, ckptd, DCP's ``async_save`` with page-locked staging, and what
an all-reduce costs the host with and without the recorder of collectives. Files go to memory where
that has room, so that the device's link is measured and not a disk. Writes ``results/gpu.json`` (or
``--out``) and prints a table. Without a CUDA device it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# What saving to a folder imports; the command line's packages are not among them.
NEEDED = ("torch", "numpy", "ml_dtypes", "msgspec", "psutil", "xxhash", "zstandard")
WIDTH = 8192
WARM_UP = 3
IDLE_SAVES = 3
GB = 1e9
RECORDER = "recorder"
CASES = ("plain copy", "ckptd", "DCP async pinned", RECORDER)
CASE_S = 200.0


def lacking() -> str | None:
    """Return why nothing can be measured here."""
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        return f"not installed: {', '.join(missing)}"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def default_gb() -> float:
    """Return what fits: on the device with gradients, on the host twice in slots and in files."""
    import psutil
    import torch

    free = torch.cuda.mem_get_info()[0]
    host = psutil.virtual_memory().available
    return min(20.0, max(1.0, min(0.12 * free, 0.08 * host) / GB))


# --- the training -------------------------------------------------------------------------------


class Training:
    """Linear layers: 12 bytes of state a parameter."""

    def __init__(self, gb: float, tokens: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = max(1, round(gb * GB / 12 / WIDTH**2))
        with torch.device("cuda"):
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.input = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)

    def compute(self) -> None:
        import torch

        with torch.autocast("cuda", torch.bfloat16):
            x = self.input
            for layer in self.model:
                x = torch.relu(layer(x))
            x.float().square().mean().backward()

    def update(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def tree(self) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        moments = {n: dict(self.optim.state[p]) for n, p in named.items()}
        return {"model": {n: p.detach() for n, p in named.items()}, "optim": moments}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    @property
    def nbytes(self) -> int:
        import common

        return sum(t.numel() * t.element_size() for t in common.tensors(self.tree()))


def loop(training: Training, steps: int, engine: Any = None, every: int = 1, first: int = 0) -> Any:
    """Train, saving behind each `every`-th step; return seconds, and those of calls and gates."""
    import torch

    torch.cuda.synchronize()
    calls, gates = [], []
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        training.compute()
        gate = time.perf_counter()
        if engine is not None:
            engine.before_step()
        training.update()
        gates.append(time.perf_counter() - gate)
        if engine is not None and step % every == 0:
            call = time.perf_counter()
            engine.save(first + step)
            calls.append(time.perf_counter() - call)
            engine.clean(first + step)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, calls, gates


# --- the cases ----------------------------------------------------------------------------------


def plain_copy(options: argparse.Namespace) -> dict[str, Any]:
    """Copy 1 GiB to page-locked memory again and again."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append((1 << 30) / (time.perf_counter() - begin) / GB)
    return {"link_gb_s": statistics.median(rates[2:])}


def make_engine(name: str, folder: str, training: Training) -> Any:
    import engines

    class Pinned(engines.DcpAsync):
        """DCP's thread, staged into page-locked memory that is kept, without blocking."""

        options = MappingProxyType(
            {
                "use_pinned_memory": True,
                "use_shared_memory": False,
                "use_async_staging": True,
                "use_non_blocking_copy": True,
            }
        )

    kind = {"ckptd": engines.Ckptd, "DCP async pinned": Pinned}[name]
    return kind(folder, training.tree, training.objects)


def staged(engine: Any) -> None:
    """Return when the newest save is copied to the host."""
    handles = getattr(engine, "_handles", None)
    if handles is not None:
        handles[-1].staged(CASE_S)
    else:
        engine.before_step()


def engine_case(name: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    import common
    import torch

    training = Training(options.gb, options.tokens)
    loop(training, WARM_UP)
    without = loop(training, options.steps)[0] / options.steps
    size = training.nbytes
    torch.cuda.reset_peak_memory_stats()
    alone = torch.cuda.max_memory_allocated()
    host = common.PeakMemory()
    engine = make_engine(name, folder, training)
    number = 0
    calls, copies, ends = [], [], []
    for _ in range(IDLE_SAVES + 2):  # the first two make and lock the memory
        number += 1
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.save(number)
        calls.append(time.perf_counter() - begin)
        staged(engine)
        copies.append(time.perf_counter() - begin)
        if number > 1:
            engine.wait()
        ends.append(time.perf_counter() - begin)
        engine.clean(number)
    durable = statistics.median(ends[2:])
    every = math.ceil(1.2 * durable / without) + 1
    room = options.seconds / 2
    spaced = max(1, min(3, int(room / (every * without)))) * every
    base, _, _ = loop(training, spaced)
    seconds, spaced_calls, _ = loop(training, spaced, engine, every, number)
    number += spaced
    engine.wait()
    each = max(2, min(options.steps, int(room / max(durable, without))))
    full, _, gates = loop(training, each, engine, 1, number)
    engine.wait()
    found = {
        "state_gb": size / GB,
        "tensors": len(common.tensors(training.tree())),
        "step_s": without,
        "first_call_ms": 1e3 * calls[0],
        "idle_call_ms": 1e3 * statistics.median(calls[2:]),
        "copy_gb_s": size / statistics.median(copies[2:]) / GB,
        "durable_s": durable,
        "call_ms": 1e3 * statistics.median(spaced_calls),
        "gate_ms": 1e3 * statistics.median(gates),
        "spacing_steps": every,
        "extra_ms_a_save": 1e3 * (seconds - base) / len(spaced_calls),
        "ratio_each_step": full / each / without,
        "device_extra": (torch.cuda.max_memory_allocated() - alone) / size,
        "host_extra": host.done() / size,
    }
    engine.close()
    return found


def recorder_case(folder: str) -> dict[str, Any]:
    """Return the microseconds of host time of an all-reduce, in turns; one rank, NCCL."""
    import torch
    import torch.distributed as dist

    import ckptd.monitor
    from ckptd.train.recorder.native import built

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(8, device="cuda")

    def host_us(calls: int = 2000) -> float:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        return (time.perf_counter() - begin) / calls * 1e6

    found: dict[str, list[float]] = {}
    for _ in range(7):
        found.setdefault("no hook", []).append(host_us())
        for source in ("python", "native") if built() else ("python",):
            os.environ["CKPTD_RECORDER"] = source
            ckptd.monitor.attach(folder)
            found.setdefault(source, []).append(host_us())
            ckptd.monitor.detach()
    return {"call_us": {name: statistics.median(times) for name, times in found.items()}}


def one(options: argparse.Namespace) -> None:
    folder = f"{options.dir}/case"
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    try:
        if options.case == "plain copy":
            found = plain_copy(options)
        elif options.case == RECORDER:
            found = recorder_case(folder)
        else:
            found = engine_case(options.case, options, folder)
    except Exception as error:  # noqa: BLE001 - one engine's failure must not hide the others
        traceback.print_exc()
        found = {"failed": repr(error)[:300]}
    print(json.dumps(found), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # what engines leave to the interpreter's exit may hang


# --- checks -------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> int:
    import torch

    from tests.train import cuda_checks
    from tests.train.recorder import cuda_checks as recorder_cuda_checks

    checks = cuda_checks.CHECKS | recorder_cuda_checks.CHECKS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    for name, act in checks.items():
        begin = time.perf_counter()
        folder = tempfile.mkdtemp(dir=options.dir)
        try:
            act(f"{folder}/root")
            torch.cuda.synchronize()
            print(f"ok      {name} ({time.perf_counter() - begin:.1f} s)", flush=True)
        except Exception:  # noqa: BLE001 - all of them are to be seen
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    return 1 if failed else 0


# --- telling ------------------------------------------------------------------------------------

COLUMNS = {
    "idle_call_ms": "save call ms, idle",
    "call_ms": "save call ms, training",
    "gate_ms": "update on the host ms",
    "copy_gb_s": "to the host GB/s",
    "extra_ms_a_save": "extra ms a save",
    "ratio_each_step": "step with a save at each / without",
    "durable_s": "durable s",
    "first_call_ms": "first call ms",
    "device_extra": "extra device memory / state",
    "host_extra": "extra host memory and files in memory / state",
}


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    import common
    import torch

    device = torch.cuda.get_device_properties(0)
    body = {
        "command": "python bench/gpu.py " + " ".join(sys.argv[1:]),
        "machine": common.machine()
        | {"device": device.name, "torch": torch.__version__, "cuda": torch.version.cuda},
        "data": found,
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(body, indent=1) + "\n")
    rows = [
        [name, *(figures.get(key, float("nan")) for key in COLUMNS)]
        for name, figures in found.items()
        if "step_s" in figures
    ]
    print(f"{device.name}, torch {torch.__version__}; a state of {options.gb:.1f} GB")
    link = found.get("plain copy", {}).get("link_gb_s")
    print(f"A plain page-locked copy: {link:.1f} GB/s" if link else "The plain copy failed")
    print(common.table(["engine", *COLUMNS.values()], rows))
    for source, us in found.get(RECORDER, {}).get("call_us", {}).items():
        print(f"all-reduce on the device, {source}: {us:.1f} us of the host")
    for name, figures in found.items():
        if "failed" in figures:
            print(f"FAILED: {name}: {figures['failed']}")


def scratch() -> str:
    """Return a new folder in memory, else where temporary files go."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and shutil.disk_usage(memory).free > 64 * GB else None
    return tempfile.mkdtemp(prefix="ckptd-gpu-", dir=base)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.0, help="size of the state; 0: what fits")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=40.0, help="for the loops of one engine")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dir", help="scratch folder (default: in memory where there is room)")
    parser.add_argument("--out", default=str(HERE / "results" / "gpu.json"))
    parser.add_argument("--check", action="store_true", help="run the checks, measure nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    why = lacking()
    if why is not None:
        print(f"bench/gpu.py needs a CUDA device and ckptd's packages; {why}", file=sys.stderr)
        return 2
    options.gb = options.gb or default_gb()
    if options.case:
        one(options)
    own = options.dir is None
    options.dir = options.dir or scratch()
    try:
        return check(options) if options.check else measure(options)
    finally:
        if own:
            shutil.rmtree(options.dir, ignore_errors=True)


def measure(options: argparse.Namespace) -> int:
    import common

    shared = ["--dir", options.dir, "--gb", str(options.gb), "--steps", str(options.steps)]
    shared += ["--tokens", str(options.tokens), "--seconds", str(options.seconds)]
    found: dict[str, dict[str, Any]] = {}
    for name in options.cases.split(","):
        try:
            found[name] = common.in_fresh_process(__file__, [*shared, "--case", name], CASE_S)
        except Exception as error:  # noqa: BLE001 - a hang or a crash of one engine, told below
            found[name] = {"failed": repr(error)[:300]}
        except SystemExit as error:
            found[name] = {"failed": str(error)[-3000:]}
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        report(found, options)
    return 1 if any("failed" in f for f in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
