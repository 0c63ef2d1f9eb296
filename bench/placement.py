"""Steps of a job on ranks that are placed by the network, and on ranks placed by names alone.

    python bench/placement.py

What places is real: `ckptd.elastic.policy.choose`. The rest is a model. Nodes of eight GPUs stand
in racks of 16, racks in blocks of eight; names say nothing of it, as where a cloud gives them. A
node sends 400 GB/s within its rack; a rack's uplink carries half of what its nodes send, a block's
an eighth. Tensor parallelism stays in a node. The replicas of a stage add up gradients in a ring,
in the order of ranks: each of its edges that leaves a rack or block takes its share of that uplink.
Stages pass on activations. A step is the time of computing, a constant, with both added, nothing
overlapped. "blind" are the same nodes, that do not say where they are.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import common
import msgspec

from ckptd.elastic.placement import NodeSlot, SlotPosition
from ckptd.elastic.policy import JobSpec, Shape, choose

RANKS = (16, 64, 256, 1024, 4096, 16384)
GPUS, RACK, BLOCK = 8, 16, 8
NODE_BPS = 400e9
UPLINKS = (1 / 8, 1 / 2)
"""Of a block and of a rack, by what its nodes send together."""
COMPUTE_S = 2.0
LAYER_BYTES = 2 * 405e9 / 16
"""Gradients of a stage of a model of 405e9 parameters in bfloat16, in a pipeline of 16."""
PASSED_BYTES = 2 * 8192 * 16384 * 16
"""Activations of 16 micro-batches of 8,192 tokens, 16,384 wide, that a stage sends to the next."""
PICTURE = common.HERE.parent / "docs" / "guide" / "placement.svg"


def cluster(nodes: int, spares: int, seed: int) -> list[NodeSlot]:
    """Return slots of nodes that stand in racks, under names of no order."""
    names = [f"n{k:05}" for k in range(nodes + spares)]
    random.Random(seed).shuffle(names)
    return [
        NodeSlot(name, gpu, None, (f"b{k // (RACK * BLOCK)}", f"r{k // RACK}"))
        for k, name in enumerate(names)
        for gpu in range(GPUS)
    ]


def step_s(places: Sequence[SlotPosition], where: dict[str, tuple[str, ...]]) -> float:
    """Return the seconds of a step by the model."""
    stages: dict[int, list[tuple[str, ...]]] = {}
    for place in places:
        if place.at.tp == 0:
            stages.setdefault(place.at.pp, []).append((*where[place.slot.node], place.slot.node))
    size = Counter(domains[:d] for domains in where.values() for d in (1, 2))
    leaving: Counter[tuple[str, ...]] = Counter()
    for ring in stages.values():
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            leaving.update(a[:d] for d in (1, 2) if a[:d] != b[:d])

    def seconds(a: tuple[str, ...], b: tuple[str, ...], nbytes: float) -> float:
        rates = [NODE_BPS]
        rates += [
            NODE_BPS * UPLINKS[d - 1] * size[a[:d]] / max(leaving[a[:d]], 1)
            for d in (1, 2)
            if a[:d] != b[:d]
        ]
        return nbytes / min(rates)

    adding, passing = 0.0, 0.0
    for ring in stages.values():
        nbytes = 2 * LAYER_BYTES * (len(ring) - 1) / len(ring)
        edges = zip(ring, ring[1:] + ring[:1], strict=True)
        adding = max([adding, *(seconds(a, b, nbytes) for a, b in edges)])
    rows = [stages[stage] for stage in sorted(stages)]
    for one, other in pairwise(rows):
        pairs = zip(one, other, strict=True)
        passing = max([passing, *(seconds(a, b, PASSED_BYTES) for a, b in pairs)])
    return COMPUTE_S + adding + passing


def measure(ranks: int, seed: int) -> dict[str, Any]:
    """Return seconds of a step at the start, and after one node in fifty was lost and replaced."""
    nodes = ranks // GPUS
    pipeline = max(1, min(16, nodes // 4))
    spares = max(1, nodes // 20)
    job = JobSpec(microbatches=16 * nodes, planned=Shape(pipeline, nodes // pipeline, GPUS))
    slots = cluster(nodes, spares, seed)
    where = {slot.node: slot.domains for slot in slots}
    found: dict[str, Any] = {"ranks": ranks}
    for name in ("placed", "blind"):
        here = slots
        if name == "blind":
            here = [msgspec.structs.replace(slot, domains=()) for slot in slots]
        choice = choose(job, here)
        found[f"{name} s"] = step_s(choice.places, where)
        lost = random.Random(seed).sample(sorted(where), max(1, nodes // 50))
        for node in lost:  # one after the other, as they fail
            held = [msgspec.structs.replace(p.slot, held=p.at) for p in choice.places]
            held += [msgspec.structs.replace(slot, held=None) for slot in choice.parked]
            here = [slot for slot in held if slot.node != node]
            choice = choose(job, here, choice.shape)
        found[f"{name}, after losses s"] = step_s(choice.places, where)
    return found


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw what the table says."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.patch.set_facecolor("white")  # also where the page is dark
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for name, colour in (("placed", "#0072b2"), ("blind", "#d55e00")):
        for words, line in (("", "-"), (", after losses", "--")):
            points = [(row["ranks"], row[f"{name}{words} s"]) for row in rows]
            axes.plot(
                *zip(*points, strict=True), line, marker=".", color=colour, label=name + words
            )
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.set_xlabel("ranks")
    axes.set_ylabel("step by the model (s)")
    axes.legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measure all sizes, five clusters each, and publish medians."""
    rows = []
    for ranks in RANKS:
        runs = [measure(ranks, seed) for seed in range(5 if ranks < 16384 else 1)]
        rows.append({k: statistics.median(run[k] for run in runs) for k in runs[0]})
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    draw(rows)
    head = list(rows[0])
    table = common.table(head, [[row[key] for key in head] for row in rows])
    text = "Seconds of a step by the model, medians of five clusters; of 16,384 ranks one.\n\n"
    common.publish("placement", "python bench/placement.py", text + table, rows)


if __name__ == "__main__":
    main()
