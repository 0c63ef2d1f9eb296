"""An object store: how fast are a save and a load beside plain clients and DCP's writer?

    python bench/remote.py --servers radosgw --reps 3
    python bench/remote.py --reps 5
    python bench/remote.py --servers moto --layers 4 --reps 1
    python bench/remote.py --cases ckptd,obstore

Both servers run on this machine (``bench/s3.py``) and take most of its cores, so the ratios tell
what ckptd costs or saves beside other clients, and the seconds tell about the server. Plain ones
(s3fs, boto3's transfers, obstore) put the files that a save makes, from memory, and get them into
memory; ckptd digests besides. DCP saves and loads the same tensors through its fsspec writer and
s3fs. Each case is a fresh process.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import engines
import s3

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
    more: dict[str, Any] = {"store_options": options, "storage": ckptd.Storage(dedup=False)}
    with ckptd.Checkpointer(url, keep=1, **more) as ck:
        for step in range(SAVES + 1):
            begin = time.perf_counter()
            handle = ck.save(step + 1, live)
            assert handle is not None
            handle.durable()
            saves.append(time.perf_counter() - begin)
    for _ in range(SAVES):  # by another one: the one that saved would read its own memory
        for tensor in common.tensors(live):
            tensor.zero_()
        with ckptd.Checkpointer(url, **more) as ck:
            begin = time.perf_counter()
            ck.load(live)
            loads.append(time.perf_counter() - begin)
        now = common.tensors(live)
        right = right and all(torch.equal(a, b) for a, b in zip(now, expected, strict=True))
    return {"save_s": min(saves[1:]), "load_s": min(loads), "right": right}


def dcp_case(url: str, options: s3.Options, layers: int) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem as through

    engines.one_rank()
    reach = s3.reach(options)
    live = common.state(common.noise(), layers)
    expected = [t.clone() for t in common.tensors(live)]
    saves, loads, right = [], [], True
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in range(SAVES + 1):
        begin = time.perf_counter()
        writer = through.FsspecWriter(
            f"{url}/{step}", thread_count=os.cpu_count() or 1, sync_files=False, **reach
        )
        dcp.save(live, storage_writer=writer, planner=planner)
        saves.append(time.perf_counter() - begin)
        if step:
            s3.filesystem(options).rm(f"{url}/{step - 1}", recursive=True)
    for _ in range(SAVES):
        for tensor in common.tensors(live):
            tensor.zero_()
        begin = time.perf_counter()
        dcp.load(live, storage_reader=through.FsspecReader(f"{url}/{SAVES}", **reach))
        loads.append(time.perf_counter() - begin)
        now = common.tensors(live)
        right = right and all(torch.equal(a, b) for a, b in zip(now, expected, strict=True))
    return {"save_s": min(saves[1:]), "load_s": min(loads), "right": right}


Copies = Callable[[list[tuple[Path, str]]], None]


def with_s3fs(options: s3.Options) -> tuple[Copies, Copies]:
    store = s3.filesystem(options)

    def put(pairs: list[tuple[Path, str]]) -> None:
        store.put([str(p) for p, _ in pairs], [f"{s3.BUCKET}/{k}" for _, k in pairs])

    def get(pairs: list[tuple[Path, str]]) -> None:
        store.get([f"{s3.BUCKET}/{k}" for _, k in pairs], [str(p) for p, _ in pairs])

    return put, get


def with_boto3(options: s3.Options) -> tuple[Copies, Copies]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=options["region"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )

    def put(pairs: list[tuple[Path, str]]) -> None:
        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(lambda p: client.upload_file(str(p[0]), s3.BUCKET, p[1]), pairs))

    def get(pairs: list[tuple[Path, str]]) -> None:
        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(lambda p: client.download_file(s3.BUCKET, p[1], str(p[0])), pairs))

    return put, get


def with_obstore(options: s3.Options) -> tuple[Copies, Copies]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        s3.BUCKET,
        endpoint=options["endpoint_url"],
        region=options["region"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        client_options={"allow_http": True},
    )

    def get_one(pair: tuple[Path, str]) -> None:
        with pair[0].open("wb") as file:
            for chunk in obstore.get(store, pair[1]).stream(min_chunk_size=common.MIB):
                file.write(chunk)

    def put(pairs: list[tuple[Path, str]]) -> None:
        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(lambda p: obstore.put(store, p[1], p[0]), pairs))

    def get(pairs: list[tuple[Path, str]]) -> None:
        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(get_one, pairs))

    return put, get


_FILES = 8
"""Files at once, of clients that leave this to their caller."""
PLAIN = {"s3fs": with_s3fs, "boto3": with_boto3, "obstore": with_obstore}
WHOLE = {"ckptd": ckptd_case, "DCP fsspec": dcp_case}
CASES = (*WHOLE, *PLAIN)


def plain_case(client: str, url: str, options: s3.Options, layers: int) -> dict[str, Any]:
    import ckptd

    put, get = PLAIN[client](options)
    prefix = url.removeprefix(f"s3://{s3.BUCKET}/")
    puts, gets = [], []
    with in_memory() as folder:
        root = Path(folder, "root")
        with ckptd.Checkpointer(str(root), storage=ckptd.Storage(dedup=False)) as ck:
            handle = ck.save(1, common.state(common.noise(), layers))
            assert handle is not None
            handle.durable()
        names = [str(p.relative_to(root)) for p in files_of(str(root))]
        wanted = [(root / n).read_bytes() for n in names]
        store = s3.filesystem(options)
        for turn in range(SAVES + 1):
            begin = time.perf_counter()
            put([(root / n, f"{prefix}/{turn}/{n}") for n in names])
            puts.append(time.perf_counter() - begin)
            if turn:
                store.rm(f"{s3.BUCKET}/{prefix}/{turn - 1}", recursive=True)
        common.remove(str(root))
        for _ in range(SAVES):
            for name in names:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).unlink(missing_ok=True)
            begin = time.perf_counter()
            get([(root / n, f"{prefix}/{SAVES}/{n}") for n in names])
            gets.append(time.perf_counter() - begin)
        right = wanted == [(root / n).read_bytes() for n in names]
        store.rm(f"{s3.BUCKET}/{prefix}", recursive=True)
    return {"save_s": min(puts[1:]), "load_s": min(gets), "right": right}


def one(options: argparse.Namespace) -> None:
    server = json.loads(options.server)
    url = f"s3://{s3.BUCKET}/{options.case.replace(' ', '-')}-{os.getpid()}"
    if options.case in WHOLE:
        engines.tell(lambda: WHOLE[options.case](url, server, options.layers))
    engines.tell(lambda: plain_case(options.case, url, server, options.layers))


def main() -> None:
    options = common.arguments(
        __doc__, servers=",".join(s3.KINDS), layers=12, server="", cases=",".join(CASES)
    )
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
            cases = options.cases.split(",")
            rows = found[kind] = {case: [] for case in cases}
            shared = ["--layers", str(options.layers), "--server", json.dumps(server)]
            for _ in range(options.reps):
                for case in order.sample(cases, len(cases)):
                    run = common.in_fresh_process(__file__, ["--case", case, *shared])
                    rows[case].append(run)
                    s3.empty(server)
                    print(f"{kind} {case}: {run}", file=sys.stderr)
    report(options, found, skipped)


def report(options: argparse.Namespace, found: dict[str, Any], skipped: dict[str, str]) -> None:
    m = common.median
    rows, ratios = [], []
    size = common.state_bytes(options.layers)
    for kind, runs_of in found.items():
        cases = engines.measured(runs_of)
        for case, runs in cases.items():
            save, load = (m(runs, k) for k in ("save_s", "load_s"))
            right = all(r["right"] for r in runs)
            rows.append([kind, case, save, load, size / 1e9 / save, size / 1e9 / load, right])
        for what in ("save", "load"):
            for case, runs in cases.items():
                if case != "ckptd" and "ckptd" in cases:
                    ratio = m(runs, f"{what}_s") / m(cases["ckptd"], f"{what}_s")
                    ratios.append([f"{kind}, {what}: {case} / ckptd", ratio])
    head = ["server", "client", "save s", "load s", "save GB/s", "load GB/s", "bytes right"]
    text = (
        f"{size / 1e9:.2f} GB, one process; medians of {options.reps} alternating repetitions; "
        "server and client share the machine's cores. A save is over when it is committed. s3fs, "
        f"boto3 and obstore ({_FILES} files at once) put and get the files of ckptd's save, from "
        "memory into memory, and check nothing; DCP saves and loads the tensors. moto reads an "
        "object whole for each range of it that is asked for.\n\n"
    )
    text += common.table(head, rows) + "\n\n" + common.table(["ratio", "value"], ratios)
    text += "".join(f"\n\nSkipped: {kind} ({why})." for kind, why in skipped.items())
    text += "".join(engines.skipped(cases) for cases in found.values())
    command = f"python bench/remote.py --reps {options.reps}"
    common.publish("remote", command, text, {"runs": found})


if __name__ == "__main__":
    main()
