"""States of other sizes: a small one, many tensors, one large tensor.

    python bench/states.py [--reps 5] [--saves 6] [--cases "1 MB;10,000 tensors"] [--table many]

`bench/save_load.py` measures a usual state. Here each case is a plain dict of tensors in a fresh
process: 1 MB in 16 tensors, as an experiment's small model is; 1,000, 10,000 and 100,000 tensors of
64 bytes, which cost planning and nothing else; one tensor of 4 GB. Each saves some times, every
tensor changed in between, and is loaded twice by the process that saved it and once by a new one.
CPU milliseconds are those of all processes. Files and bytes are what one more save leaves.
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

STATES: dict[str, tuple[int, int]] = {
    "1 MB": (16, 1 << 14),
    "1,000 tensors": (1_000, 16),
    "10,000 tensors": (10_000, 16),
    "100,000 tensors": (100_000, 16),
    "4 GB": (1, 1 << 30),
}
"""Tensors and the numbers in each."""
ENGINES = ("ckptd", "torch.save", "DCP save")
SLOW = {("DCP save", "100,000 tensors"), ("DCP save", "4 GB")}


def make(state: str) -> engines.Tree:
    """Return the tensors, each with numbers of its own."""
    import torch

    count, numbers = STATES[state]
    return {f"layer{i // 10}.t{i}": torch.full((numbers,), float(i)) for i in range(count)}


def change(tree: engines.Tree, by: float) -> None:
    for tensor in tree.values():
        tensor.add_(by)


def timed(work: Any) -> tuple[float, float]:
    """Return the seconds of a call, and the CPU seconds of all processes meanwhile."""
    cpu, start = common.tree_cpu(), time.perf_counter()
    work()
    return time.perf_counter() - start, common.tree_cpu() - cpu


def stored(folder: str) -> tuple[int, int]:
    """Return the files below a folder, and their bytes."""
    sizes = [p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()]
    return len(sizes), sum(sizes)


def case(name: str, folder: str, saves: int, load: bool) -> dict[str, Any]:
    """Be the process of one sample, or of its load by a new process."""
    import torch

    torch.set_num_threads(2)
    kind, _, state = name.partition(": ")
    tree = make(state)
    if load:
        change(tree, 100.0)
        seconds, cpu = timed(lambda: engines.ENGINES[kind](folder, lambda: tree).load(saves))
        return {"new_s": seconds, "new_cpu_s": cpu, "right": right(tree, saves)}
    common.remove(folder)
    Path(folder).mkdir(parents=True)
    size = sum(t.nbytes for t in tree.values())
    memory = common.AllMemory()
    alone = memory.done()
    engine = engines.ENGINES[kind](folder, lambda: tree)
    out: dict[str, Any] = {"bytes": size}
    memory = common.AllMemory()
    blocked, durable, cpu = [], [], []
    files = (0, 0)
    for step in range(1, saves + 1):
        change(tree, 1.0)
        common.settle()
        before = stored(folder)
        for took, row in zip(
            engines.timed_save(engine, step), (blocked, durable, cpu), strict=True
        ):
            row.append(took)
        if step == 2:  # nothing is deleted yet, and what only a first save writes is there
            after = stored(folder)
            files = (after[0] - before[0], after[1] - before[1])
        engine.clean(step)
    for key, values in (("blocked_s", blocked), ("durable_s", durable), ("cpu_s", cpu)):
        out["first_" + key] = values[0]
        out[key] = statistics.median(values[1:])
    out["cpu_s"] = statistics.mean(cpu[1:])  # the kernel counts hundredths of a second
    out["files"], out["over"] = files[0], files[1] - size
    out["memory"] = memory.done() - alone
    out["right"] = True
    for n in ("load", "again"):
        change(tree, 100.0)
        out[f"{n}_s"], out[f"{n}_cpu_s"] = timed(lambda: engine.load(saves))
        out["right"] = out["right"] and right(tree, saves)
    engine.close()
    return out


def right(tree: engines.Tree, added: int) -> bool:
    """Tell whether the tensors are those of the last save."""
    ends = [t.reshape(-1)[[0, -1]].tolist() for t in tree.values()]
    return all(end == [float(i + added)] * 2 for i, end in enumerate(ends))


def sample(options: Any, folder: str) -> dict[str, Any]:
    if options.load:
        return case(options.case, folder, options.saves, load=True)
    out = case(options.case, folder, options.saves, load=False)
    engines.end_children()
    same = ["--dir", options.dir, "--case", options.case, "--saves", str(options.saves)]
    found = common.in_fresh_process(__file__, [*same, "--load", "yes"])
    out["right"] = out["right"] and found.pop("right")
    common.remove(folder)
    return out | found


def report(found: dict[str, list[dict[str, Any]]], table: str) -> None:
    """Print and keep medians."""
    m = common.median
    names = engines.measured(found)
    rows: list[list[Any]] = []
    for state in STATES:
        for kind in ENGINES:
            samples = names.get(f"{kind}: {state}")
            if samples:
                count = max(m(samples, "bytes"), 1.0)
                cells: list[Any] = [
                    common.milliseconds(samples, k)
                    for key in ("blocked_s", "durable_s", "cpu_s")
                    for k in (f"first_{key}", key)
                ]
                cells += [
                    common.milliseconds(samples, f"{n}_cpu_s") for n in ("load", "again", "new")
                ]
                cells += [f"{m(samples, 'files'):.0f}", f"{m(samples, 'over') / 1024:.0f}"]
                cells += [f"{m(samples, 'memory') / count:.2f}", all(s["right"] for s in samples)]
                rows.append([state, kind, *cells])
    head = ["state", "engine"]
    head += [
        f"{which} {what} ms"
        for what in ("blocked", "durable", "CPU")
        for which in ("first", "later")
    ]
    head += ["load CPU ms", "second load CPU ms", "load by a new process CPU ms", "files a save"]
    head += ["KiB over the payload", "peak memory / state", "values right"]
    reps = max(len(s) for s in names.values())
    text = f"Medians of {reps} alternating repetitions.\n\n" + common.table(head, rows)
    text += engines.skipped(found)
    common.publish(table, common.command(), text, {"runs": found})


def main() -> None:
    """Alternate the cases, each in fresh processes."""
    options = common.arguments(__doc__, cases=";".join(STATES), load="", saves=6, table="states")
    folder = f"{options.dir}/case"
    if options.case:
        engines.tell(partial(sample, options, folder))
    states = options.cases.split(";")
    if unknown := set(states) - set(STATES):
        raise SystemExit(f"no such state: {unknown}; there are {'; '.join(STATES)}")
    pairs = [(kind, state) for state in states for kind in ENGINES if (kind, state) not in SLOW]
    names = [f"{kind}: {state}" for kind, state in pairs]
    args = ["--dir", options.dir, "--saves", str(options.saves)]
    common.alternate(__file__, options, args, names, 0, partial(report, table=options.table))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
