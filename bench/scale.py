"""What a 405B job with Adam moments costs at 16 to 16,384 simulated ranks.

    python bench/scale.py

The ranks are simulated, the code is the real one: planning a save (every rank does it once per
structure), joining the parts of all ranks into a manifest (one rank, every save), the manifest's
size as stored, and what every loading rank does: decode, check, plan its reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import planning

from ckptd.base.grids import sharding
from ckptd.checkpoint.format.invariants import check_manifest
from ckptd.checkpoint.format.manifest import (
    Manifest,
    MeshEntry,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.save.commit import assemble
from ckptd.checkpoint.save.messages import RankPart, SaveRequest
from ckptd.checkpoint.save.structure import (
    RankGroup,
    RankPlan,
    SavePlan,
    Structure,
    TensorCut,
    build_plan,
)


def groups(layout: planning.Layout) -> list[RankGroup]:
    """Return the distinct structures of a job: one a pipeline stage."""
    tensors = planning.model()
    size = int(np.prod(layout.mesh_shape))
    out = []
    for stage in range(layout.stages):
        names = ("dp",) if len(layout.mesh_shape) == 1 else ("dp", "tp")
        mesh = MeshEntry(names, layout.mesh_shape, ((stage * size, 1, size),))
        held = []
        for t in tensors:
            if layout.stage(t) != stage:
                continue
            held.append((TensorEntry(f"optim.{t.name}.step", "float32", (), 0, 0), TensorCut()))
            cut = TensorCut(mesh, layout.placements(t))
            held += [
                (TensorEntry(f"{state}.{t.name}", "float32", t.shape, 0, 0), cut)
                for state in ("model", "exp_avg", "exp_avg_sq")
            ]
        ranks = tuple(range(stage * size, (stage + 1) * size))
        out.append(RankGroup(Structure.of(held), ranks))
    return out


def parts(plan: SavePlan, world: int) -> list[RankPart]:
    """Return what the ranks would report; sizes as the ranks would find them, each for itself."""
    totals = np.zeros(world, dtype=np.int64)
    weights: dict[tuple[int, int, int, int], int] = {}
    for t, d in zip(plan.tensors, plan.filemap.dtypes, strict=True):
        key = (t.grid, t.owners, t.base, d.itemsize)
        weights[key] = weights.get(key, 0) + d.itemsize
    for (grid, owners, base, _), itemsizes in weights.items():
        cells = plan.filemap.grids[grid]
        numels = np.array([1], dtype=np.int64)
        for axis in cells.axes:
            sizes = np.repeat([s for s, _ in axis.runs], [c for _, c in axis.runs])
            numels = np.multiply.outer(numels, sizes).reshape(-1)
        np.add.at(totals, plan.filemap.owners[owners].array(base), numels * itemsizes)
    return [
        RankPart(r, plan.digest, 1 << 16, int(n), f"{(r + 1) * 0x9E3779B97F4A7C15:032x}"[-32:])
        for r, n in enumerate(totals)
    ]


class Clock:
    """Collects named durations."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        value = work()
        self.seconds[name] = time.perf_counter() - start
        return value


def wants(manifest: Manifest, target: planning.Layout, rank: int) -> list[Want]:
    """Return what one rank of another layout asks for; the buffers are one dummy."""
    numbers = {t.name: i for i, t in enumerate(manifest.tensors)}
    stage, position = divmod(rank, int(np.prod(target.mesh_shape)))
    coordinate = tuple(int(c) for c in np.unravel_index(position, target.mesh_shape))
    dummy = np.zeros(1, dtype=np.uint8)
    out = []
    for t in planning.model():
        if target.stage(t) != stage:
            continue
        placements = target.placements(t)
        placements = sharding.nested(target.mesh_shape, placements) or placements
        regions = sharding.local_regions(t.shape, target.mesh_shape, placements, coordinate)
        elements = max((r.span[1] for r in regions), default=0)
        target_view = np.lib.stride_tricks.as_strided(dummy, (elements * 4,), (1,))
        out += [
            Want(numbers[f"{s}.{t.name}"], tuple(regions), _claimed(target_view))
            for s in ("model", "exp_avg", "exp_avg_sq")
        ]
    return out


def _claimed(view: Any) -> Any:
    """A buffer that is planned for and never written: untouched pages cost nothing."""
    return np.empty(len(view), dtype=np.uint8)


def measure(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield one row per layout."""
    layouts = planning.layouts(ranks)
    for name, layout in layouts.items():
        planning.forget()
        clock = Clock()
        found = groups(layout)
        plan = clock.run("plan save s", lambda f=found: build_plan(f, ranks))
        clock.run("one rank's file s", lambda p=plan: RankPlan(p, ranks // 2))
        reported = parts(plan, ranks)
        save = SaveRequest(1, 1000, 1, "0001", plan.digest, (), (), {}, None, 60.0)
        manifest = clock.run(
            "join parts s", lambda p=plan, r=reported, s=save: assemble(p, r, s, None)
        )
        file, raw = clock.run("encode s", lambda m=manifest: encode_manifest(m))
        read = clock.run("decode s", lambda r=raw, f=file: decode_manifest(r, f))
        filemap = clock.run("check s", lambda m=read, r=raw: check_manifest(m, "m", len(r)))
        row: dict[str, Any] = {"ranks": ranks, "layout": name, "tensors": len(plan.tensors)}
        row["manifest MB"] = len(raw) / 1e6
        for other, target in layouts.items():
            asked = wants(read, target, ranks // 2)
            clock.run(
                f"plan load onto {other} s",
                lambda m=read, f=filemap, a=asked: read_plan(m, f, a).needed,
            )
        yield row | clock.seconds


def main() -> None:
    rows = [row for ranks in planning.RANKS for row in measure(ranks)]
    head = list(rows[0])
    text = "A 405B model with Adam moments; seconds of one process, caches empty.\n\n"
    body = [[f"{r[k]:.3f}" if isinstance(r[k], float) else r[k] for k in head] for r in rows]
    common.publish("scale", "python bench/scale.py", text + common.table(head, body), rows)


if __name__ == "__main__":
    main()
