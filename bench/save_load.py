"""Save after save: how long is training blocked, when is it durable, what does it cost to load?

    python bench/save_load.py [--reps 5] [--layers 12] [--cases "ckptd,DCP save,torch.save"]

Against its peers, each with its best options (``bench/engines.py``), and the disk's own limit,
measured in the same run. Each case is a fresh process whose first two saves are not counted here
(``bench/first.py`` does); every tensor changes between saves, and an engine keeps two checkpoints.
CPU seconds are those of all processes; memory is the peak of their proportional sizes above the
state's own, and what is left of it while nothing is saved.
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
import psutil

FIRST, SAVES = 2, 5


def case(name: str, folder: str, layers: int) -> dict[str, Any]:
    """Be the process of one sample."""
    import torch

    torch.set_num_threads(2)
    common.remove(folder)
    Path(folder).mkdir(parents=True)
    live = engines.Live(common.noise(), layers)
    size = sum(t.nbytes for t in common.tensors(live.tree()))
    memory = common.AllMemory()
    alone = memory.done()
    engine = engines.ENGINES[name](folder, live.tree, live.objects)
    blocked, durable, cpu = [], [], []
    memory = common.AllMemory()
    for step in range(1, FIRST + 1):
        engine.save(step)
        engine.wait()
        engine.before_step()
        live.change()
        engine.clean(step)
    out: dict[str, Any] = {"memory": (memory.done() - alone) / size}
    for step in range(FIRST + 1, FIRST + SAVES + 1):
        common.settle()
        for took, row in zip(
            engines.timed_save(engine, step), (blocked, durable, cpu), strict=True
        ):
            row.append(took)
        if step < FIRST + SAVES:
            engine.before_step()
            live.change()
            engine.clean(step)
    out |= {k: statistics.median(v) for k, v in (("blocked_s", blocked), ("durable_s", durable))}
    out["cpu_s_per_gb"] = statistics.median(cpu) / size * 1e9
    me = psutil.Process()
    everyone = [me, *me.children(recursive=True)]
    out["processes"], out["threads"] = len(everyone), sum(p.num_threads() for p in everyone)
    out["left"] = (memory.now() - alone) / size
    expected = live.sums()
    for kind in ("cold", "warm"):
        live.clear()
        if kind == "cold":
            common.drop_caches(folder)
        start = time.perf_counter()
        engine.load(FIRST + SAVES)
        out[f"{kind}_s"] = time.perf_counter() - start
        out["right"] = out.get("right", True) and live.sums() == expected
    engine.close()
    return out


def report(found: dict[str, list[dict[str, Any]]], size: int) -> None:
    """Print and keep medians and ratios."""
    m = common.median
    names = engines.measured(found)
    write, read = (common.limit_of(found["limit"], what) for what in ("write", "read"))
    keys = ("durable_s", "cpu_s_per_gb", "cold_s", "warm_s", "memory", "left")
    rows: list[list[Any]] = [
        [
            name,
            common.milliseconds(samples, "blocked_s"),
            *(m(samples, k) for k in keys),
            f"{m(samples, 'processes'):.0f}, {m(samples, 'threads'):.0f}",
            all(s["right"] for s in samples),
        ]
        for name, samples in names.items()
    ]
    nan = float("nan")
    rows.append(["the disk's limit", "–", write, nan, read, nan, nan, nan, "–", "–"])
    head = ["engine", "blocked ms", "durable s", "CPU s a GB", "load cold s", "load warm s"]
    head += ["peak memory / state", "memory between saves / state", "processes, threads"]
    ours = names["ckptd"]
    text = f"One process, {size / 1e9:.2f} GB; medians of {len(ours)} alternating repetitions.\n\n"
    text += common.table([*head, "bytes right"], rows)
    peers = {n: s for n, s in names.items() if not n.startswith("ckptd")}
    ratios: list[list[Any]] = [
        ["durable: the disk's limit / ckptd", write / m(ours, "durable_s")],
        ["cold load: the disk's limit / ckptd", read / m(ours, "cold_s")],
    ]
    for key, what in (
        ("blocked_s", "blocked"),
        ("durable_s", "durable"),
        ("cpu_s_per_gb", "CPU seconds"),
        ("cold_s", "cold load"),
        ("warm_s", "warm load"),
    ):
        if peers:
            name = min(peers, key=lambda n: m(peers[n], key))
            ratios.append(
                [f"{what}: best peer ({name}) / ckptd", m(peers[name], key) / m(ours, key)]
            )
    text += "\n\n" + common.table(["ratio", "value"], ratios) + engines.skipped(found)
    common.publish("save_load", common.command(), text, {"runs": found})


def main() -> None:
    """Alternate the cases, each in fresh processes."""
    options = common.arguments(__doc__, layers=12, cases=",".join(engines.ENGINES))
    folder = f"{options.dir}/case"
    if options.case:
        engines.tell(partial(case, options.case, folder, options.layers))
    size = common.state_bytes(options.layers)
    args = ["--dir", options.dir, "--layers", str(options.layers)]
    names = engines.chosen(options.cases)
    common.alternate(__file__, options, args, names, size, partial(report, size=size))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
