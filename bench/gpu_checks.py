"""The checks of `gpu_session.py`: functions, each called in a process of its own.

    python bench/gpu_checks.py NAME --out FILE --dir FOLDER [--simulated] [--gb 12]

What a check finds is a line of FILE as soon as it is known. Simulated, sizes are tiny, and what no
simulated device has is left out by name.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import math
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import common  # noqa: E402
from gpu_session import Record  # noqa: E402

NEEDED = ("torch", "numpy", "ml_dtypes", "msgspec", "psutil", "xxhash", "zstandard", "cyclopts")
GB = 1e9
DEVICE = "cuda"
CYCLES_PER_S = 2e9
"""Of a kernel that sleeps, at most: an H100 and an H200 run at 1.98 GHz."""
_MAP_FIXED = 0x10
"""Of Linux; Python does not name it."""
STACKS_S = 3.0
"""So long before its limit a check writes its stacks."""


class Run:
    """One check's call.

    Parameters
    ----------
    simulated
        Sizes are tiny.
    gb
        Of a state that is to be large.
    limit_s
        For the check; loops end by half of it.
    """

    def __init__(
        self, name: str, out: Path, folder: Path, *, simulated: bool, gb: float, limit_s: float
    ) -> None:
        self.name = name
        self.folder = folder
        self.simulated = simulated
        self.limit_s = limit_s
        self._record = Record(out)
        self.gb = 0.00004 if simulated else gb
        self.width = 32 if simulated else 8192
        self.began = time.monotonic()

    def report(self, **figures: object) -> None:
        """Write what is known by now."""
        self._record.write(check=self.name, figures=figures)

    def fail(self, why: str) -> None:
        """Write why there is no more."""
        self._record.write(check=self.name, failed=why)

    def left(self, share: float) -> float:
        """Return the seconds until a share of the limit has passed."""
        return share * self.limit_s - (time.monotonic() - self.began)

    def size(self, gb: float) -> int:
        """Return a number of bytes, of whole pages."""
        return 1 << 20 if self.simulated else int(gb * GB) // 4096 * 4096


def wait_until(true: Callable[[], bool], within_s: float, pause_s: float = 0.01) -> bool:
    """Wait for something; tell whether it came in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


# --- what the machine has -----------------------------------------------------------------------


def probe(run: Run) -> None:
    run.report(date=date.today().isoformat(), python=platform.python_version())
    run.report(machine=common.machine(), shm_gb=shutil.disk_usage("/dev/shm").free / GB)
    lacking = []
    for name in NEEDED:
        with suppress(ImportError):
            importlib.import_module(name)
            continue
        lacking.append(name)
    run.report(lacking=lacking)
    if lacking:
        raise RuntimeError(f"not installed: {', '.join(lacking)}; carry wheels, see --wheels")
    import psutil
    import torch

    import ckptd
    import ckptd.elastic.torch.session.session  # noqa: F401 - whether it is imported with this torch
    from ckptd.base.torch.device import accelerator, kind_of
    from ckptd.elastic.nccl import installed_version, too_old

    run.report(torch=torch.__version__, cuda=torch.version.cuda, nccl=installed_version())
    run.report(host_free_gb=psutil.virtual_memory().available / GB)
    version = installed_version()
    if version is not None:
        run.report(nccl_is_too_old=too_old(version))
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    begin = time.perf_counter()
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    run.report(first_kernel_s=time.perf_counter() - begin)
    free, total = torch.cuda.mem_get_info()
    name = "simulated" if run.simulated else torch.cuda.get_device_name()
    run.report(device=name, device_gb=total / GB, device_free_gb=free / GB)
    kind = kind_of(DEVICE)
    found = accelerator()
    run.report(
        accelerator=None if found is None else found.type,
        has_streams=kind.has_streams,
        locks_in_place=kind.locks_in_place,
        ignores_captures=kind.ignore_captures(),
    )
    if not run.simulated:
        asked = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max", "--format=csv"]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
            run.report(driver=done.stdout.strip().splitlines()[-1:])


