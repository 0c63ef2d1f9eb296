"""How long does one rank plan its load of a 405B model, as the number of ranks grows?

    python bench/planning.py
    python bench/planning.py --ranks 16384  # one size, printed only

The model is simulated, the planning is not: for each world size and for each pair of layouts
(FSDP2, and TP x PP x FSDP) the grids and owner maps of all tensors with their Adam moments are
made as a save would ("layout s"), and one rank plans everything it loads: which elements of which
chunks of which files go where. Several ranks are asked and the one that used most CPU is shown.
Caches are empty at the start of each measurement; later loads of the same process are faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import common
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids import dimcut, plan, sharding
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.owners import Owners
from ckptd.base.grids.sharding import Placement

RANKS = (16, 256, 4096, 16384)
STATES = ("", "exp_avg", "exp_avg_sq")

LAYERS, WIDTH, FF, HEADS, KV_HEADS, VOCAB = 126, 16384, 53248, 128, 8, 128256
HEAD = WIDTH // HEADS

COLUMN, ROW, VECTOR = "column", "row", "vector"
"""How tensor parallelism cuts a tensor: rows of the matrix, its columns, or not at all."""


@dataclass(frozen=True)
class Tensor:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    layer: int
    cut: str


def model() -> list[Tensor]:
    """Return the parameters of a 405B Llama."""
    kv = KV_HEADS * HEAD
    in_layer = {
        "attention.wq": ((WIDTH, WIDTH), COLUMN),
        "attention.wk": ((kv, WIDTH), COLUMN),
        "attention.wv": ((kv, WIDTH), COLUMN),
        "attention.wo": ((WIDTH, WIDTH), ROW),
        "feed_forward.w1": ((FF, WIDTH), COLUMN),
        "feed_forward.w3": ((FF, WIDTH), COLUMN),
        "feed_forward.w2": ((WIDTH, FF), ROW),
        "attention_norm": ((WIDTH,), VECTOR),
        "ffn_norm": ((WIDTH,), VECTOR),
    }
    out = [Tensor("tok_embeddings.weight", (VOCAB, WIDTH), 0, COLUMN)]
    for i in range(LAYERS):
        for name, (shape, cut) in in_layer.items():
            out.append(Tensor(f"layers.{i}.{name}.weight", shape, i, cut))
    out.append(Tensor("norm.weight", (WIDTH,), LAYERS - 1, VECTOR))
    out.append(Tensor("output.weight", (VOCAB, WIDTH), LAYERS - 1, COLUMN))
    return out


@dataclass(frozen=True)
class Layout:
    """How a world of ranks holds the model: `stages` meshes of the same shape, one per stage."""

    name: str
    mesh_shape: tuple[int, ...]
    stages: int

    @property
    def ranks(self) -> int:
        return self.stages * int(np.prod(self.mesh_shape))

    def stage(self, tensor: Tensor) -> int:
        return tensor.layer * self.stages // LAYERS

    def mesh_ranks(self, stage: int) -> NDArray[np.int64]:
        return _mesh_ranks(self.mesh_shape, stage)

    def placements(self, tensor: Tensor) -> tuple[Placement, ...]:
        if len(self.mesh_shape) == 1:
            return (("shard", 0),)
        tp = self.mesh_shape[1]
        if tensor.cut == COLUMN:
            return (("strided", 0, tp), ("shard", 0))
        return (("shard", 0), ("shard", 1) if tensor.cut == ROW else "replicate")


@lru_cache
def _mesh_ranks(mesh_shape: tuple[int, ...], stage: int) -> NDArray[np.int64]:
    size = int(np.prod(mesh_shape))
    return (np.arange(size, dtype=np.int64) + stage * size).reshape(mesh_shape)


def layouts(ranks: int) -> dict[str, Layout]:
    """Return the two layouts of a world of `ranks`."""
    tp = 8
    pp = {16: 1, 256: 4}.get(ranks, 16)
    return {
        "fsdp2": Layout("fsdp2", (ranks,), 1),
        "tp.pp.fsdp": Layout("tp.pp.fsdp", (ranks // (tp * pp), tp), pp),
    }


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored: its grid, and the file of each piece."""

    grid: Grid
    owners: Owners
    base: int


