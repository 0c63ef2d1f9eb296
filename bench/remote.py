"""An object store: how fast are a save and a load beside s3fs, which moves the same bytes?

    python bench/remote.py --reps 3
    python bench/remote.py --servers moto --layers 4 --reps 1

Both servers run on this machine (``bench/s3.py``) and take most of its cores, so the ratios tell
what ckptd costs or saves beside a plain client, and the seconds tell about the server. s3fs puts
the files that a save makes, from memory, and gets them into memory; ckptd digests besides. Each
case is a fresh process, a repetition of all takes two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import s3

CASES = ("ckptd", "s3fs")
SAVES = 2
"""After one that is not counted: it touches fresh memory and makes connections."""


def files_of(folder: str) -> list[Path]:
    return sorted(p for p in Path(folder).rglob("*") if p.is_file())


@contextlib.contextmanager
def in_memory() -> Iterator[str]:
    """Give a folder in memory, so that no disk takes part."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="ckptd-bench-") as folder:
        yield folder


def ckptd_case(url: str, options: s3.Options, layers: int) -> dict[str, Any]:
    import torch

    import ckptd

    live = common.state(common.noise(), layers)
    expected = [t.clone() for t in common.tensors(live)]
    saves, loads, right = [], [], True
    with ckptd.Checkpointer(
        url, store_options=options, keep=1, storage=ckptd.Storage(dedup=False)
    ) as ck:
        for step in range(SAVES + 1):
            begin = time.perf_counter()
            handle = ck.save(step + 1, live)
            assert handle is not None
            handle.durable()
            saves.append(time.perf_counter() - begin)
        for _ in range(SAVES):
            for tensor in common.tensors(live):
                tensor.zero_()
            begin = time.perf_counter()
            ck.load(live)
            loads.append(time.perf_counter() - begin)
            now = common.tensors(live)
            right = right and all(torch.equal(a, b) for a, b in zip(now, expected, strict=True))
    return {"save_s": min(saves[1:]), "load_s": min(loads), "right": right}


def s3fs_case(url: str, options: s3.Options, layers: int) -> dict[str, Any]:
    import ckptd

    target = url.removeprefix("s3://")
    puts, gets = [], []
    with in_memory() as folder:
        with ckptd.Checkpointer(f"{folder}/root", storage=ckptd.Storage(dedup=False)) as ck:
            handle = ck.save(1, common.state(common.noise(), layers))
            assert handle is not None
            handle.durable()
        wanted = [p.read_bytes() for p in files_of(f"{folder}/root")]
        store = s3.filesystem(options)
        for turn in range(SAVES + 1):
            begin = time.perf_counter()
            store.put(f"{folder}/root", f"{target}/{turn}", recursive=True)
            puts.append(time.perf_counter() - begin)
            if turn:
                store.rm(f"{target}/{turn - 1}", recursive=True)
        common.remove(f"{folder}/root")
        for _ in range(SAVES):
            common.remove(f"{folder}/back")
            begin = time.perf_counter()
            store.get(f"{target}/{SAVES}", f"{folder}/back", recursive=True)
            gets.append(time.perf_counter() - begin)
        right = wanted == [p.read_bytes() for p in files_of(f"{folder}/back")]
        store.rm(target, recursive=True)
    return {"save_s": min(puts[1:]), "load_s": min(gets), "right": right}


def one(options: argparse.Namespace) -> None:
    server = json.loads(options.server)
    url = f"s3://{s3.BUCKET}/{options.case}-{os.getpid()}"
    work = {"ckptd": ckptd_case, "s3fs": s3fs_case}[options.case]
    print(json.dumps(work(url, server, options.layers)), flush=True)


def main() -> None:
    options = common.arguments(__doc__, servers=",".join(s3.KINDS), layers=12, server="")
    if options.case:
        one(options)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    skipped: dict[str, str] = {}
    order = random.Random(0)
    for kind in options.servers.split(","):
        with s3.server(kind) as server:
            if isinstance(server, str):
                skipped[kind] = server
                print(f"SKIPPED: {kind}: {server}", file=sys.stderr)
                continue
            rows = found[kind] = {case: [] for case in CASES}
            shared = ["--layers", str(options.layers), "--server", json.dumps(server)]
            for _ in range(options.reps):
                for case in order.sample(CASES, len(CASES)):
                    run = common.in_fresh_process(__file__, ["--case", case, *shared])
                    rows[case].append(run)
                    print(f"{kind} {case}: {run}", file=sys.stderr)
    report(options, found, skipped)


def report(options: argparse.Namespace, found: dict[str, Any], skipped: dict[str, str]) -> None:
    m = common.median
    rows, ratios = [], []
    size = common.state_bytes(options.layers)
    for kind, cases in found.items():
        for case, runs in cases.items():
            save, load = (m(runs, k) for k in ("save_s", "load_s"))
            right = all(r["right"] for r in runs)
            rows.append([kind, case, save, load, size / 1e9 / save, size / 1e9 / load, right])
        for what in ("save", "load"):
            key, tool = f"{what}_s", {"save": "put", "load": "get"}[what]
            ratio = m(cases["s3fs"], key) / m(cases["ckptd"], key)
            ratios.append([f"{kind}, {what}: s3fs {tool} / ckptd", ratio])
    head = ["server", "client", "save s", "load s", "save GB/s", "load GB/s", "bytes right"]
    text = (
        f"{size / 1e9:.2f} GB, one process; medians of {options.reps} alternating repetitions; "
        "server and client share the machine's cores. A save is over when it is committed. s3fs "
        "puts and gets the same files, from memory into memory, and checks nothing.\n\n"
    )
    text += common.table(head, rows) + "\n\n" + common.table(["ratio", "value"], ratios)
    text += "".join(f"\n\nSkipped: {kind} ({why})." for kind, why in skipped.items())
    command = f"python bench/remote.py --reps {options.reps}"
    common.publish("remote", command, text, {"runs": found})


if __name__ == "__main__":
    main()
