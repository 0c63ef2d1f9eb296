"""Whether shaped and cut links are named, in real networks of namespaces.

    sudo python bench/links.py             # 10 runs of each; table and results
    sudo python bench/links.py --runs 2    # fewer; only printed

Four nodes, each in a network namespace, and a veth pair for each pair of them. htb shapes one link
(point), all that a node sends (row), all that it receives (column), both (node) to 60 Mbit/s, or
nothing passes between two nodes (partition). Each run draws another node. The agent's own
probe measures all 12 directions, one source at a time, twice (the least counts), and
`ckptd.monitor.links` reads the matrix. Named first: the first suspect is what was planted.
Spurious: runs in which more is named, and how many things. Says so and ends where the kernel lacks
namespaces, veth or htb.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.monitor.cluster.mesh import PLANTS, Mesh, plant
from tests.monitor.cluster.namespaces import kernel_lacks

NODES = 4
ROUNDS = 2


def one(what: str, draw: np.random.Generator) -> dict[str, Any]:
    """Plant once in a new network and look."""
    with Mesh(NODES) as mesh:
        wanted = plant(mesh, what, int(draw.integers(NODES))) if what else ""
        started = time.perf_counter()
        named = mesh.named(ROUNDS)
        seconds = time.perf_counter() - started
    # A cut link is cut both ways, and either way may come first.
    back = "link " + ">".join(reversed(wanted.removeprefix("link ").split(">")))
    fine = {wanted, back} if what == "partition" else {wanted}
    return {
        "planted": what or "nothing",
        "wanted": wanted,
        "named": named,
        "first": named[:1] == [wanted] or (what == "partition" and named[:1] == [back]),
        "spurious": len(set(named) - fine),
        "seconds": seconds,
    }


def text(runs: list[dict[str, Any]]) -> str:
    lines = ["| planted | runs | named first | runs with more | things more | probing (s) |"]
    lines.append("|---|---|---|---|---|---|")
    for what in (*PLANTS, "nothing"):
        mine = [r for r in runs if r["planted"] == what]
        first = "-" if what == "nothing" else f"{sum(r['first'] for r in mine)}"
        more = sum(r["spurious"] > 0 for r in mine)
        things = sum(r["spurious"] for r in mine)
        seconds = float(np.median([r["seconds"] for r in mine]))
        lines.append(f"| {what} | {len(mine)} | {first} | {more} | {things} | {seconds:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if why := kernel_lacks():
        print(f"NOTHING IS MEASURED: {why}")
        return
    draw = np.random.default_rng(options.seed)
    runs = [one(what, draw) for _ in range(options.runs) for what in (*PLANTS, "")]
    if options.runs >= 8:
        command = f"python bench/links.py --runs {options.runs}"
        common.publish("links", command, text(runs), {"runs": runs, "nodes": NODES})
    else:
        print(text(runs))


if __name__ == "__main__":
    main()
