"""One process, 2.02 GB: how long is training blocked, when is it durable, how fast is a load?

    python bench/save_load.py

Against torch DCP (``save``, ``async_save``, ``load``) and the disk's own limit, measured in the
same run. Each case is a fresh process; its first save, which touches fresh memory, is told apart.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import common
import psutil

SAVES = 3
KINDS = ("Shmem", "Anon", "File")


class Footprint:
    """The most memory that this process and its children had together, above the start.

    By kind: shared segments, private memory, mapped files; each page counts once in all, however
    many processes map it. Processes are looked at one after the other, and a page that one maps in
    between counts too much: of two looks that follow one another the smaller one is believed.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._base = self._peak = _sizes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        last = self._base
        while not self._stop.wait(0.05):
            now = _sizes()
            self._peak = max(self._peak, min(last, now, key=_total), key=_total)
            last = now

    def done(self) -> dict[str, int]:
        """Stop and return bytes by kind."""
        self._stop.set()
        self._thread.join()
        peak = max(self._peak, _sizes(), key=_total)
        return {kind: peak[kind] - self._base[kind] for kind in KINDS}


def _total(sizes: dict[str, int]) -> int:
    return sum(sizes.values())


def _sizes() -> dict[str, int]:
    me = psutil.Process()
    found = dict.fromkeys(KINDS, 0)
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        with suppress(OSError):
            for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                kind = row.partition(":")[0].removeprefix("Pss_")
                if kind in KINDS:
                    found[kind] += 1024 * int(row.split()[1])
    return found


def ckptd_case(folder: str, layers: int, slots: int | None = None) -> dict[str, Any]:
    import ckptd

    live = common.state(common.noise(), layers)
    footprint = Footprint()
    with ckptd.Checkpointer(
        f"{folder}-small", storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(slots=slots)
    ) as ck:
        for step in range(1, 4):  # apart from what is timed: looking at memory takes time
            handle = ck.save(step, live)
            assert handle is not None
        handle.durable()
    kinds = footprint.done()
    common.remove(f"{folder}-small")
    size = sum(t.nbytes for t in common.tensors(live))
    out: dict[str, Any] = {f"memory_{kind}": n / size for kind, n in kinds.items()}
    out["memory"] = sum(kinds.values()) / size
    with ckptd.Checkpointer(
        folder, storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(slots=slots)
    ) as ck:  # the same state each time
        blocked, durable, peaks = [], [], []
        for step in range(1, SAVES + 2):
            common.settle()
            memory = common.PeakMemory()
            start = time.perf_counter()
            handle = ck.save(step, live)
            blocked.append(time.perf_counter() - start)
            assert handle is not None
            handle.durable()
            durable.append(time.perf_counter() - start)
            peaks.append(memory.done())
        out |= figures(blocked, durable, peaks)
        expected = [t.clone() for t in common.tensors(live)]
        for kind in ("cold", "warm"):
            clear(live)
            if kind == "cold":
                common.drop_caches(folder)
            start = time.perf_counter()
            ck.load(live)
            out[f"{kind}_s"] = time.perf_counter() - start
            out["right"] = out.get("right", True) and same(live, expected)
    return out


