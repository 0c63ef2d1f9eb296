"""Steps of a job on ranks placed by names alone, by the network, and by measured links as well.

    python bench/placement.py

What places is real: `ckptd.elastic.policy.choose`. The rest is a model. Nodes of eight GPUs stand
in racks of 16, racks in blocks of eight; names say nothing of it, as where a cloud gives them. A
node sends 400 GB/s within its rack; a rack's uplink carries half of what its nodes send, a block's
an eighth. Tensor parallelism stays in a node. The replicas of a stage add up gradients in a ring,
in the order of ranks: each of its edges that leaves a rack or block takes its share of that uplink.
Stages pass on activations. A step is the time of computing, a constant, with both added, nothing
overlapped but that a later stage has its gradients sooner, by one backward pass each. "blind" are
the same nodes, that do not say where they are; "domains" say so; "measured" say how fast their
links are as well. Slow links have a quarter of the speed.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import common
import msgspec

from ckptd.elastic.linkspeed import paces
from ckptd.elastic.placement import NodeSlot, SlotPosition
from ckptd.elastic.policy import JobSpec, Shape, choose

RANKS = (16, 64, 256, 1024, 4096, 16384)
GPUS, RACK, BLOCK = 8, 16, 8
NODE_BPS = 400e9
SLOW_BPS = 100e9
CASES = ("alike", "one node in 25 slow", "one rack in 8 slow")
NAMES = ("blind", "domains", "measured")
UPLINKS = (1 / 8, 1 / 2)
"""Of a block and of a rack, by what its nodes send together."""
COMPUTE_S = 2.0
MICROBATCHES = 16
"""Of a step, by node."""
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


def speeds(slots: Sequence[NodeSlot], case: str, seed: int) -> dict[str, float]:
    """Return the bytes per second that each node sends."""
    names = list(dict.fromkeys(slot.node for slot in slots))
    found = dict.fromkeys(names, NODE_BPS)
    if case == CASES[1]:
        slow = random.Random(seed).sample(names, max(1, len(names) // 25))
    elif case == CASES[2]:
        racks = [names[k : k + RACK] for k in range(0, len(names), RACK)]
        some = racks[7::8] or [names[-max(1, len(names) // 8) :]]
        slow = [name for rack in some for name in rack]
    else:
        slow = []
    return found | dict.fromkeys(slow, SLOW_BPS)


def step_s(
    places: Sequence[SlotPosition], where: Mapping[str, tuple[str, ...]], sent: Mapping[str, float]
) -> float:
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
        rates = [sent[a[-1]], sent[b[-1]]]
        rates += [
            NODE_BPS * UPLINKS[d - 1] * size[a[:d]] / max(leaving[a[:d]], 1)
            for d in (1, 2)
            if a[:d] != b[:d]
        ]
        return nbytes / min(rates)

    adding, passing = 0.0, 0.0
    sooner = COMPUTE_S / ((MICROBATCHES + 1) * len(stages) - 1) * 2 / 3
    for stage, ring in stages.items():
        nbytes = 2 * LAYER_BYTES * (len(ring) - 1) / len(ring)
        edges = zip(ring, ring[1:] + ring[:1], strict=True)
        longest = max(seconds(a, b, nbytes) for a, b in edges)
        adding = max(adding, longest - stage * sooner)
    rows = [stages[stage] for stage in sorted(stages)]
    for one, other in pairwise(rows):
        pairs = zip(one, other, strict=True)
        passing = max([passing, *(seconds(a, b, PASSED_BYTES) for a, b in pairs)])
    return COMPUTE_S + adding + passing


def measure(ranks: int, seed: int, case: str) -> dict[str, Any]:
    """Return seconds of a step at the start, and after one node in fifty was lost and replaced."""
    nodes = ranks // GPUS
    pipeline = max(1, min(16, nodes // 4))
    spares = max(1, nodes // 20)
    job = JobSpec(
        microbatches=MICROBATCHES * nodes, planned=Shape(pipeline, nodes // pipeline, GPUS)
    )
    slots = cluster(nodes, spares, seed)
    where = {slot.node: slot.domains for slot in slots}
    sent = speeds(slots, case, seed)
    pace = dict(zip(sent, paces((0, int(rate)) for rate in sent.values()), strict=True))
    found: dict[str, Any] = {"ranks": ranks}
    for name in NAMES:
        here = slots
        if name == "blind":
            here = [msgspec.structs.replace(slot, domains=()) for slot in slots]
        elif name == "measured":
            here = [msgspec.structs.replace(slot, pace=pace[slot.node]) for slot in slots]
        choice = choose(job, here)
        found[f"{name} s"] = step_s(choice.places, where, sent)
        lost = random.Random(seed).sample(sorted(where), max(1, nodes // 50))
        for node in lost:  # one after the other, as they fail
            held = [msgspec.structs.replace(p.slot, held=p.at) for p in choice.places]
            held += [msgspec.structs.replace(slot, held=None) for slot in choice.parked]
            here = [slot for slot in held if slot.node != node]
            choice = choose(job, here, choice.shape)
        found[f"{name}, after losses s"] = step_s(choice.places, where, sent)
    return found


def draw(found: Mapping[str, list[dict[str, Any]]]) -> None:
    """Draw what the table says."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    figure.patch.set_facecolor("white")  # also where the page is dark
    FigureCanvasSVG(figure)
    for axes, (case, rows) in zip(
        figure.subplots(1, len(found), sharey=True), found.items(), strict=True
    ):
        for name, colour in zip(NAMES, ("#d55e00", "#0072b2", "#009e73"), strict=True):
            for words, line in (("", "-"), (", after losses", "--")):
                points = [(row["ranks"], row[f"{name}{words} s"]) for row in rows]
                axes.plot(
                    *zip(*points, strict=True), line, marker=".", color=colour, label=name + words
                )
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.set_xlabel("ranks")
        axes.set_title(f"links: {case}", fontsize=9)
    figure.axes[0].set_ylabel("step by the model (s)")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measure all sizes, five clusters each, and publish medians."""
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for case, rows in found.items():
        for ranks in RANKS:
            runs = [measure(ranks, seed, case) for seed in range(5 if ranks < 16384 else 1)]
            rows.append({k: statistics.median(run[k] for run in runs) for k in runs[0]})
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    draw(found)
    text = "Seconds of a step by the model, medians of five clusters; of 16,384 ranks one.\n\n"
    head = ["links", *found[CASES[0]][0]]
    cells = [[case, *row.values()] for case, rows in found.items() for row in rows]
    text += common.table(head, cells)
    common.publish("placement", "python bench/placement.py", text, found)


if __name__ == "__main__":
    main()
