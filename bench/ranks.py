"""Four gloo ranks, 2.02 GB in all: save, and load onto the same and onto other layouts.

    python bench/ranks.py

FSDP2-like shards (rows). Loads: the same layout, two ranks, one rank, and the other dimension's
cut (columns), where each byte is wanted by one rank but lies in everybody's rows. Against torch
DCP in the same run. "bytes asked" are what the ranks ask of the store: ckptd's first pass brings
each block once per host and verifies it; DCP's ``rchar``. "device bytes" come from the kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

import common

LOADS = {"same 4 ranks": (4, 0), "2 ranks": (2, 0), "columns 4 ranks": (4, 1), "1 rank": (1, 0)}


def sharded(world: int, dim: int, layers: int) -> dict[str, Any]:
    """Return the state as DTensors cut along `dim` (vectors along their only one)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    make = common.noise()

    def shard(shape: tuple[int, ...]) -> Any:
        axis = dim if len(shape) > 1 else 0
        full = make(shape)
        local = full.chunk(world, axis)
        mine = local[mesh.get_rank()] if mesh.get_rank() < len(local) else full[:0]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            mine.contiguous().clone(),
            mesh,
            [Shard(axis)],
            run_check=False,
            shape=full.shape,
            stride=stride,
        )

    return common.state(shard, layers)


def local(live: Any) -> list[Any]:
    return [t.to_local() for t in common.tensors(live)]


def save_rank(folder: str, case: str, layers: int, saves: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import ckptd

    torch.set_num_threads(1)
    live = sharded(dist.get_world_size(), 0, layers)
    blocked, durable = [], []
    ck = ckptd.Checkpointer(folder, storage=ckptd.Storage(dedup=False)) if case == "ckptd" else None
    group = dist.new_group(backend="gloo")
    for step in range(1, saves + 2):
        dist.barrier()
        if dist.get_rank() == 0:
            common.settle()
        dist.barrier()
        start = time.perf_counter()
        if ck is not None:
            handle = ck.save(step, live)
            blocked.append(time.perf_counter() - start)
            assert handle is not None
            handle.durable()
        elif case == "dcp":
            dcp.save(live, storage_writer=dcp.FileSystemWriter(f"{folder}/{step}"))
            blocked.append(time.perf_counter() - start)
        else:
            future = dcp.async_save(live, checkpoint_id=f"{folder}/{step}", process_group=group)
            blocked.append(time.perf_counter() - start)
            getattr(future, "upload_completion", future).result()
        durable.append(time.perf_counter() - start)
    dist.barrier()
    if ck is not None:
        ck.close()
    middle = len(blocked[1:]) // 2
    return {"blocked_s": sorted(blocked[1:])[middle], "durable_s": sorted(durable[1:])[middle]}


def load_rank(folder: str, case: str, layers: int, saves: int, dim: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import ckptd

    torch.set_num_threads(1)
    live = sharded(dist.get_world_size(), dim, layers)
    expected = [t.clone() for t in local(live)]
    for t in local(live):
        t.zero_()
    ck = ckptd.Checkpointer(folder, storage=ckptd.Storage(dedup=False)) if case == "ckptd" else None
    out: dict[str, Any] = {}
    for kind in ("cold", "warm"):
        dist.barrier()
        if kind == "cold" and dist.get_rank() == 0:
            common.drop_caches(folder)
        dist.barrier()
        before = common.io_counters()
        start = time.perf_counter()
        if ck is not None:
            ck.load(live)
        else:
            dcp.load(live, checkpoint_id=f"{folder}/{saves + 1}")
        dist.barrier()
        out[f"{kind}_s"] = time.perf_counter() - start
        if kind == "cold":
            after = common.io_counters()
            out["device"] = after["read_bytes"] - before["read_bytes"]
            out["asked"] = after["rchar"] - before["rchar"]
            if ck is not None and ck.last_load is not None:
                out["asked"] = ck.last_load.read.bytes_fetched
    out["right"] = all(torch.equal(a, b) for a, b in zip(local(live), expected, strict=True))
    if ck is not None:
        ck.close()
    return out


def one(case: str, folder: str, layers: int) -> None:
    from ckptd.testing.ranks import run_ranks

    common.remove(folder)
    saves = 2
    patience = {"deadline_s": 600.0}
    ranks = run_ranks(4, save_rank, folder, case, layers, saves, **patience)
    out: dict[str, Any] = {k: max(r[k] for r in ranks) for k in ranks[0]}
    if case != "dcp async":
        for name, (world, dim) in LOADS.items():
            got = run_ranks(world, load_rank, folder, case, layers, saves, dim, **patience)
            out[name] = {
                "cold_s": max(r["cold_s"] for r in got),
                "warm_s": max(r["warm_s"] for r in got),
                "asked": sum(r["asked"] for r in got),
                "device": sum(r["device"] for r in got),
                "right": all(r["right"] for r in got),
            }
    common.remove(folder)
    print(json.dumps(out))


CASES = ("ckptd", "dcp", "dcp async")


def main() -> None:
    options = common.arguments(__doc__, layers=48)
    if options.case:
        one(options.case, f"{options.dir}/case", options.layers)
        return
    size = common.state_bytes(options.layers)
    args = ["--dir", options.dir, "--layers", str(options.layers)]
    tell = partial(report, size=size, options=options)
    common.alternate(__file__, options, args, CASES, size, tell, 1200.0)


def report(found: dict[str, list[Any]], size: int, options: argparse.Namespace) -> None:
    m = common.median
    write, read = (common.limit_of(found["limit"], what) for what in ("write", "read"))
    ours, dcp, later = found["ckptd"], found["dcp"], found["dcp async"]
    text = f"4 gloo ranks, {size / 1e9:.2f} GB in all; {len(ours)} repetitions, medians.\n\n"
    rows = [[c, m(found[c], "blocked_s"), m(found[c], "durable_s")] for c in CASES]
    rows.append(["disk limit", float("nan"), write])
    text += common.table(["save", "blocked s", "durable s"], rows) + "\n\n"
    loads = []
    for name in LOADS:
        for case in ("ckptd", "dcp"):
            s = [x[name] for x in found[case]]
            asked, device = m(s, "asked") / size, m(s, "device") / size
            right = all(x["right"] for x in s)
            loads.append([name, case, m(s, "cold_s"), m(s, "warm_s"), asked, device, right])
    loads.append(["disk limit", "", read, float("nan"), 1.0, 1.0, "–"])
    head = ["load", "case", "cold s", "warm s", "bytes asked / needed"]
    head += ["device bytes / needed", "bytes right"]
    text += common.table(head, loads) + "\n\n"
    columns = {c: [x["columns 4 ranks"] for x in found[c]] for c in ("ckptd", "dcp")}
    ratios = [
        ["durable: DCP save / ckptd (aim 2)", m(dcp, "durable_s") / m(ours, "durable_s")],
        ["durable: disk limit / ckptd (aim 0.8)", write / m(ours, "durable_s")],
        ["blocked: DCP async_save / ckptd", m(later, "blocked_s") / m(ours, "blocked_s")],
        ["columns: bytes asked per byte needed (aim 1.1)", m(columns["ckptd"], "asked") / size],
        ["columns, cold: DCP / ckptd", m(columns["dcp"], "cold_s") / m(columns["ckptd"], "cold_s")],
    ]
    text += common.table(["ratio", "value"], ratios)
    common.publish("ranks", common.command(), text, found)


if __name__ == "__main__":
    main()
