"""Self test of a node before a job: arithmetic, memory, disk, limits, GPUs by nvidia-smi.

In it: sizes and repetitions of the tests.
"""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from ckptd.monitor.preflight import Gpu, MachineTest

_SIDE = 256
_PRODUCT = "f65cfb6cf4c78e8d"
_HASHED_BYTES = 4 << 20
_HASH = "6b6ba170dedf5063"
_COPY_BYTES = 32 << 20
_DISK_BYTES = 4 << 20
_REPEATS = 5
_QUERY = "name,memory.total,ecc.errors.uncorrected.volatile.total,temperature.gpu"
_QUERY_S = 20.0
_POLL_S = 0.02


def self_test(folder: Path, turn_s: float) -> MachineTest:
    """Test this node.

    Parameters
    ----------
    folder
        Where a file of 4 MiB is written and removed again; nodes that share it take turns, so
        that rehearsals on one machine measure what a node can.
    turn_s
        Wait so long for the turn, in seconds, and go on without it.
    """
    with _turn(folder, turn_s) as alone:
        wrong, compute_s = _arithmetic()
        disk_s, disk_error = _disk(folder)
        gpus, gpu_error = _gpus()
        return MachineTest(
            wrong=wrong,
            compute_s=compute_s,
            copy_bytes_per_s=_copying(),
            shm_free_bytes=_free("/dev/shm"),
            disk_s=disk_s,
            disk_error=disk_error,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            gpus=gpus,
            gpu_error=gpu_error,
            alone=alone,
        )


@contextmanager
def _turn(folder: Path, turn_s: float) -> Iterator[bool]:
    try:
        fd = os.open(folder / "selftest.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False  # the disk test says why
        return
    end = time.monotonic() + turn_s
    try:
        mine = False
        while not mine and time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield mine
    finally:
        os.close(fd)


def _arithmetic() -> tuple[str, float]:
    """Return what was computed wrongly, and the least time of a product of matrices.

    The matrices hold small integers, so the product is exact in any order of the sums: every
    machine must find the same bits.
    """
    base = np.arange(_SIDE * _SIDE, dtype=np.int64)
    a = ((base * 7919) % 1999 - 999).astype(np.float64).reshape(_SIDE, _SIDE)
    b = ((base * 104729) % 1997 - 998).astype(np.float64).reshape(_SIDE, _SIDE)
    wrong, best = [], float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        product = a @ b
        best = min(best, time.perf_counter() - started)
        # Adding zero makes one zero of the two signs.
        if xxhash.xxh3_64_hexdigest((product + 0.0).tobytes()) != _PRODUCT:
            wrong.append("a matrix product")
            break
    pattern = (np.arange(_HASHED_BYTES, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(24)
    if xxhash.xxh3_64_hexdigest(pattern.astype(np.uint8).tobytes()) != _HASH:
        wrong.append("integers or their hash")
    return ", ".join(wrong), best


def _copying() -> float:
    source = np.ones(_COPY_BYTES, np.uint8)
    to = np.zeros(_COPY_BYTES, np.uint8)  # its pages are there before the first copy
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        np.copyto(to, source)
        best = min(best, time.perf_counter() - started)
    return _COPY_BYTES / best


def _disk(folder: Path) -> tuple[float, str]:
    data = bytes(_DISK_BYTES)
    try:
        started = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=folder, prefix="selftest-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - started, ""
    except OSError as error:
        return float("nan"), error.strerror or str(error)


def _free(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that the driver lists, or what it says instead; none without its tool."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_QUERY_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return (), ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi: {error}"
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[:200] or f"exit code {done.returncode}"
        return (), f"nvidia-smi: {output}"
    try:
        return tuple(parse_gpu(line) for line in done.stdout.splitlines() if line.strip()), ""
    except ValueError as error:
        return (), f"nvidia-smi: {error}"


def parse_gpu(line: str) -> Gpu:
    """Return the GPU of one line of nvidia-smi; `ValueError` if it is none.

    What a model does not count is written ``[N/A]`` and taken as 0.
    """
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4:
        raise ValueError(f"not a GPU: {line!r}")

    def number(text: str) -> float:
        return 0.0 if text.startswith("[") or text == "N/A" else float(text)

    name, memory, errors, celsius = fields
    return Gpu(
        name=name,
        memory_bytes=int(number(memory)) << 20,
        uncorrected=int(number(errors)),
        celsius=number(celsius),
    )
