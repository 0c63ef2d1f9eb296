"""The first save of a process and the load of a new one, beside its peers.

    python bench/first.py [--reps 5] [--layers 12] [--cases "ckptd,DCP save,torch.save"]

It is what a user measures first, what every restart pays, and what evaluation jobs do all day. A
sample is a fresh process with a trained model and its AdamW, which has imported nothing but torch:
it saves once, and loads that. Two more fresh processes load it, as it was left in the page cache
and from the disk. What an engine imports and starts counts: *ready* is that, *blocked* the call of
`save` after it, *durable* the time from that call on; loads count all from the import on. CPU
seconds are those of all processes of the sample. Free memory is touched before: a virtual machine
may have returned it to its host, and what an engine allocates first then costs 2 s a GB
(`common.stock`). Cases alternate in one run; seconds are those of one machine at one time, the
ratios, each within a repetition, are what counts.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import engines

CASES = (
    "ckptd",
    "torch.save",
    "safetensors",
    "DCP save",
    "DCP async thread",
    "DCP async process async staging",
    "torchsnapshot async_take",
    "NVRx async DCP",
)
LOADS = ("cached", "cold")
AIMS = {
    "DCP": {"blocked_s": 0.6, "durable_s": 0.8, "cpu_s": 0.6, "cached_s": 0.5, "cold_s": 0.5},
    "torch.save": {"blocked_s": 1.0, "durable_s": 1.3, "cached_s": 1.1, "cold_s": 1.1},
}
WORDS = {
    "blocked_s": "first save blocked",
    "durable_s": "first save durable, from the import on",
    "cpu_s": "CPU seconds of the first save, from the import on",
    "cached_s": "load by a new process, file cached",
    "cold_s": "load by a new process, from the disk",
}
FLOOR = "fresh shared memory, a copy and a direct write of it, without digests and imports"


def forget(folder: str) -> None:
    """Drop the files of a folder, and no others, from the page cache."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def first_save(case: str, folder: str, live: engines.Live) -> dict[str, Any]:
    """Save once; time what is blocked and what it takes to be durable, and load what was saved."""
    live.change()  # a program has used its memory before its first save
    common.settle()
    common.stock(3 * sum(t.nbytes for t in common.tensors(live.tree())))
    cpu, start = common.tree_cpu(), time.perf_counter()
    engine = engines.ENGINES[case](folder, live.tree, live.objects)
    out: dict[str, Any] = {"ready_s": time.perf_counter() - start}
    began = time.perf_counter()
    engine.save(1)
    out["blocked_s"] = time.perf_counter() - began
    engine.wait()
    out["durable_s"] = time.perf_counter() - start
    out["cpu_s"] = common.tree_cpu() - cpu
    expected = live.sums()
    live.clear()
    start = time.perf_counter()
    engine.load(1)
    out["same_s"] = time.perf_counter() - start
    out["right"] = live.sums() == expected
    out["sums"] = expected
    engine.close()
    if case == "ckptd":
        size = sum(t.nbytes for t in common.tensors(live.tree()))
        out["floor_s"] = common.snapshot_limit(folder, size)
    return out


def load(case: str, folder: str, live: engines.Live) -> dict[str, Any]:
    """Load what another process saved."""
    cpu, start = common.tree_cpu(), time.perf_counter()
    engines.ENGINES[case](folder, live.tree, live.objects).load(1)
    out: dict[str, Any] = {"seconds": time.perf_counter() - start}
    out["cpu_s"] = common.tree_cpu() - cpu
    out["sums"] = live.sums()
    return out


def one(case: str, folder: str, options: Any) -> dict[str, Any]:
    """Be the process of one sample, or of one of its loads."""
    import torch

    torch.set_num_threads(2)
    if options.load:
        live = engines.Live(torch.zeros, options.layers)
        live.clear()
        if options.load == "cold":
            forget(folder)
            common.stock(2 * common.state_bytes(options.layers))
        return load(case, folder, live)
    common.remove(folder)
    Path(folder).mkdir(parents=True)
    out = first_save(case, folder, engines.Live(common.noise(), options.layers))
    engines.end_children()
    expected = out.pop("sums")
    for kind in LOADS:
        here = ["--dir", options.dir, "--case", case, "--layers", str(options.layers)]
        found = common.in_fresh_process(__file__, [*here, "--load", kind])
        out[f"{kind}_s"], out[f"{kind}_cpu_s"] = found["seconds"], found["cpu_s"]
        out["right"] = out["right"] and found["sums"] == expected
    common.remove(folder)
    return out


def report(found: dict[str, list[dict[str, Any]]], size: int) -> None:
    """Print and keep medians and ratios."""
    m = common.median
    names = engines.measured(found)
    keys = ("ready_s", "blocked_s", "durable_s", "cpu_s", "same_s")
    keys = (*keys, *(f"{kind}{what}" for kind in LOADS for what in ("_s", "_cpu_s")))
    rows: list[list[Any]] = [
        [name, *(m(samples, k) for k in keys), all(s["right"] for s in samples)]
        for name, samples in names.items()
    ]
    head = ["engine", "ready s", "save blocked s", "durable s", "CPU s", "load after it s"]
    head += ["load by a new process, cached s", "CPU s", "the same from the disk s", "CPU s"]
    ours = names["ckptd"]
    text = f"{size / 1e9:.2f} GB; medians of {len(ours)} alternating repetitions. Durable and CPU "
    text += "seconds count from the import of the engine on.\n\n"
    text += common.table([*head, "bytes right"], rows)
    ratios = []
    for peer, aims in AIMS.items():
        theirs = [samples for name, samples in names.items() if name.startswith(peer)]
        for key, aim in aims.items():
            if not theirs:
                continue
            shares = [
                mine[key] / min(samples[i][key] for samples in theirs)
                for i, mine in enumerate(ours)
                if all(len(samples) > i for samples in theirs)
            ]
            best = "the best of DCP's ways" if peer == "DCP" else peer
            if shares:
                what = f"{WORDS[key]}: ckptd / {best} (aim at most {aim})"
                ratios.append([what, statistics.median(shares)])
    floor = [mine["cpu_s"] / mine["floor_s"] for mine in ours]
    ratios.append([f"{WORDS['cpu_s']}: ckptd / {FLOOR}", statistics.median(floor)])
    text += "\n\n" + common.table(["ratio", "value"], ratios) + engines.skipped(found)
    common.publish("first", common.command(), text, {"runs": found})


def main() -> None:
    """Alternate the cases, each in fresh processes."""
    options = common.arguments(__doc__, layers=12, cases=",".join(CASES), load="")
    folder = f"{options.dir}/case"
    if options.case:
        engines.tell(partial(one, options.case, folder, options))
    args = ["--dir", options.dir, "--layers", str(options.layers)]
    size = common.state_bytes(options.layers)
    names = engines.chosen(options.cases)
    common.alternate(__file__, options, args, names, 0, partial(report, size=size))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
