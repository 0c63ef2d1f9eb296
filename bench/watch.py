"""Cost of a round of the watch: from packed sheets to verdicts, at 16 to 16,384 ranks.

    python bench/watch.py [--reps 10]

Jobs are simulated (dp x pp x tp meshes, 8 ranks a node) and sent as sheets, in the real wire form:
by the agent of each node, and by 20 forwarders that join the sheets of their nodes. Ranks show
their last 16 calls of a step that stands in the middle, and tell the own times of one step. All is
CPU time of one thread: `taking` is unpacking, checking, taking and answering the sheets of one
round, and `round` joins them and judges. `hung` is a round of a job in which one rank hangs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import common
import msgspec
import numpy as np

from ckptd.monitor.job import CALL, JobView, Phase, RankView
from ckptd.monitor.report import STEP, GroupInfo, NodeReport, from_views, merge, pack, unpack_report
from ckptd.monitor.watch import JobWatch
from ckptd_simulated.job import Fault, Mesh, Planted, group_ids, own_times, play, views

MESHES = {
    16: Mesh(2, 2, 4),
    128: Mesh(4, 4, 8),
    1024: Mesh(16, 8, 8),
    4096: Mesh(64, 8, 8),
    10240: Mesh(160, 8, 8),
    16384: Mesh(256, 8, 8),
}
FORWARDERS = 20
CALLS = 16
STEPS = 5000
KINDS = ("tp", "dp", "mp", "p2p", "p2p", "p2p", "p2p")


def infos(mesh: Mesh) -> dict[int, GroupInfo]:
    ids = group_ids(mesh)
    out = {}
    for slot, kind in enumerate(KINDS):
        order = np.argsort(ids[:, slot], kind="stable")
        groups, starts = np.unique(ids[order, slot], return_index=True)
        for group, ranks in zip(groups.tolist(), np.split(order, starts[1:]), strict=True):
            if group:
                out[group] = GroupInfo.of(ranks.tolist(), kind, kind)
    return out


def seen(mesh: Mesh, job: JobView) -> dict[str, list[RankView]]:
    """Views by node, each with `CALLS` calls; older ones are those that it has, steps earlier."""
    out: dict[str, list[RankView]] = {}
    for node in range(mesh.nodes):
        mine = job.ranks["node"] == node
        rows = np.flatnonzero(mine)
        part = JobView(
            job.world,
            job.nodes,
            job.ranks[mine],
            _rows(job.groups, rows),
            _rows(job.calls, rows),
            {},
        )
        out[f"n{node}"] = [_longer(v) for v in views(part)]
    return out


def _rows(table: Any, rows: Any) -> Any:
    first, last = np.searchsorted(table["row"], [rows[0], rows[-1] + 1])
    part = table[first:last].copy()
    part["row"] -= rows[0]
    return part


def _longer(view: RankView) -> RankView:
    calls = view.calls
    older = np.zeros(0, CALL)
    if len(calls):
        older = np.resize(calls, CALLS - min(len(calls), CALLS))
        older = older.copy()
        older["step"] -= 1
        older["seq"] -= 1000 * (np.arange(len(older)) // len(calls) + 1)
        older["end"] = older["start"]
    return msgspec.structs.replace(view, calls=np.concatenate([older, calls])[-CALLS:])


def sheets(mesh: Mesh, job: JobView, number: int, told: dict[int, GroupInfo]) -> list[NodeReport]:
    own = own_times(mesh, np.random.default_rng(number), 1)[0]
    out = []
    for k, (node, mine) in enumerate(seen(mesh, job).items()):
        steps = np.zeros(len(mine), STEP)
        steps["row"], steps["step"] = np.arange(len(mine)), STEPS + number
        steps["phase"] = Phase.TRAIN
        steps["self_s"] = own[k * mesh.per_node :][: len(mine)]
        steps["wall_s"] = steps["self_s"] * 1.2
        mine_told = told if k == 0 and number == 0 else {}
        out.append(
            from_views(mine, job="j", source=node, number=number, members=mine_told, steps=steps)
        )
    return out


def joined(each: Sequence[NodeReport], number: int) -> list[NodeReport]:
    size = -(-len(each) // FORWARDERS)
    groups = [each[i : i + size] for i in range(0, len(each), size)]
    return [
        merge(g, [0.0] * len(g), job="j", source=f"f{i}", number=number)
        for i, g in enumerate(groups)
    ]


def measure(ranks: int, forwarded: bool, reps: int) -> dict[str, Any]:
    mesh = MESHES[ranks]
    rng = np.random.default_rng(1)
    well = play(mesh, [], rng, age=0.01, rounds=20, step=STEPS)
    hung = play(mesh, [Fault(Planted.HANG, ranks // 2, 1)], rng, step=STEPS)
    told = infos(mesh)
    watch, now = JobWatch("j"), 100.0
    taking, rounds, hangs, size = [], [], [], 0
    found = 0
    base = sheets(mesh, well, 0, told)
    stuck = sheets(mesh, hung, 0, {})
    for k in range(reps + 6):
        source = base if k < reps else stuck
        each = [_renewed(s, k) for s in source]
        packed = [pack(s) for s in (joined(each, k) if forwarded else each)]
        size = sum(map(len, packed))
        start = time.process_time()
        for data in packed:
            sheet = unpack_report(data)
            watch.take(sheet, now)
            watch.orders(sheet.source, now)
        middle = time.process_time()
        changes = watch.round(now)
        end = time.process_time()
        now += watch.settings.settle_s if k == 0 else watch.sources.period_s
        if k:
            taking.append(middle - start)
            (rounds if k < reps else hangs).append(end - middle)
        found += [v for i in changes.opened for v in i.verdict.names()] == [str(ranks // 2)]
    return {
        "ranks": ranks,
        "sheets": len(packed),
        "KiB": size / 1024,
        "taking ms": float(np.median(taking)) * 1e3,
        "round ms": float(np.median(rounds)) * 1e3,
        "round max ms": max(rounds) * 1e3,
        "hung ms": float(np.median(hangs)) * 1e3,
        "us per rank": (float(np.median(taking)) + float(np.median(rounds))) / ranks * 1e6,
        "hang named": "yes" if found == 1 else "no",
    }


def _renewed(sheet: NodeReport, number: int) -> NodeReport:
    steps = sheet.table("steps").copy()
    steps["step"] += number
    members = sheet.members if number == 0 else {}
    return msgspec.structs.replace(sheet, number=number, steps=steps.tobytes(), members=members)


def main() -> None:
    options = common.arguments(__doc__)
    rows = [
        {"by": "forwarders" if forwarded else "nodes", **measure(n, forwarded, 2 * options.reps)}
        for forwarded in (False, True)
        for n in MESHES
        if not forwarded or n >= 1024
    ]
    head = list(rows[0])
    body = [[f"{v:.3g}" if isinstance(v, float) else v for v in r.values()] for r in rows]
    text = (
        "CPU time of one thread of the daemon for one round, sheets in the wire form.\n\n"
        f"{common.table(head, body)}"
    )
    common.publish("watch", "python bench/watch.py", text, {"rows": rows})


if __name__ == "__main__":
    main()
