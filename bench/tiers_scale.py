"""Cost of restoring from near tiers at 16 to 16,384 simulated ranks, 8 a node.

    python bench/tiers_scale.py

The nodes are simulated (stores in this process, each with the parts of its own ranks and of those
that it keeps as a peer), the code is the real one: choosing peers, finding the complete
snapshots among all nodes and finishing the newest one (rank 0, once a restore; two reads of every
part), what rank 0 sends to all, and what every rank does with it. The network is not in it: rank 0
makes as many requests as the column says, 16 at a time.
"""

from __future__ import annotations

import time
from typing import Any

import common
import msgspec
import numpy as np
import planning
from scale import Clock, groups, parts

from ckptd.checkpoint.format.names import (
    DATA,
    CommitName,
    data_folder,
    digests_key,
    file_key,
    part_key,
)
from ckptd.checkpoint.format.witness import WitnessPlan
from ckptd.checkpoint.load.union import UnionSource, UnionStore
from ckptd.checkpoint.save.commit import plan_key
from ckptd.checkpoint.save.peers import Distant, partners
from ckptd.checkpoint.save.recover import complete_snapshots, finished_files, unpacked
from ckptd.checkpoint.save.structure import SavePlan, build_plan
from ckptd.store.base import MeterSpec, Store
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.wrap import Meter

RANKS_PER_NODE = 8
NAME = CommitName(1000, 1)


def fill(plan: SavePlan, ranks: int) -> list[MemoryStore]:
    """Return the stores of all nodes, with one snapshot that is complete."""
    folder = data_folder(NAME, "0001")
    total = WitnessPlan.over(plan.tensors).total
    shares = np.array_split(np.arange(total, dtype="<u4"), ranks)
    reported = [
        msgspec.structs.replace(
            p, slots=shares[p.rank].tobytes(), values=bytes(8 * len(shares[p.rank]))
        ).encode()
        for p in parts(plan, ranks)
    ]
    body = msgspec.msgpack.encode(plan)
    count = -(-ranks // RANKS_PER_NODE)
    stores = [MemoryStore(f"node-{n}") for n in range(count)]
    peer = partners({f"{n:05d}": f"{n:05d}" for n in range(count)})
    for n, store in enumerate(stores):
        guests = [int(node) for node, keeper in peer.items() if int(keeper) == n]
        store.put(plan_key(folder), body)
        for node in (n, *guests):
            for rank in range(node * RANKS_PER_NODE, min((node + 1) * RANKS_PER_NODE, ranks)):
                store.put(part_key(folder, rank), reported[rank])
                store.put(file_key(folder, rank), b"")
                store.put(digests_key(file_key(folder, rank)), b"")
    return stores


def _keys(store: Store) -> frozenset[str]:
    return frozenset(info.key for info in store.list(DATA))


def measure(ranks: int) -> dict[str, Any]:
    planning.forget()
    layout = planning.layouts(ranks)["fsdp2"]
    plan = build_plan(groups(layout), ranks)
    stores = fill(plan, ranks)
    meters = [Meter(s, MeterSpec()) for s in stores]
    sources = [UnionSource(m, "peer", f"n{i}") for i, m in enumerate(meters)]
    clock = Clock()
    clock.run("peers s", lambda: partners({f"{n:05d}": f"{n:05d}" for n in range(len(stores))}))
    known = clock.run("list s", lambda: [s._replace(keys=_keys(s.store)) for s in sources])
    union = UnionStore(known)
    (snapshot,) = clock.run("find s", lambda: complete_snapshots(union))
    files = clock.run("finish s", lambda: finished_files(union, snapshot))
    sent = sum(len(text) for text in files.values())

    def one_rank() -> None:
        with unpacked(files) as (_, manifest, _):
            key = file_key(manifest.folder, ranks // 2)
        held = {ranks // 2 // RANKS_PER_NODE: frozenset([key])}
        near = [
            UnionSource(Distant(f"n{i}", lambda s=s: s), "peer", keys=held.get(i, frozenset()))
            for i, s in enumerate(stores)
        ]
        UnionStore(near).stat(key)

    clock.run("one rank s", one_rank)
    calls = sum(m.calls for meter in meters for m in meter.snapshot().values())
    for store in stores:
        forget_memory(store.url.partition("://")[2])
    row = {"ranks": ranks, "nodes": len(stores), **clock.seconds}
    return row | {"requests of rank 0": calls, "sent to each rank MB": sent / 1e6}


def main() -> None:
    start = time.monotonic()
    rows = [measure(ranks) for ranks in planning.RANKS]
    head = list(rows[0])
    body = [[f"{r[k]:.3f}" if isinstance(r[k], float) else r[k] for k in head] for r in rows]
    text = "A 405B model with Adam moments under FSDP2; seconds of one process.\n\n"
    common.publish(
        "tiers_scale", "python bench/tiers_scale.py", text + common.table(head, body), rows
    )
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