class LockedMemory:
    """Memory of a file descriptor, as a slot is, page-locked through ckptd's table of devices."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np
        import torch

        from ckptd.base.torch.device import kind_of

        fd = os.memfd_create("gpu-check")
        begin = time.perf_counter()
        os.posix_fallocate(fd, 0, nbytes)
        self.allocate_s = time.perf_counter() - begin
        self.mapped = mmap.mmap(fd, nbytes)
        os.close(fd)
        self.array = np.frombuffer(self.mapped, np.uint8)
        self.address = self.array.ctypes.data
        self.tensor = torch.from_numpy(self.array)
        self._kind = kind_of(DEVICE)
        begin = time.perf_counter()
        self.refused = self._kind.lock_pages(self.address, nbytes)
        self.lock_s = time.perf_counter() - begin

    def unlock(self) -> float:
        """Unlock; return the seconds."""
        begin = time.perf_counter()
        refused = self._kind.unlock_pages(self.address)
        if refused is not None:
            raise RuntimeError(f"not unlocked: {refused}")
        return time.perf_counter() - begin


def rate(target: Any, source: Any, times: int = 9) -> float:
    """Return the GB/s of copies from one tensor to another."""
    import torch

    rates = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(target.numel() / (time.perf_counter() - begin) / GB)
    return statistics.median(rates[2:])


def link_rates(run: Run) -> tuple[float, float]:
    """Return the GB/s to the host and from it, of memory that torch has page-locked."""
    import torch

    nbytes = run.size(1.07)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return rate(pinned, device), rate(device, pinned)


def link(run: Run) -> None:
    import psutil
    import torch

    to_host, to_device = link_rates(run)
    run.report(d2h_pinned_gb_s=to_host, h2d_pinned_gb_s=to_device)
    nbytes = run.size(1.07)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    memory = LockedMemory(nbytes)
    run.report(registered_refused=memory.refused)
    run.report(d2h_registered_gb_s=rate(memory.tensor, device))
    run.report(h2d_registered_gb_s=rate(device, memory.tensor))
    run.report(unlock_1_gb_s=memory.unlock())
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    run.report(d2h_pageable_gb_s=rate(pageable, device, 4))
    run.report(h2d_pageable_gb_s=rate(device, pageable, 4))
    fresh = time.perf_counter()
    torch.empty(nbytes, dtype=torch.uint8).copy_(device)
    run.report(d2h_fresh_gb_s=nbytes / (time.perf_counter() - fresh) / GB)
    del memory, pageable
    for gb in (1, 8, 32):
        if not run.simulated and gb * GB > psutil.virtual_memory().available / 3:
            run.report(**{f"lock_{gb}_gb": "more than a third of the memory that is free"})
            continue
        held = LockedMemory(run.size(gb))
        figures = {"allocate_s": held.allocate_s, "lock_s": held.lock_s, "refused": held.refused}
        run.report(**{f"lock_{gb}_gb": figures | {"unlock_s": held.unlock()}})
        del held


def remap(run: Run) -> None:
    """F1: what a driver makes of memory that was unmapped locked, and of what is mapped there."""
    import torch

    from ckptd.base.torch.device import kind_of

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    nbytes, kind = run.size(0.27), kind_of(DEVICE)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    ctypes.memset(address, 1, nbytes)
    before = _pins()
    run.report(first_lock=kind.lock_pages(address, nbytes), pins=_pins() - before)
    run.report(unmapped=libc.munmap(address, nbytes), pins_left=_pins() - before)
    fixed = flags | _MAP_FIXED
    again = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
    ctypes.memset(again, 2, nbytes)
    run.report(same_address=again == address, second_lock=kind.lock_pages(again, nbytes))
    view = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(again), dtype=torch.uint8)
    device = view.to(DEVICE)
    run.report(bytes_are_right=bool((device == 2).all()))
    run.report(unlocked=kind.unlock_pages(again), pins_at_last=_pins() - before)


def _pins() -> int:
    """Return the pages that drivers hold; 0 where the kernel does not say."""
    text = Path("/proc/vmstat").read_text() if Path("/proc/vmstat").exists() else ""
    rows = dict(line.split() for line in text.splitlines())
    names = ("nr_foll_pin_acquired", "nr_foll_pin_released")
    taken, given = (int(rows.get(name, 0)) for name in names)
    return taken - given


# --- what lazy copies promise -------------------------------------------------------------------


def promises(run: Run, chunk_bytes: int | None = None) -> None:
    import torch

    from ckptd.checkpoint.torch import ondevice
    from tests.checkpoint.torch import cuda_checks
    from tests.monitor.torch.recorder import cuda_checks as recorder_checks

    if chunk_bytes is not None:
        ondevice.CHUNK_BYTES = chunk_bytes
    checks = dict(cuda_checks.CHECKS)
    if run.simulated:
        # tests/checkpoint/torch/device calls all of them, under each schedule.
        cuda_checks.make_small()
        checks = dict(list(checks.items())[:2])
        run.report(recorder="needs hardware: NCCL")
    else:
        checks |= recorder_checks.CHECKS
    failed = 0
    for name, act in checks.items():
        begin = time.perf_counter()
        try:
            act(str(run.folder / name))
            torch.cuda.synchronize()
            run.report(**{name: f"ok in {time.perf_counter() - begin:.1f} s"})
        except Exception as error:  # noqa: BLE001 - all of them are to be seen
            traceback.print_exc()
            failed += 1
            run.report(**{name: f"FAILED: {error!r:.300}"})
        shutil.rmtree(run.folder / name, ignore_errors=True)
    run.report(passed=len(checks) - failed, failed=failed)
    if failed:
        raise RuntimeError(f"{failed} of {len(checks)} promises are broken")


def again(run: Run) -> None:
    promises(run, 1 << 20)


def race(run: Run) -> None:
    """F2: many saves of a small state, each while the last one is done in the other thread."""
    import torch

    import ckptd

    weights = [torch.nn.Parameter(torch.randn(64, 64, device=DEVICE)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    state = {"w": {str(i): w for i, w in enumerate(weights)}, "optim": optimizer}
    raised: list[str] = []
    saves = 0
    with ckptd.Checkpointer(str(run.folder), keep=1, storage=ckptd.Storage(dedup=False)) as ck:
        most = 6 if run.simulated else 5000
        while saves < most and run.left(0.8) > 0:
            saves += 1
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            for act, arguments in ((ck.save, (saves, state)), (optimizer.step, ())):
                try:
                    act(*arguments)
                except Exception as error:  # noqa: BLE001 - counted
                    raised.append(repr(error)[:300])
        skipped = ck.skipped
    run.report(saves=saves, skipped=skipped, raised=len(raised), first=raised[:1])
    if raised:
        raise RuntimeError(f"{len(raised)} calls raised")


# --- a training that saves ----------------------------------------------------------------------


class Training:
    """Linear layers in bfloat16 with AdamW in float32: 12 bytes of state a parameter."""

    def __init__(self, run: Run) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = max(1, round(run.gb * GB / 12 / run.width**2))
        self.cast = not run.simulated
        self.model = nn.Sequential(
            *(nn.Linear(run.width, run.width) for _ in range(min(layers, 200)))
        ).to(DEVICE)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        tokens = 8 if run.simulated else 32768
        kind = torch.bfloat16 if self.cast else torch.float32
        self.input = torch.randn(tokens, run.width, device=DEVICE, dtype=kind)

    def compute(self) -> None:
        import torch

        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.cast):
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
        return sum(t.numel() * t.element_size() for t in common.tensors(self.tree()))

    def sums(self) -> list[int]:
        """Return what shows that values are those of another moment."""
        import torch

        flat = [t.detach().reshape(-1) for t in common.tensors(self.tree()) if t.numel()]
        words = [t.view(torch.int32).sum(dtype=torch.int64) for t in flat]
        return [int(n) for n in words]


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


def make_engine(name: str, folder: str, training: Training) -> Any:
    import engines

    import ckptd

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

    class Whole(engines.Ckptd):
        """Each save writes everything, also what no step has changed since the last one."""

        options = MappingProxyType({"storage": ckptd.Storage(dedup=False)})

    class InMemory(engines.Ckptd):
        """Each save goes to the memory of the node's agent, and none to the root."""

        options = MappingProxyType({"tiers": "memory", "every": 1 << 30, **Whole.options})

    kind = {"ckptd": Whole, "memory": InMemory, "dcp": Pinned}[name]
    return kind(folder, training.tree, training.objects)


