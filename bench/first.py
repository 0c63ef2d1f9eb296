"""The first save and the first load of a fresh process, beside torch DCP's.

    python bench/first.py [--tensors 240] [--mib 960]

It is what a user measures first, what every restart pays, and what evaluation jobs do all day. Each
sample is a fresh process with a new `Checkpointer`, that saves once and loads that at once; then
two more fresh processes load it, as it was left and from the disk. What loading imports counts
there: nothing but torch is imported before. All cases alternate in one run; the seconds are those
of one machine at one time, the ratios are what counts.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import common

CASES = ("ckptd", "dcp", "dcp async")


def state(tensors: int, mib: int, fill: bool = True) -> dict[str, Any]:
    """Return alike tensors, noise or zeros, all of whose memory is there."""
    import torch

    count = mib * common.MIB // 4 // tensors
    make = common.noise() if fill else torch.zeros
    return {"model": {f"layer{i}.weight": make((count,)).add_(0) for i in range(tensors)}}


def used(live: dict[str, Any]) -> None:
    """Do what a program does before its first save: steps, which use the state."""
    for _ in range(2):
        for tensor in live["model"].values():
            tensor.mul_(1.0)


def first_save(case: str, folder: str, live: dict[str, Any]) -> dict[str, Any]:
    """Save once; time what is blocked and what it takes to be durable, and load what was saved."""
    out: dict[str, Any] = {}
    if case == "ckptd":
        import ckptd

        start = time.perf_counter()
        ck = ckptd.Checkpointer(folder)
        out["made_s"] = time.perf_counter() - start
        used(live)
        common.settle()
        start = time.perf_counter()
        handle = ck.save(1, live)
        out["blocked_s"] = time.perf_counter() - start
        assert handle is not None
        handle.durable()
        out["durable_s"] = time.perf_counter() - start
        out["after_s"] = timed_load(case, folder, live, ck)
        start = time.perf_counter()
        ck.save(2, live).durable()
        out["second_s"] = time.perf_counter() - start
        ck.close()
        return out
    import torch.distributed.checkpoint as dcp

    used(live)
    common.settle()
    start = time.perf_counter()
    if case == "dcp":
        dcp.save(live, checkpoint_id=folder, no_dist=True)
        out["blocked_s"] = time.perf_counter() - start
    else:
        future = dcp.async_save(live, checkpoint_id=folder, no_dist=True)
        out["blocked_s"] = time.perf_counter() - start
        getattr(future, "upload_completion", future).result()
    out["durable_s"] = time.perf_counter() - start
    out["after_s"] = timed_load(case, folder, live)
    return out


def timed_load(case: str, folder: str, live: dict[str, Any], ck: Any = None) -> float:
    """Load over zeros; return the seconds, imports and the making of a checkpointer included."""
    for tensor in live["model"].values():
        tensor.zero_()
    start = time.perf_counter()
    if case == "ckptd":
        import ckptd

        (ck or ckptd.Checkpointer(folder)).load(live)
    else:
        import torch.distributed.checkpoint as dcp

        dcp.load(live, checkpoint_id=folder, no_dist=True)
    return time.perf_counter() - start


def right(live: dict[str, Any]) -> bool:
    """Tell whether a load brought what the first process had saved."""
    import torch

    expected = state(len(live["model"]), _mib(live))
    return all(torch.equal(a, expected["model"][n]) for n, a in live["model"].items())


def _mib(live: dict[str, Any]) -> int:
    return -(-sum(t.nbytes for t in live["model"].values()) // common.MIB)


def forget(folder: str) -> None:
    """Drop the files of a folder, and no others, from the page cache."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def one(case: str, folder: str, options: Any) -> None:
    """Be the process of one sample, or of one of its loads."""
    import torch

    torch.set_num_threads(2)
    live = state(options.tensors, options.mib, fill=not options.load)
    if options.load:
        if options.load == "cold":
            forget(folder)
        seconds = timed_load(case, folder, live)
        print(json.dumps({"seconds": seconds, "right": right(live)}))
        return
    common.remove(folder)
    out = first_save(case, folder, live)
    out["right"] = right(live)
    here = ["--dir", options.dir, "--case", case, "--tensors", str(options.tensors)]
    here += ["--mib", str(options.mib)]
    for kind in ("warm", "cold"):
        found = common.in_fresh_process(__file__, [*here, "--load", kind])
        out[f"{kind}_s"] = found["seconds"]
        out["right"] = out["right"] and found["right"]
    print(json.dumps(out))
    common.remove(folder)


def report(found: dict[str, list[dict[str, Any]]], size: int, tensors: int) -> None:
    """Print and keep medians and ratios."""
    m = common.median
    keys = ("blocked_s", "durable_s", "after_s", "warm_s", "cold_s")
    rows: list[list[Any]] = [
        [name, *(m(found[name], k) for k in keys), all(s["right"] for s in found[name])]
        for name in CASES
    ]
    head = ["case", "save blocked s", "durable s", "load after it s"]
    head += ["load by another process s", "the same from the disk s", "bytes right"]
    ours, dcp = found["ckptd"], found["dcp"]

    def ratio(key: str) -> float:
        pairs = [b[key] / a[key] for a, b in zip(ours, dcp, strict=True)]
        return sorted(pairs)[len(pairs) // 2]

    ratios = [
        ["first save blocked: ckptd / DCP save (aim at most 0.3)", 1 / ratio("blocked_s")],
        ["first save durable: DCP / ckptd (aim 1.3)", ratio("durable_s")],
        ["load after it: DCP / ckptd (aim 1.5)", ratio("after_s")],
        ["load by another process, as it was left: DCP / ckptd (aim 1.5)", ratio("warm_s")],
        ["load by another process, from the disk: DCP / ckptd (aim 1.5)", ratio("cold_s")],
    ]
    text = f"{size / 1e9:.2f} GB in {tensors} tensors; medians of {len(ours)} alternating "
    text += "repetitions, ratios within each. Load of the machine: "
    text += f"{os.getloadavg()[0]:.1f}.\n\n" + common.table(head, rows)
    text += "\n\n" + common.table(["ratio", "value"], ratios)
    text += f"\n\nMaking the `Checkpointer` takes {m(ours, 'made_s'):.3f} s; the second save is "
    text += f"durable after {m(ours, 'second_s'):.2f} s."
    command = f"python bench/first.py --reps {len(ours)}"
    common.publish("first", command, text, {"load": os.getloadavg(), "runs": found})


def main() -> None:
    """Alternate the cases, each in fresh processes."""
    options = common.arguments(__doc__, tensors=240, mib=960, load="")
    folder = f"{options.dir}/case"
    if options.case:
        one(options.case, folder, options)
        return
    size = options.mib * common.MIB
    args = ["--dir", options.dir, "--tensors", str(options.tensors), "--mib", str(options.mib)]
    told = partial(report, size=size, tensors=options.tensors)
    common.alternate(__file__, options, args, list(CASES), size, told)


if __name__ == "__main__":
    main()