def stored(layout: Layout, tensors: list[Tensor]) -> Iterator[tuple[str, Stored]]:
    """Yield the grid and the owner map of every tensor and moment: what a manifest speaks of."""
    maps: dict[tuple[object, ...], Owners] = {}
    for tensor in tensors:
        placements = layout.placements(tensor)
        stage = layout.stage(tensor)
        key = (tensor.shape, placements)
        grid = sharding.sharded_grid(tensor.shape, layout.mesh_shape, placements).grid
        if key not in maps:
            ranks = layout.mesh_ranks(0)
            maps[key] = Owners.from_array(
                sharding.owner_array(tensor.shape, layout.mesh_shape, placements, ranks)
            )
        base = stage * int(np.prod(layout.mesh_shape))
        for state in STATES:
            yield f"{state}.{tensor.name}", Stored(grid, maps[key], base)


@dataclass
class Load:
    """Figures of one rank's plan."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tensors: int = 0
    pieces: int = 0
    blocks: int = 0
    files: int = 0
    elements: int = 0


def plan_rank(source: dict[str, Stored], target: Layout, tensors: list[Tensor], rank: int) -> Load:
    """Plan everything that `rank` of `target` loads."""
    start, cpu_start = time.perf_counter(), time.process_time()
    load = Load()
    files: set[int] = set()
    stage, position = divmod(rank, int(np.prod(target.mesh_shape)))
    coordinate = tuple(int(c) for c in np.unravel_index(position, target.mesh_shape))
    for tensor in tensors:
        if target.stage(tensor) != stage:
            continue
        placements = target.placements(tensor)
        for state in STATES:
            regions = sharding.local_regions(
                tensor.shape, target.mesh_shape, placements, coordinate
            )
            found = source[f"{state}.{tensor.name}"]
            copies = plan.plan(found.grid, regions)
            files.update(found.owners.owner(c.piece, found.base) for c in copies)
            load.tensors += 1
            load.pieces += len(copies)
            load.blocks += sum(len(c.blocks) for c in copies)
            load.elements += sum(c.numel for c in copies)
    load.seconds = time.perf_counter() - start
    load.cpu_seconds = time.process_time() - cpu_start
    load.files = len(files)
    return load


def forget() -> None:
    """Empty every cache, so that a measurement starts from nothing."""
    plan._TEMPLATES.clear()
    for cached in (
        sharding.sharded_grid,
        sharding._cuts,
        sharding._local_regions,
        sharding._mesh_positions,
        dimcut.cut_dim,
    ):
        cached.cache_clear()


def measure(ranks: int) -> Iterator[dict[str, object]]:
    """Yield one row per pair of layouts."""
    tensors = model()
    both = layouts(ranks)
    for source_name, source_layout in both.items():
        forget()
        start = time.perf_counter()
        source = dict(stored(source_layout, tensors))
        layout_seconds = time.perf_counter() - start
        for target_name, target in both.items():
            plan_rank(
                source, target, tensors, 0
            )  # imports and allocator warm, caches emptied below
            loads = []
            for rank in sorted({0, 1, ranks // 2, ranks - 1}):
                forget()
                loads.append(plan_rank(source, target, tensors, rank))
            slowest = max(loads, key=lambda load: load.cpu_seconds)
            yield {
                "ranks": ranks,
                "source": source_name,
                "target": target_name,
                "layout_seconds": round(layout_seconds, 4),
                "plan_seconds": round(slowest.seconds, 4),
                "plan_cpu_seconds": round(slowest.cpu_seconds, 4),
                **{k: v for k, v in asdict(slowest).items() if "seconds" not in k},
            }


COLUMNS = {
    "ranks": "ranks",
    "from": "source",
    "to": "target",
    "layout s": "layout_seconds",
    "plan s": "plan_seconds",
    "plan CPU s": "plan_cpu_seconds",
    "tensors": "tensors",
    "pieces": "pieces",
    "blocks": "blocks",
    "files": "files",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", choices=RANKS, default=RANKS)
    args = parser.parse_args()
    rows = [row for ranks in args.ranks for row in measure(ranks)]
    text = common.table(tuple(COLUMNS), [[row[k] for k in COLUMNS.values()] for row in rows])
    if tuple(args.ranks) == RANKS:
        common.publish("planning", "python bench/planning.py", text, rows)
    else:
        print(text)


if __name__ == "__main__":
    main()