def settle(ck: Any) -> None:
    """Return when a save has left nothing to do: its slot is locked by a thread of its own."""
    from tests.checkpoint.torch import cuda_checks

    cuda_checks.settle(ck)


def staged(engine: Any, within_s: float) -> None:
    """Return when the newest save is copied to the host."""
    handles = getattr(engine, "_handles", None)
    if handles is not None:
        handles[-1].staged(within_s)
    else:
        engine.before_step()


def measure_engine(run: Run, name: str) -> None:
    import torch

    before, _ = link_rates(run)
    torch.cuda.empty_cache()
    run.report(link_gb_s=before)
    training = Training(run)
    loop(training, 3)
    steps = 2 if run.simulated else 6
    without = loop(training, steps)[0] / steps
    size = training.nbytes
    tensors = len(common.tensors(training.tree()))
    run.report(state_gb=size / GB, tensors=tensors, step_s=without)
    torch.cuda.reset_peak_memory_stats()
    alone = torch.cuda.max_memory_allocated()
    host = common.PeakMemory()
    engine = make_engine(name, str(run.folder), training)
    number = 0
    calls, copies, ends = [], [], []
    for _ in range(3 if run.simulated else 5):  # the first two make and lock the memory
        number += 1
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.save(number)
        calls.append(time.perf_counter() - begin)
        staged(engine, run.limit_s)
        copies.append(time.perf_counter() - begin)
        if number > 1:
            engine.wait()
        ends.append(time.perf_counter() - begin)
        engine.clean(number)
        if number <= 2 and hasattr(engine, "_ck"):
            settle(engine._ck)
        run.report(first_call_ms=1e3 * calls[0], first_copy_s=copies[0])
    durable = statistics.median(ends[2:])
    copy = size / statistics.median(copies[2:]) / GB
    run.report(idle_call_ms=1e3 * statistics.median(calls[2:]), copy_gb_s=copy, durable_s=durable)
    run.report(share_of_link=copy / before)
    # A save is asked for again when the last one is durable: what it costs that does not wait.
    every = math.ceil(1.2 * durable / without) + 1
    room = max(1.0, run.left(0.8) / 3)
    each = max(2, min(steps, int(room / max(durable, without))))
    full, _, gates = loop(training, each, engine, 1, number)
    number += each
    engine.wait()
    run.report(ratio_each_step=full / each / without, gate_ms=1e3 * statistics.median(gates))
    saved = training.sums()
    spaced = max(1, min(3, int(room / (every * without)))) * every
    if not run.simulated:
        base, _, _ = loop(training, spaced)
        seconds, called, _ = loop(training, spaced, engine, every, number)
        engine.wait()
        run.report(spacing_steps=every, call_ms=1e3 * statistics.median(called))
        run.report(extra_ms_a_save=1e3 * (seconds - base) / len(called))
        run.report(device_extra=(torch.cuda.max_memory_allocated() - alone) / size)
        saved = training.sums()
        number += spaced
    run.report(host_extra=host.done() / size)
    for tensor in common.tensors(training.tree()):
        tensor.zero_()
    engine.load(number)
    run.report(bytes_are_right=training.sums() == saved)
    engine.close()
    if training.sums() != saved:
        raise RuntimeError("what was loaded is not what was saved")


def save(run: Run) -> None:
    measure_engine(run, "ckptd")
    run.report(**in_memory(run))


def in_memory(run: Run) -> dict[str, float]:
    """Measure steps with a save each to near memory, in turns with steps without."""
    import torch

    torch.cuda.empty_cache()
    training = Training(run)
    loop(training, 3)
    engine = make_engine("memory", str(run.folder / "near"), training)
    steps, number = (1, 0) if run.simulated else (10, 0)
    without, behind, gates = [], [], []
    for turn in range(2 if run.simulated else 6):
        seconds, _, waits = loop(training, steps, engine, 1, number)
        number += steps
        engine.wait()
        plain = loop(training, steps)[0]
        if turn:  # the first one makes and locks the memory
            without.append(plain / steps)
            behind.append(seconds / steps)
            gates += waits
        if not run.left(0.9) > 2 * (seconds + plain) and behind:
            break
    skipped = engine.skipped
    engine.close()
    return {
        "memory_step_s": statistics.median(behind),
        "memory_ratio_each_step": statistics.median(behind) / statistics.median(without),
        "memory_gate_ms": 1e3 * statistics.median(gates),
        "memory_saves_skipped": skipped,
    }


def dcp(run: Run) -> None:
    measure_engine(run, "dcp")


def small(run: Run) -> None:
    """Thousands of small tensors, and a loop that the host bounds."""
    import torch

    import ckptd

    layers = 2 if run.simulated else 48
    shapes = common.shapes(width=16, layers=layers, words=64)
    weights = {n: torch.nn.Parameter(torch.randn(s).to(DEVICE)) for n, s in shapes.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4, fused=True)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"model": weights, "optim": optimizer}
    every = [t for known in optimizer.state.values() for t in known.values()]
    every += [w.detach() for w in weights.values()]
    flat = [t.reshape(-1).view(torch.uint8) for t in every]
    run.report(tensors=len(every), state_mb=sum(t.numel() for t in flat) / 1e6)
    packed = torch.empty(sum(t.numel() for t in flat), dtype=torch.uint8, pin_memory=True)

    def pack() -> None:
        packed.copy_(torch.cat(flat), non_blocking=True)

    times = 2 if run.simulated else 15
    run.report(packed_ms=host_ms(pack, times), step_ms=host_ms(optimizer.step, times))
    number = 0
    with ckptd.Checkpointer(str(run.folder), keep=1, storage=ckptd.Storage(dedup=False)) as ck:

        def one() -> None:
            nonlocal number
            number += 1
            ck.save(number, state)

        first = host_ms(one, 1)
        ck.wait()
        settle(ck)
        calls, steps = [], []
        for _ in range(times):
            calls.append(host_ms(one, 1))
            steps.append(host_ms(optimizer.step, 1))
            ck.wait()
        run.report(first_save_ms=first, save_ms=statistics.median(calls))
        run.report(step_behind_a_save_ms=statistics.median(steps))


