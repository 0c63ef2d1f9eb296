"""How long does one rank plan a move of experts, as the number of ranks grows?

    python bench/experts.py
    python bench/experts.py --ranks 16384  # one size, printed only
    python bench/experts.py --plot experts.svg

The model is simulated, the planning is not: 256 experts of 61 layers with Adam's moments (the
sizes of a 671B model) over ``ep`` of up to 256 ranks, the rest of the ranks replicas. In each layer
other experts change places: eight pairs, or all of them. A rank places the experts in the program,
binds it, and plans what it sends, receives and keeps. The price in bytes is of the parameters in
bfloat16 and moments in float32.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import common

from ckptd.lay.agree import agreed
from ckptd.lay.bind import bind_sizes
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.reshard.layouts import read_text
from ckptd.reshard.live.placement import ExpertPlacement, place_experts
from ckptd.reshard.live.plan import Roles, make_plan

RANKS = (16, 64, 256, 1024, 4096, 16384)
LAYERS, EXPERTS, INNER, HIDDEN = 61, 256, 2048, 7168
ITEMSIZES = {"": 2, "m": 4, "s": 4}
PROGRAM = f"""
let e = {EXPERTS}
let g = {2 * INNER}
let f = {INNER}
let h = {HIDDEN}
let l = {LAYERS}
space moe {{
  L{{l}}.X{{e}}.w1[g h]
  L{{l}}.X{{e}}.w2[h f]
  follow m=exp_avg, s=exp_avg_sq
}}
layout train of moe on M {{
  layers.{{l}}.experts.w1 = L{{l}}.X.w1[e@ep g h]
  layers.{{l}}.experts.w2 = L{{l}}.X.w2[e@ep h f]
}}
"""


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of one rank, and what it moves."""

    ranks: int
    moved: str
    placing_s: float
    planning_s: float
    peers: int
    bytes_in: int
    bytes_out: int


def placement(ep: int, pairs: int | None, seed: int) -> ExpertPlacement:
    """Draw for each layer which experts change places."""
    rng = random.Random(seed)
    out = {}
    for layer in range(LAYERS):
        homes = [k * ep // EXPERTS for k in range(EXPERTS)]
        if pairs is None:
            rng.shuffle(homes)
        for _ in range(pairs or 0):
            a, b = rng.randrange(EXPERTS), rng.randrange(EXPERTS)
            homes[a], homes[b] = homes[b], homes[a]
        out[layer] = [[e for e, c in enumerate(homes) if c == rank] for rank in range(ep)]
    return out


def measure(ranks: int, pairs: int | None) -> Row:
    """Plan the part of one rank."""
    ep = min(EXPERTS, ranks)
    rank = ranks // 3
    program = read_text(f"mesh M = dp:{ranks // ep} ep:{ep}\n{PROGRAM}", "bench")
    old = bind_sizes(program.resolve(), {})
    began = time.process_time()
    new = bind_sizes(place_experts(program, placement(ep, pairs, 1), count=EXPERTS).resolve(), {})
    placed = time.process_time()
    everyone = tuple(range(ranks))
    plan = make_plan(
        Transfers(Composition(*agreed(old, new))),
        Roles(everyone, everyone),
        rank,
        states=frozenset(ITEMSIZES),
        sources={},
        targets={},
    )
    ended = time.process_time()
    sizes = [
        sum(
            s.segment.numel * ITEMSIZES[s.tensor.state]
            for p, f in side.items()
            if p != rank
            for s in f
        )
        for side in (plan.incoming, plan.outgoing)
    ]
    peers = len((plan.incoming.keys() | plan.outgoing.keys()) - {rank})
    moved = "all" if pairs is None else f"{2 * pairs} a layer"
    return Row(ranks, moved, placed - began, ended - placed, peers, *sizes)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds over ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for moved in dict.fromkeys(r.moved for r in rows):
        mine = [r for r in rows if r.moved == moved]
        seconds = [r.placing_s + r.planning_s for r in mine]
        axes.plot([r.ranks for r in mine], seconds, "o-", label=f"moved: {moved}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU seconds of one rank")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure, print a table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = [measure(n, pairs) for pairs in (8, None) for n in options.ranks]
    head = ("ranks", "moved", "place s", "plan s", "peers", "GiB in", "GiB out")
    body = [
        [
            r.ranks,
            r.moved,
            r.placing_s,
            r.planning_s,
            r.peers,
            r.bytes_in / 2**30,
            r.bytes_out / 2**30,
        ]
        for r in rows
    ]
    text = common.table(head, body)
    if tuple(options.ranks) == RANKS:
        common.publish("experts", "python bench/experts.py", text, [asdict(r) for r in rows])
    else:
        print(text)
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
