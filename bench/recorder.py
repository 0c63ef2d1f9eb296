"""What recording costs a collective: one gloo rank, alternating watched and unwatched blocks.

    python bench/recorder.py [--reps N] [--calls N]

One process, one rank, an all-reduce of four numbers, so that the call itself is as cheap as it can
be and the recorder's part as large. Cases: no hook at all; attached; attached and stepped aside
(the hook lets calls through). Each round measures every case once, in random order; the figures
are medians and minima over rounds, the ratio is of each round's own two neighbours.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time

import common
import torch
import torch.distributed as dist

import ckptd.monitor
from ckptd.monitor.ringreader import RingReader

CASES = ("unhooked", "recorded", "aside")


def microseconds(calls: int) -> float:
    """Return the microseconds of one all-reduce."""
    tensor = torch.zeros(4)
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / calls * 1e6


def measure(case: str, calls: int, folder: str) -> float:
    """Return the microseconds of one all-reduce in this case."""
    if case == "unhooked":
        return microseconds(calls)
    recorder = ckptd.monitor.attach(folder)
    if case == "aside":
        recorder.on = False
    try:
        microseconds(100)
        return microseconds(calls)
    finally:
        ckptd.monitor.detach()


def reading(folder: str, calls: int) -> dict[str, float]:
    """Return the microseconds that a reader needs for a view of few and of all calls."""
    recorder = ckptd.monitor.attach(folder)
    microseconds(5000)
    out = {}
    with RingReader(recorder.ring.path) as reader:
        for name, wanted in (("64 calls", 64), ("all calls", None)):
            start = time.perf_counter()
            for _ in range(calls // 20):
                reader.view(wanted)
            out[name] = (time.perf_counter() - start) / (calls // 20) * 1e6
    ckptd.monitor.detach()
    return out


def main() -> None:
    options = common.arguments(__doc__, calls=2000)
    os.environ.setdefault("CKPTD_RINGS", tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    microseconds(500)
    dice = random.Random(1)
    rounds: list[dict[str, float]] = []
    for _ in range(options.reps * 4):
        order = dice.sample(CASES, len(CASES))
        rounds.append({case: measure(case, options.calls, options.dir) for case in order})
    rows = [[case, *figures(rounds, case)] for case in CASES]
    read = reading(options.dir, options.calls)
    dist.destroy_process_group()
    head = ["case", "median us", "least us", "ratio to unhooked"]
    text = common.table(head, rows) + "\n\n"
    text += common.table(["reader asks for", "us"], [[k, f"{v:.0f}"] for k, v in read.items()])
    data = {"rounds": rounds, "reading": read, "load": os.getloadavg()}
    common.publish("recorder", "python bench/recorder.py", text, data)


def figures(rounds: list[dict[str, float]], case: str) -> list[str]:
    """Return median and least microseconds, and the median of the rounds' ratios."""
    ratio = statistics.median(r[case] / r["unhooked"] for r in rounds)
    values = [r[case] for r in rounds]
    return [f"{statistics.median(values):.1f}", f"{min(values):.1f}", f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