def host_ms(act: Callable[[], object], times: int) -> float:
    """Return the milliseconds that the host is in a call, the device idle before."""
    import torch

    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        act()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


# --- restore ------------------------------------------------------------------------------------


def restore(run: Run) -> None:
    import torch

    import ckptd

    _, to_device = link_rates(run)
    run.report(link_gb_s=to_device)
    run.gb /= 2  # in memory's slots, in the root, and on the device
    training = Training(run)
    loop(training, 1)
    saved, size = training.sums(), training.nbytes
    run.report(state_gb=size / GB)
    os.environ["CKPTD_RUN_DIR"] = str(run.folder / "run")
    root, state = str(run.folder / "root"), training.objects

    def measure(what: str, ck: Any) -> None:
        seconds, wrong = [], 0
        for _ in range(1 if run.simulated else 4):
            for tensor in common.tensors(training.tree()):
                tensor.zero_()
            torch.cuda.synchronize()
            host = common.PeakMemory()
            begin = time.perf_counter()
            ck.load(state)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            extra = host.done() / size
            wrong += training.sums() != saved
            gb_s = size / min(seconds) / GB
            run.report(
                **{
                    f"{what}_s": min(seconds),
                    f"{what}_first_s": seconds[0],
                    f"{what}_gb_s": gb_s,
                    f"{what}_share_of_link": gb_s / to_device,
                    f"{what}_host_extra": extra,
                    f"{what}_from": sorted(ck.last_load.sources),
                    f"{what}_wrong": wrong,
                }
            )
        if wrong:
            raise RuntimeError("what was loaded is not what was saved")

    near: dict[str, Any] = {
        "tiers": [ckptd.Memory(every=1)],
        "every": 1,
        "storage": ckptd.Storage(dedup=False),
    }
    ck = ckptd.Checkpointer(root, **near)
    ck.save(1, state)
    ck.wait()
    settle(ck)
    measure("memory", ck)
    ck.abandon()
    with ckptd.Checkpointer(root, **near) as ck:  # as after a recovery in process
        measure("recovered", ck)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
        measure("files", ck)


# --- NCCL ---------------------------------------------------------------------------------------


def abort_by(run: Run, way: str, **environ: str) -> None:
    """Abort two groups whose collectives are behind a kernel of five seconds.

    Simulated, their backend is that of the tests: it aborts as NCCL does, and has no device.
    """
    from ckptd.elastic.nccl import apply_settings

    os.environ.update(environ)
    apply_settings(os.environ)
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from ckptd.elastic.torch.session.groups import GroupAborts, destroy_groups

    backend, device = "nccl", DEVICE
    if run.simulated:
        from tests.elastic.torch.session import waiting_group

        waiting_group.register()
        backend, device = waiting_group.NAME, "cpu"
    value = torch.ones(1 << 20, device=device)

    def groups() -> list[Any]:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        made = [dist.group.WORLD, dist.new_group([0])]
        if not run.simulated:  # the communicators are made by the first call
            for group in made:
                dist.all_reduce(value, group=group)
            torch.cuda.synchronize()
        return made

    begin = time.perf_counter()
    made = groups()
    run.report(groups_s=time.perf_counter() - begin)
    if not run.simulated:
        torch.cuda._sleep(int(5 * CYCLES_PER_S))
    works = [dist.all_reduce(value, group=group, async_op=True) for group in made]
    begin = time.perf_counter()
    if way == "session":
        aborts = GroupAborts()
        aborts.begin()
        run.report(begun_s=time.perf_counter() - begin)
        run.report(hung=aborts.wait(time.monotonic() + 15))
    elif way == "serial":
        for group in made:
            group.abort()
    else:
        distributed_c10d._abort_process_group()
    run.report(aborted_s=time.perf_counter() - begin)
    torch.cuda.synchronize()
    run.report(device_free_s=time.perf_counter() - begin)
    del works
    destroy_groups()
    run.report(destroyed_s=time.perf_counter() - begin)
    begin = time.perf_counter()
    groups()
    run.report(groups_again_s=time.perf_counter() - begin)
    time.sleep(0.0 if run.simulated else 3.0)  # a watchdog that ends the process has done so then
    run.report(lives=True)
    destroy_groups()


def abort(run: Run) -> None:
    abort_by(run, "session")


def abort_serial(run: Run) -> None:
    abort_by(run, "serial")


def abort_torch(run: Run) -> None:
    abort_by(run, "torch")


def abort_watchdog(run: Run) -> None:
    abort_by(run, "session", TORCH_NCCL_ASYNC_ERROR_HANDLING="1")


def session(run: Run) -> None:
    """Two nodes of one rank; one is killed again and again, and comes again."""
    import elastic_systems

    script = str(HERE / "gpu_worker.py")
    elastic_systems.SYSTEMS["gpu"] = lambda job, _: elastic_systems._run(job, script, "--no-watch")
    environ = {"BENCH_SIMULATED": "1" if run.simulated else "", "BENCH_GB": str(run.gb / 48)}
    environ |= {k: v for k, v in os.environ.items() if k == "PYTHONPATH"}  # with carried wheels
    job = elastic_systems.Run("gpu", 1, 2, environ)
    try:
        job.start(0)
        if not job.has_controller(30):
            raise RuntimeError("no controller in 30 s")
        after = 0.0
        recoveries: list[float] = []
        for fault in range(1 if run.simulated else 5):
            job.start(1)
            both = _event(job, after, "ready", world=2)
            run.report(**{f"two_ranks_{fault}": _of(both)})
            # The first steps make memory and lock it; by the tenth, one is on the other node.
            _event(job, both["t"], "step", world=2, least=both["step"] + 10)
            killed = time.monotonic()
            job.kill_node(1)
            ready = _event(job, killed, "ready", world=1)
            step = _event(job, killed, "step", world=1)
            after = step["t"]
            times = {"ready_s": ready["t"] - killed, "step_s": after - killed}
            last = max(e["step"] for e in job.events() if e["what"] == "step" and e["t"] < killed)
            lost = {"from_step": ready["step"], "of": last}
            run.report(**{f"recovery_{fault}": _of(ready) | times | lost})
            recoveries.append(times["ready_s"])
            # The first one has what is done once in a process.
            run.report(recovery_s=statistics.median(recoveries[1:] or recoveries))
        pids = {e["pid"] for e in job.events() if e["what"] == "ready" and e["node"] == "0"}
        run.report(same_process=len(pids) == 1)
    except Exception:
        print(job.logs(), file=sys.stderr)
        raise
    finally:
        job.end()


