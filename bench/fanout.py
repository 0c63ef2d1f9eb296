"""Workers that pass on what they pull: a trainer's bytes, and the time until the last one has them.

    python bench/fanout.py            # counts with real processes, and the model; seconds
    python bench/fanout.py --linked   # over links of limited bandwidth, with faults; minutes; root
    python bench/fanout.py --draw     # docs/guide/fanout.svg alone, from the last table

*Counted*: one publisher and 1, 4 and 16 workers, four a host, real processes that pull 8 MB of
bfloat16 over sockets, from each other with ``pass_on``. The kernel's counts of what came over all
connections to the trainer, in bytes, and what workers report. Hosts are names: all run here.

*Modelled*: workers that need 10 GB each, eight a host, links of 100 Gbit/s, 4 GB/s within a host,
which begin at once in any order. Of whom each takes is asked of the code that a server has
(`ckptd.publish.passing.Sources`); who has everything gives it to one of its own host and one of
another at a time, as a worker does. Latency, digests, and links that are shared with others are
left out. Without passing on the trainer's link is shared by all.

*Linked*: 1, 4 and 16 workers, two a host, which pull 4 MB of bfloat16 at once. Each host, and the
trainer's, is a network namespace that can send and receive 10 Mbit/s (`tc`, htb); within a host
workers use its sockets. Bytes are those that the trainer's interface has sent, with all headers;
seconds are from the call of ``publish`` to the last worker's return from ``update``. In rows with
a fault the first worker to give the fourth answer to another one, or to take it, is killed or
stopped then, and the others count. A version crosses a link in 3.4 s.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

import ckptd
from ckptd.publish.messages import ServerEntry
from ckptd.publish.passing import Sources
from ckptd.testing.ranks import RANK_IMPORTS, run_ranks

sys.path.insert(0, str(common.HERE.parent))
from tests.publish.linked import FAULTS, LinkedWorld
from tests.publish.passworker import links_of, received

PICTURE = common.HERE.parent / "docs" / "guide" / "fanout.svg"
COUNTED, MODELLED = (1, 4, 16), (1, 16, 256, 512, 4096)
NEEDED, LINK, LOCAL = 10e9, 12.5e9, 4e9
A_HOST, A_HOST_HERE = 8, 4
LAYOUT = """# layout all
mesh P = x:1
space s { A[v h] }
layout all of s on P { a = A[v h] }
"""
SHAPE = 4096, 1024


def modelled(workers: int) -> dict[str, Any]:
    """Play one version for so many workers."""
    order = list(range(workers))
    random.Random(7).shuffle(order)
    sources, takers, control = Sources(), defaultdict[int, list[int]](list), 0
    for worker in order:
        entry = ServerEntry(f"host-{worker // A_HOST}", f"{worker}", "", "")
        path, _ = sources.path(b"k", entry, worker)
        control = max(control, len(path))
        takers[int(path[0].address) if path else -1].append(worker)

    def ends(giver: int, begun: float, host: int) -> Iterator[float]:
        free = {True: begun, False: begun}
        for taker in takers[giver]:
            here = taker // A_HOST == host
            free[here] += NEEDED / (LOCAL if here else LINK)
            yield free[here]
            yield from ends(taker, free[here], taker // A_HOST)

    sent = len(takers[-1]) * NEEDED
    return {
        "workers": workers,
        "sent": sent,
        "seconds": max(ends(-1, 0.0, -1)),
        "longest path": control,
        "sent to each": workers * NEEDED,
        "seconds to each": workers * NEEDED / LINK,
    }


def life(place: str, pass_on: bool) -> tuple[int, int, int]:
    """Publish, or be a worker that pulls once: bytes of the trainer, received, passed on."""
    rank = dist.get_rank()
    weights = torch.zeros(SHAPE, dtype=torch.bfloat16)
    found = 0, 0, 0
    if rank == 0:
        group = dist.new_group([0])
        weights.copy_(torch.randn(SHAPE))
        with ckptd.Publisher(LAYOUT, place, process_group=group) as publisher:
            publisher.publish(1, {"a": weights}).wait(60)
            dist.barrier()
            dist.barrier()
        return found
    dist.new_group([0])
    os.environ["CKPTD_NODE"] = f"host-{(rank - 1) // A_HOST_HERE}"
    with ckptd.Subscriber(LAYOUT, {"a": weights}, place, pass_on=pass_on) as subscriber:
        links = links_of(subscriber)
        dist.barrier()
        report = subscriber.update(wait_s=60)
        total = received(links)
        if report is not None:
            found = total, report.bytes_received, report.bytes_passed
        dist.barrier()
    return found


def counted(folder: str, workers: int, *, pass_on: bool) -> dict[str, Any]:
    """Count with real processes."""
    place = f"{folder}/at-{workers}-{pass_on}"
    done = run_ranks(1 + workers, life, place, pass_on, deadline_s=300.0)[1:]
    return {
        "workers": workers,
        "pass on": pass_on,
        "needed": SHAPE[0] * SHAPE[1] * 2,
        "of the trainer": sum(d[0] for d in done),
        "received": sum(d[1] for d in done),
        "passed": sum(d[2] for d in done),
    }


def linked(folder: str, workers: int, fault: str = "", *, pass_on: bool) -> dict[str, Any]:
    """Have one version used by all, over links of limited bandwidth."""
    hosts = -(-workers // 2)
    at = Path(folder) / f"linked-{workers}-{pass_on}-{fault}".replace(" ", "-")
    how: dict[str, Any] = {"mbit": 10.0, "rows": 2048, "pass_on": pass_on, "fault": fault}
    with LinkedWorld(at, hosts, workers // hosts, **how) as world:
        before, begun = world.sent(), time.monotonic()
        wanted = world.publish(1)
        used = [world.used(one) for one in (world.survivors() if fault else world.workers)]
        if {one.values for one in used} != {wanted}:
            raise SystemExit("a worker has other values than were published")
        return {
            "workers": workers,
            "pass on": pass_on,
            "fault": fault or "none",
            "times": (world.sent() - before) / (how["rows"] * 2048),
            "s": max(one.at for one in used) - begun,
        }


def linked_table(folder: str) -> None:
    """Measure over links, and write the table."""
    RANK_IMPORTS.extend(["ckptd.publish.torch.publisher", "ckptd.lay.bind", "tests.publish.linked"])
    kinds = [(n, "", p) for n in COUNTED for p in (False, True)]
    kinds += [(COUNTED[-1], fault, True) for fault in FAULTS]
    data = [linked(folder, n, fault, pass_on=p) for n, fault, p in kinds]
    keys = ["workers", "pass on", "fault", "times", "s"]
    head = ["workers", "pass on", "one worker is", "trainer sends, of those needed once", "s"]
    text = common.table(head, [[row[key] for key in keys] for row in data])
    common.publish("fanout_linked", common.command(), text, data)


def draw(data: dict[str, Any]) -> None:
    """Draw both: bytes and time by workers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.patch.set_facecolor("white")  # also where the page is dark
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    rows = data["modelled"]
    by = [row["workers"] for row in rows]
    gb = [row["sent"] / 1e9 for row in rows], [row["sent to each"] / 1e9 for row in rows]
    left.plot(by, gb[1], "--", color="#d55e00", label="to each worker")
    left.plot(by, gb[0], "-", color="#0072b2", label="pass_on=True")
    for pass_on, colour in ((False, "#d55e00"), (True, "#0072b2")):
        taken = [row for row in data["counted"] if row["pass on"] is pass_on]
        dots = [NEEDED / 1e9 * row["of the trainer"] / row["needed"] for row in taken]
        label = "counted" if pass_on else None
        left.plot([r["workers"] for r in taken], dots, "o", color=colour, label=label)
    right.plot(by, [r["seconds to each"] for r in rows], "--", color="#d55e00")
    right.plot(by, [r["seconds"] for r in rows], "-", color="#0072b2")
    left.set_ylabel("the trainer sends (GB)")
    right.set_ylabel("until the last worker has it (s)")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    if "--draw" in sys.argv:
        draw(json.loads((common.RESULTS / "fanout.json").read_text())["data"])
        return
    if "--linked" in sys.argv:
        with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as folder:
            linked_table(folder)
        return
    options = common.arguments(__doc__)
    Path(options.dir).mkdir(exist_ok=True)
    kinds = [(n, p) for n in COUNTED for p in (False, True)]
    data = {
        "counted": [counted(options.dir, n, pass_on=p) for n, p in kinds],
        "modelled": [modelled(n) for n in MODELLED],
    }
    head = ["workers", "pass on", "bytes of the trainer", "by those needed once", "of workers"]
    keys = ["workers", "pass on", "of the trainer", "times", "passed"]
    for row in data["counted"]:
        row["times"] = row["of the trainer"] / row["needed"]
    rows = [[row[key] for key in keys] for row in data["counted"]]
    text = "Counted:\n\n" + common.table(head, rows) + "\n\nModelled:\n\n"
    head = ["workers", "trainer sends GB", "s", "longest path", "GB to each", "s to each"]
    keys = ["workers", "sent", "seconds", "longest path", "sent to each", "seconds to each"]
    rows = [
        [row[key] / 1e9 if key.startswith("sent") else row[key] for key in keys]
        for row in data["modelled"]
    ]
    common.publish("fanout", common.command(), text + common.table(head, rows), data)
    draw(data)


if __name__ == "__main__":
    main()
