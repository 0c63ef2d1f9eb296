"""Common parts of the benches: a GPT-like state, the disk's own limit, cold caches, tables.

Every bench measures its cases in alternation in one run, in fresh processes, and reports medians
and ratios: the figures of one machine are noise.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import mmap
import os
import platform
import queue
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MIB = 1 << 20
BEGAN_AT_LOAD = os.getloadavg()[0]
"""Processes that wanted a core in the minute before this bench, on average."""


def arguments(doc: str | None, **extra: Any) -> argparse.Namespace:
    """Parse ``--dir``, ``--reps`` and the bench's own options."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--dir", help="scratch folder on the disk to measure (default: temporary)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for name, default in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    options = parser.parse_args()
    if options.dir is None:
        options.dir = tempfile.mkdtemp(prefix="ckptd-bench-")
        atexit.register(shutil.rmtree, options.dir, ignore_errors=True)
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    return options


# --- the state ----------------------------------------------------------------------------------


def shapes(width: int = 512, layers: int = 48, words: int = 32768) -> dict[str, tuple[int, ...]]:
    """Return a GPT's parameters: 168 million by default, 2.02 GB with two moments, float32."""
    out: dict[str, tuple[int, ...]] = {"tok.weight": (words, width), "pos.weight": (1024, width)}
    for i in range(layers):
        p = f"blocks.{i}."
        out |= {
            p + "ln1.weight": (width,),
            p + "ln1.bias": (width,),
            p + "attn.qkv.weight": (3 * width, width),
            p + "attn.qkv.bias": (3 * width,),
            p + "attn.out.weight": (width, width),
            p + "attn.out.bias": (width,),
            p + "ln2.weight": (width,),
            p + "ln2.bias": (width,),
            p + "mlp.fc.weight": (4 * width, width),
            p + "mlp.fc.bias": (4 * width,),
            p + "mlp.proj.weight": (width, 4 * width),
            p + "mlp.proj.bias": (width,),
        }
    return out | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def state(
    make: Callable[[tuple[int, ...]], Any], layers: int = 48, width: int = 512
) -> dict[str, Any]:
    """Return parameters and Adam moments, every tensor by `make`."""
    return {
        kind: {name: make(shape) for name, shape in shapes(width, layers).items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }


def state_bytes(layers: int = 48, width: int = 512) -> int:
    """Return the bytes of `state` in float32."""
    sizes = [s[0] * (s[1] if len(s) > 1 else 1) for s in shapes(width, layers).values()]
    return 3 * 4 * sum(sizes)


def noise(seed: int = 0) -> Callable[[tuple[int, ...]], Any]:
    """Return a maker of incompressible float32 tensors; quick, each different."""
    import torch

    pool = torch.randn(1 << 23, generator=torch.Generator().manual_seed(seed))
    count = iter(range(1 << 30))

    def make(shape: tuple[int, ...]) -> Any:
        k = next(count)
        tensor = torch.empty(math.prod(shape))
        start, at = k * 7919 * 64 % (len(pool) // 2), 0
        while at < len(tensor):
            part = pool[start : start + len(tensor) - at]
            tensor[at : at + len(part)] = part
            start, at = 0, at + len(part)
        tensor[0] = k
        return tensor.view(shape)

    return make


def tensors(tree: Any) -> list[Any]:
    """Return the tensors of a nested dict, in order."""
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in tensors(v)]
    return [tree]


# --- the machine --------------------------------------------------------------------------------


def drop_caches(folder: str) -> None:
    """Make the next read of `folder` a cold one, into memory that the machine really has.

    A virtual machine gives memory that it does not use back to its host, and pays for each page
    when it comes back: 1.3 s for 2 GB of page cache here, in any reader. Which case pays would
    depend on what ran before it, so the page cache is filled from a file of holes first.
    """
    os.sync()
    files = [p for p in Path(folder).rglob("*") if p.is_file()]
    _fill_page_cache(folder, min(sum(p.stat().st_size for p in files), 4 << 30) + 256 * MIB)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _fill_page_cache(folder: str, size: int) -> None:
    path = Path(folder) / "holes"
    with path.open("wb") as file:
        file.truncate(size)
    buffer = bytearray(4 * MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    path.unlink()


def settle() -> None:
    """Write back what is dirty and give the disk a moment to discard what was deleted."""
    os.sync()
    time.sleep(0.5)


def stock(size: int) -> None:
    """Have so much free memory that this machine's host need not give first.

    A virtual machine may return what is free, in blocks of 2 MiB, and pays for it at the next use:
    what reads by large pages would pay for that, and what reads by small ones would not.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)


def remove(path: str) -> None:
    """Remove a folder if it is there."""
    shutil.rmtree(path, ignore_errors=True)


def sync(path: str) -> None:
    """Make a file durable, or a folder's entries."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def sync_folder(path: str) -> None:
    """Make all files and folders below `path` durable, and itself."""
    for folder, _, files in os.walk(path):
        for file in files:
            sync(f"{folder}/{file}")
        sync(folder)


def parallel(count: int, work: Callable[[int], None]) -> float:
    """Run ``work(i)`` in `count` threads and return the seconds."""
    start = time.perf_counter()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return time.perf_counter() - start


def disk_limit(folder: str, size: int, streams: int = 2) -> dict[str, float]:
    """Measure the disk: direct writes with fsync, direct and buffered reads, 1 and more threads.

    Returns
    -------
    dict
        Seconds for `size` bytes by way of writing and reading; `limit_of` takes the best way.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    block = 4 * MIB
    buffers = [mmap.mmap(-1, block) for _ in range(streams)]
    for b in buffers:
        b[:] = os.urandom(block)

    def write(count: int) -> float:
        for old in base.glob("limit-*"):
            old.unlink()
        settle()

        def one(i: int) -> None:
            fd = os.open(base / f"limit-{i}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            for offset in range(0, size // count // block * block, block):
                os.pwrite(fd, buffers[i], offset)
            os.fsync(fd)
            os.close(fd)

        return parallel(count, one)

    def read(count: int, flags: int) -> float:
        drop_caches(folder)
        per = size // block // count

        def one(i: int) -> None:
            fd = os.open(base / "limit-0", os.O_RDONLY | flags)
            for k in range(i * per, (i + 1) * per):
                os.preadv(fd, [buffers[i]], k * block)
            os.close(fd)

        return parallel(count, one)

    found = {f"write {n} streams": write(n) for n in (streams, 1)}
    for n in (1, streams):
        found[f"read buffered {n} streams"] = read(n, 0)
        found[f"read direct {n} streams"] = read(n, os.O_DIRECT)
    for old in base.glob("limit-*"):
        old.unlink()
    return found


def snapshot_limit(folder: str, size: int) -> float:
    """Return the CPU seconds of a snapshot that outlives its process, and of its write: a floor.

    Fresh shared memory, a copy into it, and direct writes of it with fsync; no digests, no import.
    """
    block, path = 4 * MIB, Path(folder) / "snapshot"
    size = size // block * block
    source = mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    source[:] = os.urandom(block)
    stock(size)
    before = tree_cpu()
    with mmap.mmap(-1, size) as snapshot:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        for at in range(0, size, block):
            snapshot[at : at + block] = memoryview(source)
        view = memoryview(snapshot)
        for at in range(0, size, block):
            os.pwrite(fd, view[at : at + block], at)
        view.release()
        os.fsync(fd)
        os.close(fd)
    path.unlink()
    return tree_cpu() - before


def copy_limit(folder: str, streams: int = 2) -> float:
    """Return the seconds that a plain copy of the files of `folder` takes: what one disk can do.

    Cold buffered reads and direct writes at the same time, 64 MiB in flight a stream, fsync at the
    end; no digests, nothing rearranged.
    """
    files = [p for p in Path(folder).rglob("*") if p.is_file()]
    out = Path(folder).with_name("copied")
    remove(str(out))
    out.mkdir()
    settle()
    drop_caches(folder)
    block = 4 * MIB

    def write(fd: int, full: queue.Queue[Any], free: queue.Queue[Any]) -> None:
        at = 0
        while (buffer := full.get()) is not None:
            at += os.pwrite(fd, buffer, at)
            free.put(buffer)
        os.fsync(fd)
        os.close(fd)

    def one(i: int) -> None:
        full: queue.Queue[Any] = queue.Queue()
        free: queue.Queue[Any] = queue.Queue()
        for _ in range(16):
            free.put(mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        fd = os.open(out / str(i), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        writer = threading.Thread(target=write, args=(fd, full, free))
        writer.start()
        for path in files[i::streams]:
            with path.open("rb", buffering=0) as file:
                # A last, shorter block is written whole: direct writes are of whole blocks.
                while file.readinto(buffer := free.get()):
                    full.put(buffer)
                free.put(buffer)
        full.put(None)
        writer.join()

    seconds = parallel(streams, one)
    remove(str(out))
    return seconds


def limit_of(samples: Sequence[dict[str, float]], what: str) -> float:
    """Return the median seconds of the best way to ``write`` or to ``read``."""
    ways = [way for way in samples[0] if way.startswith(what)]
    return min(median(samples, way) for way in ways)


class AllMemory:
    """Peak of the proportional set sizes of this process and its children together, in bytes.

    Processes are looked at one after the other, and a page that one maps in between counts too
    much: of two looks that follow one another the smaller one is believed.
    """

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._stop = threading.Event()
        self.peak = self.now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        pids = [self._process.pid, *(c.pid for c in self._process.children(recursive=True))]
        return sum(_pss(pid) for pid in pids)

    def _watch(self) -> None:
        last = self.peak
        while not self._stop.wait(0.05):
            now = self.now()
            self.peak = max(self.peak, min(last, now))
            last = now

    def done(self) -> int:
        """Stop and return the peak."""
        self._stop.set()
        self._thread.join()
        return max(self.peak, self.now())


def _pss(pid: int) -> int:
    with suppress(OSError):
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(r.split()[1]) for r in rows if r.startswith("Pss:"))
    return 0


def tree_cpu() -> float:
    """Return the CPU seconds of this process and its children, also of those that have ended."""
    import psutil

    own = psutil.Process()
    ended = own.cpu_times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for child in own.children(recursive=True):
        with suppress(psutil.Error):
            used = child.cpu_times()
            total += used.user + used.system
    return total


class PeakMemory:
    """Peak of the machine's anonymous and shared memory above its start, in bytes.

    Counts other processes of the case and shared segments, but not the page cache.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._base = self._peak = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * sum(int(rows[k].split()[0]) for k in ("AnonPages", "Shmem"))

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._peak = max(self._peak, self._now())

    def done(self) -> int:
        """Stop and return the peak."""
        self._stop.set()
        self._thread.join()
        return max(self._peak, self._now()) - self._base


def io_counters() -> dict[str, int]:
    """Return this process's ``rchar`` (asked for) and ``read_bytes`` (from the device)."""
    rows = Path("/proc/self/io").read_text().splitlines()
    return {k: int(v) for k, v in (r.split(": ") for r in rows)}


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(int(total.split()[1]) / (1 << 20)),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


# --- running and telling ------------------------------------------------------------------------


def in_fresh_process(script: str, options: Sequence[str], timeout_s: float = 600.0) -> Any:
    """Run ``script options`` and return the JSON of its last line of output."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # Packages are installed with their modules compiled; those of a checkout must be so, too.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ended = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )
    lines = [x for x in ended.stdout.splitlines() if x.startswith("{")]
    if ended.returncode or not lines:
        raise SystemExit(f"{script} {' '.join(options)} failed:\n{ended.stderr[-3000:]}")
    return json.loads(lines[-1])


def alternate(
    script: str,
    options: argparse.Namespace,
    arguments: Sequence[str],
    cases: Sequence[str],
    size: int,
    report: Callable[[dict[str, list[Any]]], None],
    timeout_s: float = 600.0,
) -> None:
    """Run all cases ``--reps`` times, each time in another order, and report after each time.

    Parameters
    ----------
    script, arguments
        What measures one case, in a fresh process, when ``--case NAME`` is added.
    size
        Bytes for the case ``limit``, which is added: what the disk itself can do; 0: no such case.
    report
        Gets the figures by case; an interrupted run leaves what it has.
    """
    found: dict[str, list[Any]] = {name: [] for name in (*cases, *(["limit"] if size else []))}
    order = random.Random(0)
    for rep in range(options.reps):
        names = list(found)
        order.shuffle(names)
        for name in names:
            if name == "limit":
                found[name].append(disk_limit(options.dir, size))
            else:
                case = [*arguments, "--case", name]
                found[name].append(in_fresh_process(script, case, timeout_s))
            print(f"{rep + 1}/{options.reps} {name}: {found[name][-1]}", file=sys.stderr)
        report(found)


def median(samples: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median of one figure over the repetitions; nan when nobody measured it."""
    found = [float(s[key]) for s in samples if s.get(key) is not None]
    return statistics.median(found) if found else float("nan")


def milliseconds(samples: Sequence[dict[str, Any]], key: str) -> str:
    value = 1e3 * median(samples, key)
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "–" if value != value else f"{value:.2f}"
        return str(value)

    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell(v) for v in row) + " |" for row in rows]
    return "\n".join(lines)