def _event(
    job: Any, after: float, what: str, *, world: int, least: int = 0, within_s: float = 40.0
) -> dict[str, Any]:
    """Wait for what the first node's rank writes later than `after`, of a step at least."""

    def is_it(e: dict[str, Any]) -> bool:
        mine = e["what"] == what and e["node"] == "0" and e["world"] == world
        return mine and e["t"] > after and e["step"] >= least

    found = job.wait(is_it, within_s)
    if found is None:
        raise RuntimeError(f"no {what} of {world} ranks in {within_s:.0f} s")
    return dict(found)


def _of(event: dict[str, Any]) -> dict[str, Any]:
    return {k: event[k] for k in ("host_free_gb", "device_free_gb", "generation") if k in event}


def recorder(run: Run) -> None:
    """The host's time of an all-reduce, in turns; one rank."""
    import torch
    import torch.distributed as dist

    import ckptd.monitor
    from ckptd.monitor.torch.recorder.native import build, built

    if not run.simulated:
        begin = time.perf_counter()
        try:
            build()
            run.report(build_s=time.perf_counter() - begin)
        except ckptd.CkptdError as error:
            run.report(build=str(error)[:2000])
    backend, device = ("gloo", "cpu") if run.simulated else ("nccl", DEVICE)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    run.report(backend=backend)
    tensor = torch.ones(8, device=device)

    def host_us() -> float:
        calls = 20 if run.simulated else 2000
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        return (time.perf_counter() - begin) / calls * 1e6

    found: dict[str, list[float]] = {}
    for _ in range(2 if run.simulated else 9):
        found.setdefault("none", []).append(host_us())
        for source in ("python", "native") if built() else ("python",):
            os.environ["CKPTD_RECORDER"] = source
            ckptd.monitor.attach(str(run.folder))
            try:
                found.setdefault(source, []).append(host_us())
            finally:
                ckptd.monitor.detach()
    us = {name: statistics.median(times) for name, times in found.items()}
    more = {f"{name}_us": value - us["none"] for name, value in us.items() if name != "none"}
    run.report(call_us=us, **more)
    dist.destroy_process_group()


# --- processes ----------------------------------------------------------------------------------


