"""Cost of comparing replicas at 16 to 16,384 simulated ranks of a 405B job.

    python bench/replicas.py

The ranks are simulated, the code is the real one: finding who holds what (every rank, once a
structure), the digests that a rank reports (every save), and comparing those of all ranks (one
rank, every save). Stages: sixteen, each with names of its own and some in common. One more: rank 0
has one name that the others have not. Experts: sixteen stages times up to 64 sets of experts, so
that 1,024 structures meet.
"""

from __future__ import annotations

import time

import common
import planning

from ckptd.base.digest import digest_hex
from ckptd.checkpoint.format.manifest import TensorEntry
from ckptd.checkpoint.save.commit import differing_groups
from ckptd.checkpoint.save.messages import RankPart
from ckptd.checkpoint.save.structure import (
    RankGroup,
    ReplicaHolders,
    Structure,
    TensorCut,
    build_plan,
)

COMMON = 200


def names() -> list[str]:
    """Return the tensors of a 405B model with Adam moments."""
    return [f"{kind}.{t.name}" for t in planning.model() for kind in ("model", "m", "v")]


def structure(held: list[str]) -> Structure:
    """Return the structure of ranks that hold these tensors and some values."""
    tensors = ((TensorEntry(n, "float32", (8,), 0, 0), TensorCut()) for n in held)
    return Structure.of(tensors, tuple(f"value{i}" for i in range(20)))


def cases(ranks: int) -> dict[str, list[RankGroup]]:
    """Return the structures of each case."""
    every = names()
    stages = min(16, ranks)
    shared, own = every[:COMMON], every[COMMON:]
    by_stage, by_expert = [], []
    for stage in range(stages):
        held = [*shared, *own[stage::stages]]
        members = range(stage * ranks // stages, (stage + 1) * ranks // stages)
        by_stage.append(RankGroup(structure(held), tuple(members)))
        sets = min(64, len(members))
        for expert in range(sets):
            more = [f"experts.{stage}.{expert}.{i}" for i in range(24)]
            group = RankGroup(structure([*held, *more]), tuple(members[expert::sets]))
            by_expert.append(group)
    alike = structure(every)
    more = structure([*every, "best_val_loss"])
    return {
        "stages": by_stage,
        "one more": [RankGroup(more, (0,)), RankGroup(alike, tuple(range(1, ranks)))],
        "experts": by_expert,
    }


def keys(groups: list[RankGroup], rank: int) -> set[str]:
    """Return the keys that a rank reports a digest for."""
    holders = ReplicaHolders(groups, rank)
    own = next(g.structure for g in groups if rank in g.ranks)
    found = [holders.tensor(t.name) for t in own.tensors]
    found += [holders.object(n) for n in own.objects]
    return {s.key for s in found if not s.alone}


def measure(ranks: int) -> list[list[object]]:
    """Return a row for each case."""
    rows: list[list[object]] = []
    for case, groups in cases(ranks).items():
        began = time.perf_counter()
        build_plan(groups, ranks)
        planned = time.perf_counter()
        reported = keys(groups, ranks - 1)
        found = time.perf_counter()
        # Ranks of one structure report the same: what the others would say is not computed again.
        parts = []
        for group in groups[:64]:
            said = tuple((key, digest_hex(key.encode())) for key in keys(groups, group.ranks[0]))
            parts += [RankPart(rank, "", replicas=said) for rank in group.ranks]
        while len(parts) < ranks:
            parts.append(RankPart(len(parts), "", replicas=parts[len(parts) % 64].replicas))
        start = time.perf_counter()
        differing = differing_groups(parts)
        compared = time.perf_counter()
        assert not differing
        sizes = [ranks, case, len(groups), sum(len(g.structure.tensors) for g in groups)]
        times = [planned - began, found - planned, compared - start]
        rows.append([*sizes, len(reported), *(f"{t:.4f}" for t in times)])
    return rows


def main() -> None:
    """Measure and publish."""
    rows = [row for ranks in (16, 128, 1024, 4096, 16384) for row in measure(ranks)]
    head = ["ranks", "case", "structures", "names in them", "digests a rank reports"]
    head += ["plan s (once)", "find holders s (once)", "compare all ranks s (a save)"]
    text = "Seconds of one process, caches empty.\n\n" + common.table(head, rows)
    common.publish(
        "replicas",
        "python bench/replicas.py",
        text,
        [dict(zip(head, r, strict=True)) for r in rows],
    )


if __name__ == "__main__":
    main()