def dcp_case(folder: str, layers: int, kind: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    live = common.state(common.noise(), layers)
    out: dict[str, Any] = {}
    blocked, durable, peaks = [], [], []
    for step in range(1, SAVES + 2):
        path = f"{folder}/{step}"
        common.settle()
        memory = common.PeakMemory()
        start = time.perf_counter()
        if kind == "dcp":
            writer = dcp.FileSystemWriter(path, thread_count=2)
            dcp.save(live, storage_writer=writer, no_dist=True)
            blocked.append(time.perf_counter() - start)
        else:
            future = dcp.async_save(live, checkpoint_id=path, no_dist=True)
            blocked.append(time.perf_counter() - start)
            getattr(future, "upload_completion", future).result()
        durable.append(time.perf_counter() - start)
        peaks.append(memory.done())
    out |= figures(blocked, durable, peaks)
    expected = [t.clone() for t in common.tensors(live)]
    for temperature in ("cold", "warm"):
        clear(live)
        if temperature == "cold":
            common.drop_caches(folder)
        start = time.perf_counter()
        dcp.load(live, checkpoint_id=path, no_dist=True)
        out[f"{temperature}_s"] = time.perf_counter() - start
        out["right"] = out.get("right", True) and same(live, expected)
    return out


def figures(blocked: list[float], durable: list[float], peaks: list[int]) -> dict[str, Any]:
    """Tell the first save apart; the others' medians stand for the case."""
    return {
        "first_blocked_s": blocked[0],
        "first_durable_s": durable[0],
        "blocked_s": sorted(blocked[1:])[len(blocked[1:]) // 2],
        "durable_s": sorted(durable[1:])[len(durable[1:]) // 2],
        "peak_gb": max(peaks) / 1e9,
    }


def clear(live: Any) -> None:
    for t in common.tensors(live):
        t.zero_()


def same(live: Any, expected: list[Any]) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(common.tensors(live), expected, strict=True))


CASES = {
    "ckptd": ckptd_case,
    "ckptd, 1 slot": lambda folder, layers: ckptd_case(folder, layers, 1),
    "dcp": lambda folder, layers: dcp_case(folder, layers, "dcp"),
    "dcp async": lambda folder, layers: dcp_case(folder, layers, "dcp async"),
}


def one(case: str, folder: str, layers: int) -> None:
    import torch

    torch.set_num_threads(2)
    common.remove(folder)
    Path(folder).mkdir(parents=True)
    print(json.dumps(CASES[case](folder, layers)))
    common.remove(folder)


def main() -> None:
    options = common.arguments(__doc__, layers=48)
    folder = f"{options.dir}/case"
    if options.case:
        one(options.case, folder, options.layers)
        return
    size = common.state_bytes(options.layers)
    args = ["--dir", options.dir, "--layers", str(options.layers)]
    common.alternate(__file__, options, args, list(CASES), size, partial(report, size=size))


def report(found: dict[str, list[dict[str, Any]]], size: int) -> None:
    m = common.median
    write, read = (common.limit_of(found["limit"], what) for what in ("write", "read"))
    keys = ("blocked_s", "durable_s", "cold_s", "warm_s", "peak_gb")
    keys = (*keys, "first_blocked_s", "first_durable_s")
    rows: list[list[Any]] = [
        [name, *(m(found[name], k) for k in keys), all(s["right"] for s in found[name])]
        for name in CASES
    ]
    rows.append(["disk limit", float("nan"), write, read, *[float("nan")] * 4, "–"])
    head = ["case", "blocked s", "durable s", "load cold s", "load warm s", "peak extra GB"]
    head += ["first save blocked s", "first save durable s", "bytes right"]
    ours, dcp, later = found["ckptd"], found["dcp"], found["dcp async"]
    ratios = [
        ["durable: disk limit / ckptd (aim 0.85)", write / m(ours, "durable_s")],
        ["durable: DCP save / ckptd (aim 2)", m(dcp, "durable_s") / m(ours, "durable_s")],
        ["blocked: DCP async_save / ckptd", m(later, "blocked_s") / m(ours, "blocked_s")],
        ["cold load: disk limit / ckptd (aim 0.8)", read / m(ours, "cold_s")],
        ["cold load: DCP / ckptd", m(dcp, "cold_s") / m(ours, "cold_s")],
        ["warm load: DCP / ckptd (aim 2)", m(dcp, "warm_s") / m(ours, "warm_s")],
    ]
    text = f"One process, {size / 1e9:.2f} GB; medians of {len(ours)} alternating repetitions.\n\n"
    text += common.table(head, rows) + "\n\n" + common.table(["ratio", "value"], ratios)
    kinds = ("memory", *(f"memory_{kind}" for kind in KINDS))
    head = ["memory above the state itself / state", "in all", "shared segments", "private"]
    head += ["mapped files"]
    shares = [[n, *(m(found[n], k) for k in kinds)] for n in CASES if n.startswith("ckptd")]
    text += "\n\n" + common.table(head, shares)
    text += (
        "\n\nMemory: the peak of the proportional sizes of all processes; each slot is a shared "
        "segment as large as the state, the rest is the writing process itself (aim with one slot: "
        "1.1 in all)."
    )
    command = f"python bench/save_load.py --reps {len(ours)}"
    common.publish("save_load", command, text, {"load": os.getloadavg(), "runs": found})


if __name__ == "__main__":
    main()