def zygote(run: Run) -> None:
    """Check what importing leaves behind, and whether a fork of it has a device."""
    # As its launcher starts it: numpy's libraries must start no threads.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "forking", "--dir", str(run.folder)]
    command += ["--out", str(run.folder / "forking.jsonl")]
    command += ["--simulated"] if run.simulated else []
    done = subprocess.run(
        command,
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        text=True,
        timeout=run.left(0.9),
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    run.report(**found)
    if found["unsafe"] or found.get("value") != 8.0:
        raise RuntimeError(f"a fork is of no use: {found}")


def forking(run: Run) -> None:
    """Be a zygote, and print what a fork of it finds."""
    from ckptd.elastic.torch.session import zygote as module

    begin = time.perf_counter()
    unsafe = module._preload()
    found: dict[str, Any] = {"import_s": time.perf_counter() - begin, "unsafe": unsafe}
    device = "cpu" if run.simulated else DEVICE
    reader, writer = os.pipe()
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            value = float(torch.ones(8, device=device).sum())
            os.write(writer, json.dumps({"value": value}).encode())
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            os.write(writer, json.dumps({"error": repr(error)[:500]}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found |= json.loads(pipe.read() or b'{"error": "the fork died"}')
    os.waitpid(pid, 0)
    print(json.dumps(found | {"device": device, "first_kernel_s": time.perf_counter() - begin}))


def kill(run: Run) -> None:
    """Kill a process in the middle of copies; what it had made durable is whole."""
    import torch

    import ckptd

    free = torch.cuda.mem_get_info()[0]
    run.report(device_free_gb=free / GB)
    command = [sys.executable, __file__, "saver", "--out", str(run.folder / "saver.jsonl")]
    command += ["--dir", str(run.folder), "--gb", str(run.gb), "--limit", str(run.limit_s)]
    if run.simulated:
        command.append("--simulated")
    saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    steps: list[int] = []
    try:
        assert saver.stdout is not None
        for line in saver.stdout:
            if line.startswith("durable"):
                steps.append(int(line.split()[1]))
            if len(steps) >= 3:
                break
        time.sleep(0.05)
    finally:
        saver.kill()
        saver.wait(20)
    run.report(durable=steps)
    state = {f"w{i}": torch.zeros(_part(run), device=DEVICE) for i in range(8)}
    with ckptd.Checkpointer(str(run.folder / "root"), storage=ckptd.Storage(dedup=False)) as ck:
        step = ck.load(state)
    wrong = [name for name, t in state.items() if not bool((t == step).all())]
    run.report(loaded=step, wrong=wrong)
    del state
    torch.cuda.empty_cache()
    back = wait_until(lambda: torch.cuda.mem_get_info()[0] > free - 2 * run.gb * GB / 12, 10)
    run.report(device_free_after_gb=torch.cuda.mem_get_info()[0] / GB, came_back=back)
    if wrong or step < steps[-1]:
        raise RuntimeError(f"step {step} was loaded behind {steps}, wrong: {wrong}")


def _part(run: Run) -> int:
    return 4096 if run.simulated else int(run.gb * GB / 12 / 8 / 4)


def saver(run: Run) -> None:
    """Save a state that is full of the step's number, until something ends this."""
    import torch

    import ckptd

    state = {f"w{i}": torch.zeros(_part(run), device=DEVICE) for i in range(8)}
    with ckptd.Checkpointer(
        str(run.folder / "root"), storage=ckptd.Storage(dedup=False), keep=2
    ) as ck:
        for step in range(1, 1_000_000):
            ck.before_mutation()
            for tensor in state.values():
                tensor.fill_(float(step))
            handle = ck.save(step, state)
            if step % 3 == 0 and handle is not None:
                handle.durable(run.limit_s)
                print(f"durable {step}", flush=True)


def replicas(run: Run) -> None:
    """Two ranks of one device that hold the same: what their samples cost."""
    from ckptd.testing.ranks import run_ranks
    from tests.simdevice import run_simulated_ranks

    play: Any = run_simulated_ranks if run.simulated else run_ranks
    # The function is imported by name there, and not from __main__.
    named = importlib.import_module("gpu_checks")
    found = play(2, named.replicated, str(run.folder), run.simulated, deadline_s=0.9 * run.limit_s)
    for rank, figures in enumerate(found):
        run.report(**{f"rank_{rank}": figures})


def replicated(folder: str, simulated: bool) -> dict[str, Any]:
    """Be one of the ranks."""
    import torch

    import ckptd

    torch.manual_seed(0)
    count, rows = (4, 40) if simulated else (200, 1000)
    weights = [torch.nn.Parameter(torch.randn(rows + i, 64).to(DEVICE)) for i in range(count)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    state = {"w": {str(i): w for i, w in enumerate(weights)}, "optim": optimizer}
    calls, steps = [], []

    def train() -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    train()
    with ckptd.Checkpointer(f"{folder}/root", storage=ckptd.Storage(dedup=False), keep=2) as ck:
        for number in range(1, 4 if simulated else 12):
            busy = 0 if simulated else int(0.2 * CYCLES_PER_S)
            torch.cuda.synchronize()
            if busy:
                torch.cuda._sleep(busy)
            calls.append(host_ms_busy(lambda number=number: ck.save(number, state)))
            steps.append(host_ms_busy(train))
            ck.wait()
            settle(ck)
    return {
        "tensors": 4 * count,
        "first_save_ms": calls[0],
        "save_ms": statistics.median(calls[1:]),
        "step_ms": statistics.median(steps),
        "save_waits_for_a_kernel_of_ms": 0 if simulated else 200,
    }


def host_ms_busy(act: Callable[[], object]) -> float:
    """Return the milliseconds that the host is in a call, whatever the device does."""
    begin = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - begin)


# --- weights for others -------------------------------------------------------------------------


def publish(run: Run) -> None:
    """Two processes of one device: weights by its own memory, out of the host's, over a socket."""
    from ckptd.testing.ranks import run_ranks
    from tests.simdevice import run_simulated_ranks

    play: Any = run_simulated_ranks if run.simulated else run_ranks
    named = importlib.import_module("gpu_checks")
    nbytes = run.size(2.1)
    arguments = (named.published, str(run.folder), nbytes, run.simulated)
    trainer, worker = play(2, *arguments, deadline_s=0.9 * run.limit_s)
    run.report(state_gb=nbytes / GB, **trainer)
    run.report(**worker)
    if worker["near_share"] != 1.0 and not run.simulated:
        raise RuntimeError("some weights went through the host: the log says why")


def values_of(step: int, count: int) -> Any:
    """Return elements on the device that differ everywhere from those of other steps."""
    import torch

    return (torch.arange(count, device=DEVICE) * 31 + step * 7).to(torch.int16)


def published(folder: str, nbytes: int, simulated: bool) -> dict[str, Any]:
    """Be the trainer, or the worker."""
    import torch
    import torch.distributed as dist

    import ckptd
    from ckptd.publish.torch.devices import DeviceCarrier
    from ckptd.reshard.torch.relayout import TorchMemory
    from tests.simdevice.ipc import SimSharing

    layout = "mesh O = x:1\nspace s { w{i}[n] }\nlayout one of s on O { w.{i} = w{i}[n] }\n"
    at, count, steps = f"{folder}/at", nbytes // 16, 3 if simulated else 6
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)]
    carrier = DeviceCarrier(None, SimSharing() if simulated else None)

    def tensors() -> dict[str, Any]:
        return {f"w.{i}": torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for i in range(8)}

    if rank == 0:
        state, calls = tensors(), []
        with ckptd.Publisher(layout, at, process_group=alone[0], carrier=carrier) as publisher:
            for step in range(1, steps + 1):
                for tensor in state.values():
                    tensor.view(torch.int16).copy_(values_of(step, count))
                torch.cuda.synchronize()
                began = time.perf_counter()
                publication = publisher.publish(step, {"m": state})
                calls.append(1e3 * (time.perf_counter() - began))
                publication.wait(60.0)
                dist.barrier()
                dist.barrier()
        return {"first_publish_ms": calls[0], "publish_ms": statistics.median(calls[1:])}
    near = 0
    copied = TorchMemory.copy_to

    def counted(self: TorchMemory, target: Any, block: Any) -> bool:
        nonlocal near
        near += 2 * block.numel
        return copied(self, target, block)

    ways = {"ipc": (carrier, False), "slot": (None, False), "socket": (None, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    TorchMemory.copy_to = counted  # type: ignore[method-assign]
    try:
        with ExitStack() as stack:
            made = {}
            for name, (own, far) in ways.items():
                into = tensors()
                one = ckptd.Subscriber(layout, {"m": into}, at, carrier=own)
                one._far = far  # as if the trainer were on another host
                made[name] = stack.enter_context(one), into
            for step in range(1, steps + 1):
                dist.barrier()
                for name, (one, into) in made.items():
                    report = one.update(wait_s=30.0)
                    wanted = values_of(step, count)
                    wrong = [n for n, t in into.items() if not t.view(torch.int16).equal(wanted)]
                    if wrong or report is None:
                        raise RuntimeError(f"{name}, version {step}: wrong are {wrong}")
                    seconds[name].append(report.seconds)
                dist.barrier()
            plain = rate(*(x["w.0"].view(torch.uint8) for _, x in list(made.values())[:2]))
    finally:
        TorchMemory.copy_to = copied  # type: ignore[method-assign]
    figures = {f"{n}_gb_s": nbytes / statistics.median(x[1:]) / GB for n, x in seconds.items()}
    figures |= {f"{name}_first_s": found[0] for name, found in seconds.items()}
    return {"plain_copy_gb_s": plain, "near_share": near / (steps * nbytes), **figures}


ROW = 1 << 16
"""Elements of a row, whose places take two bytes each."""


def found_on_device(old: Any, new: Any, weights: Any) -> tuple[Any, ...]:
    """Return on the host what makes the older elements the newer ones, and sums that prove these.

    Changed elements of each row, their places and values, the rows of which more than half
    changed, and two sums of the words of each 256 KiB.
    """
    import torch

    rows = new.view(-1, ROW)
    differs = rows != old.view(-1, ROW)
    counts = differs.sum(1, dtype=torch.int32)
    per = counts.cpu()
    few, many = (per > 0) & (per <= ROW // 2), per > ROW // 2
    places = differs[few.to(DEVICE)].view(-1).nonzero().squeeze(1)
    values = rows[few.to(DEVICE)].view(-1)[places]
    words = new.view(torch.int64).view(-1, len(weights))
    sums = torch.stack((words.sum(1), (words * weights).sum(1)))
    low = (places % ROW - ROW // 2).to(torch.int16)
    return tuple(x.cpu().numpy() for x in (per, low, values, rows[many.to(DEVICE)], sums))


def patched(slot: Any, found: tuple[Any, ...]) -> None:
    """Make the older elements the newer ones, on the host."""
    import numpy as np

    per, low, values, whole, _ = found
    few = np.flatnonzero((per > 0) & (per <= ROW // 2))
    at = np.repeat(few * ROW + ROW // 2, per[few])
    at += low
    slot[at] = values
    slot.reshape(-1, ROW)[per > ROW // 2] = whole


def proved(slot: Any, found: tuple[Any, ...], weights: Any) -> bool:
    """Tell whether the host has what the device had."""
    import numpy as np

    words = slot.view(np.int64).reshape(-1, len(weights))
    sums = words.sum(1), np.einsum("ij,j->i", words, weights)
    return all(map(np.array_equal, sums, found[-1]))


def changes(run: Run) -> None:
    """Find what changed on the device, and patch a slot, beside bringing all of it to the host.

    The slot is patched and proved as it would have to be for workers of the host, and both
    versions are compared as the server does.
    """
    import numpy as np
    import torch

    from ckptd.base.digest import digest
    from ckptd.base.runtime import copier
    from ckptd.publish.blocks import BLOCK_BYTES
    from ckptd.publish.deltas import changed

    # In pieces: the places of a whole large tensor would take eight bytes an element.
    piece = 2 * ROW if run.simulated else 1 << 26
    count = max(1, run.size(1.07) // 2 // piece) * piece
    old = values_of(1, count)
    was = old.cpu().numpy()
    pinned = torch.zeros(count, dtype=torch.int16, pin_memory=True)
    weights = torch.arange(BLOCK_BYTES // 8, device=DEVICE) * 0x9E3779B97F4A7C1 | 1
    pieces = [slice(first, first + piece) for first in range(0, count, piece)]
    run.report(state_gb=2 * count / GB, native=copier.copies_natively())
    for percent in (0.0, 0.1, 1.0, 4.5, 30.0, 100.0):
        new = old.clone()
        for one in pieces:
            at = torch.arange(one.start, one.stop, device=DEVICE) * round(10 * percent)
            new[one] ^= (at % 1000 < round(10 * percent)).to(torch.int16)
        del at
        seconds: list[float] = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            both = [found_on_device(old[one], new[one], weights) for one in pieces]
            seconds.append(time.perf_counter() - began)
        whole = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            pinned.copy_(new, non_blocking=True)
            torch.cuda.synchronize()
            whole.append(time.perf_counter() - began)
        slot, on_host = was.copy(), weights.cpu().numpy()
        began = time.process_time()
        for one, found in zip(pieces, both, strict=True):
            patched(slot[one], found)
        patch = time.process_time() - began
        began = time.process_time()
        good = [proved(slot[one], f, on_host) for one, f in zip(pieces, both, strict=True)]
        prove = time.process_time() - began
        right = digest(slot.data) == digest(pinned.numpy().data)
        slot[count // 2] ^= 64
        shown = [proved(slot[one], f, on_host) for one, f in zip(pieces, both, strict=True)]
        a, b = (x.view(np.uint8) for x in (was, pinned.numpy()))
        most = min(len(b), 256 << 20)
        began = time.process_time()
        for start in range(0, most, BLOCK_BYTES):
            block = b[start : start + BLOCK_BYTES]
            changed(a[start : start + BLOCK_BYTES], block, 2)
        compared = time.process_time() - began
        figures = {
            "on_device_s": min(seconds),
            "crossed_share": sum(x.nbytes for f in both for x in f) / (2 * count),
            "whole_to_host_s": min(whole),
            "patch_cpu_s": patch,
            "prove_cpu_s": prove,
            "compare_cpu_s": compared * len(b) / most,
            "bytes_are_right": right and all(good),
            "damage_is_found": shown.count(False) == 1,
        }
        run.report(**{f"changed_{percent}_percent": figures})
        if not (figures["bytes_are_right"] and figures["damage_is_found"]):
            raise RuntimeError(f"{percent} % changed: the delta does not make the new bytes")


# --- what goes wrong ----------------------------------------------------------------------------


def graphs(run: Run) -> None:
    """F8: captures while a save is copied, in each mode."""
    import torch

    import ckptd

    wide = 64 if run.simulated else 4096
    live = {f"w{i}": torch.randn(wide, wide, device=DEVICE) for i in range(8)}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(4, device=DEVICE).add_(1.0)
    failed = []
    with ckptd.Checkpointer(
        str(run.folder), storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(lazy="all")
    ) as ck:
        ck.save(1, live)
        ck.wait()
        settle(ck)
        (stream,) = ck._saver._device_copies._streams.values()
        for number, mode in enumerate(("global", "thread_local", "relaxed"), 2):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(0.3 * CYCLES_PER_S))
            handle = ck.save(number, live)
            wanted = {n: t.clone() for n, t in live.items()}
            graph = torch.cuda.CUDAGraph()
            found = {"capture": "ok", "save": "ok", "bytes": "right"}
            try:
                # Not by torch.cuda.graph(), which waits for the device, and so for the copies.
                with torch.cuda.stream(side):
                    graph.capture_begin(capture_error_mode=mode)
                    x.add_(1.0)
                    time.sleep(0.2)
                    graph.capture_end()
            except RuntimeError as error:
                found["capture"] = str(error)[:200]
            try:
                assert handle is not None
                handle.durable(20.0)
                ck.load(live, number)
            except ckptd.CkptdError as error:
                found["save"] = f"{error.kind}: {str(error)[:200]}"
            if not all(torch.equal(live[n], wanted[n]) for n in wanted):
                found["bytes"] = "wrong"
            run.report(**{mode: found})
            if set(found.values()) != {"ok", "right"}:
                failed.append(mode)
        torch.cuda.synchronize()
    if failed:
        raise RuntimeError(f"a save and a capture hurt each other in mode {', '.join(failed)}")


def device_assert(run: Run) -> None:
    """A kernel that asserts: a save under way ends with that, and hangs nobody."""
    import torch

    import ckptd

    live = {f"w{i}": torch.randn(64, 64, device=DEVICE) for i in range(8)}
    ck = ckptd.Checkpointer(
        str(run.folder),
        storage=ckptd.Storage(dedup=False),
        copy=ckptd.CopyOptions(lazy="all"),
        timeout_s=20,
    )
    ck.save(1, live)
    ck.wait()
    ck.save(2, live)
    if run.simulated:
        from tests.simdevice import installed

        installed().fail(0)
    else:
        torch.ones(4, device=DEVICE)[torch.tensor([1 << 20], device=DEVICE)]
    found = "nothing was raised"
    begin = time.perf_counter()
    try:
        handle = ck.save(3, live)
        assert handle is not None
        handle.durable(20.0)
    except (ckptd.CkptdError, RuntimeError) as error:
        found = f"{type(error).__name__} {getattr(error, 'kind', '')}: {str(error)[:300]}"
    run.report(raised=found, after_s=time.perf_counter() - begin)
    begin = time.perf_counter()
    with suppress(ckptd.CkptdError, RuntimeError):
        ck.abandon()
    run.report(abandoned_s=time.perf_counter() - begin)
    if "assert" not in found and "CUDA" not in found:
        raise RuntimeError(f"the save does not say what happened: {found}")


def memory(run: Run) -> None:
    """Clones that the device has no room for, and slots that nobody may lock."""
    import torch

    import ckptd
    from ckptd.checkpoint.torch import ondevice
    from ckptd.checkpoint.torch.ondevice import Pins

    ondevice.CLONE_ALWAYS = 0  # so that what is free is asked after
    count = 1 << 18 if run.simulated else 1 << 30
    live = {"ema": torch.randn(count, device=DEVICE)}
    with _little_memory(run, count):
        for what in ("clones", "locks"):
            with ckptd.Checkpointer(
                str(run.folder / what), storage=ckptd.Storage(dedup=False)
            ) as ck:
                if what == "locks":
                    ck._saver._device_copies.pins = Pins(budget=1)
                ck.save(1, live)
                ck.wait()
                settle(ck)
                total = float(live["ema"].sum())
                begin = time.perf_counter()
                ck.save(2, live)
                seconds = time.perf_counter() - begin
                live["ema"].zero_()
                ck.wait()
                locked = ck._saver._device_copies.pins.locked
                ck.load(live, 2)
                right = float(live["ema"].sum()) == total
            run.report(**{what: {"save_s": seconds, "locked": locked, "right": right}})
            if not right:
                raise RuntimeError(f"without memory for {what}: wrong bytes were stored")


@contextmanager
def _little_memory(run: Run, count: int) -> Iterator[None]:
    """Leave a quarter of what clones of so many numbers would take."""
    import torch

    if run.simulated:
        from tests.simdevice import installed

        simulator = installed()
        before, simulator.capacity = simulator.capacity, simulator.allocated[0] + count
        try:
            yield
        finally:
            simulator.capacity = before
        return
    torch.cuda.empty_cache()
    held = torch.empty(torch.cuda.mem_get_info()[0] - count, dtype=torch.uint8, device=DEVICE)
    yield
    del held


def csan(run: Run) -> None:
    """The promises under PyTorch's sanitizer of streams, which sees the thread it is enabled in."""
    os.environ["TORCH_CUDA_SANITIZER"] = "1"
    promises(run)


CHECKS: dict[str, Callable[[Run], None]] = {
    "probe": probe,
    "link": link,
    "remap": remap,
    "promises": promises,
    "race": race,
    "save": save,
    "small": small,
    "restore": restore,
    "abort": abort,
    "abort-serial": abort_serial,
    "abort-torch": abort_torch,
    "abort-watchdog": abort_watchdog,
    "session": session,
    "recorder": recorder,
    "changes": changes,
    "zygote": zygote,
    "graphs": graphs,
    "assert": device_assert,
    "memory": memory,
    "kill": kill,
    "replicas": replicas,
    "publish": publish,
    "dcp": dcp,
    "again": again,
    "csan": csan,
}
ROLES = CHECKS | {"saver": saver, "forking": forking}
"""`saver` and `forking` are started by checks."""
ON_THE_HOST = frozenset({"session", "zygote", "forking", "replicas", "publish"})
"""These start the processes that have devices, or have none when simulated."""


def call(name: str, run: Run) -> int:
    """Call a check; return the status of its process."""
    try:
        ROLES[name](run)
    except Exception as error:  # noqa: BLE001 - what it was is a line, and the trace in the log
        traceback.print_exc()
        run.fail(repr(error)[:1000])
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ROLES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--gb", type=float, default=12.0)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: not without a parent
    faulthandler.enable()
    if options.name in CHECKS:  # it takes a thread, and a zygote may have none
        faulthandler.dump_traceback_later(max(1.0, options.limit - STACKS_S))
    run = Run(
        options.name,
        options.out,
        options.dir,
        simulated=options.simulated,
        gb=options.gb,
        limit_s=options.limit,
    )
    if options.simulated and options.name not in ON_THE_HOST:
        from tests.simdevice import install

        install()
    status = call(options.name, run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what engines leave to the interpreter's exit may hang


if __name__ == "__main__":
    main()
