"""What the self-tests of a cluster's nodes say: each by itself, and beside the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ckptd.monitor.links.preflight import PreflightFinding
from ckptd.monitor.stats import MAD_TO_SIGMA

__all__ = ["Gpu", "MachineTest", "machine_findings", "slow_machines"]

LEAST_SHM_BYTES = 64 << 20
GOOD_SHM_BYTES = 1 << 30
LEAST_OPEN_FILES = 1024
GOOD_OPEN_FILES = 4096
MOST_SKEW_S = 1.0
SLOW = 1.5
SLOW_Z = 5.0
LEAST_COHORT = 4
"""Nodes below which none is compared with the others."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as the driver describes it.

    Attributes
    ----------
    name
        Model.
    memory_bytes
        Memory.
    uncorrected
        Uncorrected memory errors since the driver started; 0 where it does not count.
    celsius
        Temperature.
    """

    name: str
    memory_bytes: int
    uncorrected: int = 0
    celsius: float = 0.0


class MachineTest(msgspec.Struct, frozen=True, kw_only=True):
    """What a node found about itself.

    Attributes
    ----------
    wrong
        Arithmetic that gave another result than it must; empty if none did.
    compute_s
        Least time of one matrix product, in seconds.
    copy_bytes_per_s
        Best rate of a copy in memory, bytes copied per second.
    shm_free_bytes
        Free in ``/dev/shm``; -1 where there is none.
    disk_s
        Time of writing 4 MiB with fsync, in seconds; NaN if it failed.
    disk_error
        Why it failed.
    open_files
        Limit of open files.
    gpus
        Its GPUs.
    gpu_error
        What the driver says instead.
    alone
        Whether no other node on this machine tested itself meanwhile.
    """

    wrong: str
    compute_s: float
    copy_bytes_per_s: float
    shm_free_bytes: int
    disk_s: float
    disk_error: str
    open_files: int
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    alone: bool = True


def machine_findings(
    names: Sequence[str], machines: Mapping[int, MachineTest], skews: Mapping[int, float]
) -> Iterator[PreflightFinding]:
    """Yield what is wrong with nodes by themselves, in the order of nodes.

    Parameters
    ----------
    names
        Of the nodes.
    machines
        By index of the node.
    skews
        How many seconds each clock is ahead, by index.
    """
    middle = float(np.median(list(skews.values()))) if skews else 0.0
    usual_gpus = _usual_gpus(machines)
    for node, machine in sorted(machines.items()):
        name = names[node]
        yield from _alone(name, machine)
        skew = skews.get(node, middle) - middle
        if abs(skew) > MOST_SKEW_S:
            text = f"the clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            yield _finding("warn", name, "clock", text, skew, 0.0)
        mine = _models(machine)
        if not machine.gpu_error and mine != usual_gpus:
            text = f"{_told(mine)}; most nodes have {_told(usual_gpus)}"
            yield _finding("fail", name, "gpu", text, len(machine.gpus), len(usual_gpus))


def _alone(name: str, machine: MachineTest) -> Iterator[PreflightFinding]:
    if machine.wrong:
        yield _finding("fail", name, "arithmetic", f"computes wrongly: {machine.wrong}")
    if machine.disk_error:
        yield _finding("fail", name, "disk", f"cannot write: {machine.disk_error}")
    free = machine.shm_free_bytes
    if free < GOOD_SHM_BYTES:
        status = "fail" if free < LEAST_SHM_BYTES else "warn"
        text = f"{max(free, 0) / 2**20:.0f} MiB free in /dev/shm"
        yield _finding(status, name, "shared-memory", text, free, GOOD_SHM_BYTES)
    if machine.open_files < GOOD_OPEN_FILES:
        status = "fail" if machine.open_files < LEAST_OPEN_FILES else "warn"
        text = f"at most {machine.open_files} open files"
        yield _finding(status, name, "open-files", text, machine.open_files, GOOD_OPEN_FILES)
    if machine.gpu_error:
        yield _finding("fail", name, "gpu", machine.gpu_error)
    for number, gpu in enumerate(machine.gpus):
        if gpu.uncorrected:
            text = f"GPU {number}: {gpu.uncorrected} uncorrected memory errors"
            yield _finding("fail", name, "gpu", text, gpu.uncorrected, 0)


def _models(machine: MachineTest) -> tuple[str, ...]:
    return tuple(sorted(gpu.name for gpu in machine.gpus))


def _usual_gpus(machines: Mapping[int, MachineTest]) -> tuple[str, ...]:
    """Return the GPUs of most nodes, by model; of two that are as many, the more."""
    counts = Counter(_models(m) for m in machines.values() if not m.gpu_error)
    if not counts:
        return ()
    return max(counts.items(), key=lambda item: (item[1], len(item[0])))[0]


def _told(models: Sequence[str]) -> str:
    counts = Counter(models)
    return ", ".join(f"{n} x {model}" for model, n in sorted(counts.items())) or "no GPU"


_FIGURES: dict[str, tuple[Callable[[MachineTest], float], float, str]] = {
    "compute": (lambda m: m.compute_s, 1e3, "ms a matrix product"),
    "memory": (lambda m: 1e9 / m.copy_bytes_per_s, 1.0, "s to copy a GB"),
    "disk": (lambda m: m.disk_s, 1e3, "ms to write and sync 4 MiB"),
}


def slow_machines(
    names: Sequence[str], machines: Mapping[int, MachineTest]
) -> dict[int, list[PreflightFinding]]:
    """Return the nodes that are slower than the others, with what shows it.

    A figure stands out at 1.5 times the median and 5 robust standard deviations of its logarithm.
    Slow disks are told and do not fail: the root may lie elsewhere. Fewer than 4 nodes are not
    compared.
    """
    found: dict[int, list[PreflightFinding]] = {}
    if len(machines) < LEAST_COHORT:
        return found
    for what, (figure, scale, unit) in _FIGURES.items():
        values = {node: figure(m) for node, m in machines.items()}
        kept = {n: v for n, v in values.items() if np.isfinite(v) and v > 0}
        if len(kept) < LEAST_COHORT:
            continue
        logs = np.log(np.array(list(kept.values())))
        base = float(np.median(logs))
        spread = float(np.median(np.abs(logs - base))) * MAD_TO_SIGMA
        least = max(float(np.log(SLOW)), SLOW_Z * spread)
        usual = float(np.exp(base)) * scale
        for node, value in kept.items():
            if np.log(value) - base > least:
                text = f"{value * scale:.3g} {unit}, usual here: {usual:.3g}"
                status = "warn" if what == "disk" else "fail"
                finding = _finding(status, names[node], what, text, value * scale, usual)
                found.setdefault(node, []).append(finding)
    return found


def _finding(
    status: str,
    name: str,
    what: str,
    message: str,
    value: float | None = None,
    usual: float | None = None,
) -> PreflightFinding:
    return PreflightFinding(
        status="fail" if status == "fail" else "warn",
        target="node",
        name=name,
        what=what,
        message=message,
        value=None if value is None else float(value),
        usual=None if usual is None else float(usual),
    )