def provenance() -> dict[str, Any]:
    """Return where and when the figures of this process come from.

    The commit ends with ``+`` where code that it measures differs from it; the load is that of the
    machine as the bench began: what it does itself is not counted.
    """
    git = ("git", "-C", str(HERE))
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "../ckptd", "../plugins", "*.py"],
        capture_output=True,
        check=False,
    ).stdout
    return {
        "commit": (commit or "unknown") + ("+" if changed else ""),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": BEGAN_AT_LOAD,
        "machine": machine(),
    }


def command() -> str:
    """Return how this bench was called, without the folder that it used."""
    given = iter(sys.argv[1:])
    words = [word for word in given if word != "--dir" or not next(given)]
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *words])


def publish(name: str, command: str, text: str, data: Any) -> None:
    """Write ``results/NAME.json``, put the table into RESULTS.md and print it."""
    RESULTS.mkdir(exist_ok=True)
    origin = provenance()
    body = {"command": command, **origin, "data": data}
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    where = origin["machine"]
    text = (
        f"{origin['date']}, commit {origin['commit']}, {where['cores']} cores, "
        f"{where['memory_gib']} GiB, Python {where['python']}, load {origin['load']:.1f} "
        f"before it{'' if origin['load'] < 0.5 else ': not idle'}.\n\n{text}"
    )
    page = HERE / "RESULTS.md"
    old = page.read_text() if page.exists() else "# Results\n"
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = f"{begin}\n\n`{command}`\n\n{text}\n\n{end}"
    if begin in old:
        head, _, rest = old.partition(begin)
        old = head + block + rest.partition(end)[2]
    else:
        old = old.rstrip() + "\n\n" + block + "\n"
    page.write_text(old)
    print(text)
