"""From what the ranks reported to a manifest: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ckptd.engine.elsewhere import refer
from ckptd.engine.job import Part, Save
from ckptd.engine.structure import SavePlan
from ckptd.errors import SaveError
from ckptd.format.manifest import (
    FileEntry,
    GridEntry,
    Manifest,
    ObjectEntry,
    Runs3,
    TensorEntry,
    WitnessEntry,
)
from ckptd.format.names import file_key
from ckptd.layout.grid import Axis, Grid
from ckptd.layout.owners import Owners

__all__ = ["assemble", "check_plans", "differing_groups", "merge_objects"]


def check_plans(parts: Sequence[Part], plan: SavePlan) -> None:
    """Every rank must have written by the same plan.

    Raises
    ------
    SaveError
        kind ``structure``: names the ranks whose state has another structure.
    """
    others = [p.rank for p in parts if p.plan != plan.digest]
    if others:
        raise SaveError(
            "ranks disagree on the structure of the state",
            kind="structure",
            wanted=f"plan {plan.digest} of rank 0",
            found=f"another plan on ranks {others[:16]}{' ...' if len(others) > 16 else ''}",
            hint="the state must gain and lose tensors on every rank at the same save; the next "
            "save plans afresh",
        )


def differing_groups(parts: Sequence[Part]) -> dict[str, dict[str, list[int]]]:
    """Return the replica groups whose ranks do not agree: group, then digest, then ranks."""
    seen: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        for group, digest in part.replicas:
            seen.setdefault(group, {}).setdefault(digest, []).append(part.rank)
    return {g: by_digest for g, by_digest in seen.items() if len(by_digest) > 1}


def assemble(
    plan: SavePlan, parts: Sequence[Part], save: Save, witness: WitnessEntry | None
) -> Manifest:
    """Return the manifest of an attempt of which every rank has reported.

    Deterministic: two committers with the same parts make the same bytes.

    Raises
    ------
    SaveError
        kind ``replicas-differ``: groups of ranks hold different values of one object. kind
        ``structure``: a part refers to chunks that it cannot mean.
    """
    grids = {g: i for i, g in enumerate(plan.grids)}
    owners: dict[Runs3, int] = {o: i for i, o in enumerate(plan.owners)}
    tensors = list(plan.tensors)
    files = [_file(p, save.folder) for p in parts]
    if any(p.refers for p in parts):
        files += refer(plan, parts, save.folder, tensors, owners)
    objects = merge_objects(parts)
    for name, holders in _extras(parts):
        grid = GridEntry.of(Grid((Axis.from_sizes([n for _, n, _ in holders]),)))
        ranks = np.array([rank for rank, _, _ in holders])
        base = int(ranks.min())
        runs = Owners.from_array(ranks - base).runs
        entry = TensorEntry(
            name,
            "uint8",
            (sum(n for _, n, _ in holders),),
            grids.setdefault(grid, len(grids)),
            owners.setdefault(runs, len(owners)),
            base,
        )
        tensors.append(entry)
        objects[name] = ObjectEntry(name, tensor=name, per_rank=holders[0][2])
    return Manifest(
        step=save.step,
        generation=save.generation,
        attempt=save.attempt,
        world_size=plan.world,
        files=tuple(files),
        grids=tuple(grids),
        owners=tuple(owners),
        tensors=tuple(tensors),
        objects=tuple(objects[n] for n in sorted(objects)),
        meshes=plan.meshes,
        witness=witness,
        metadata=parts[0].metadata,
        lay=plan.lay,
    )


def _file(part: Part, folder: str) -> FileEntry:
    return FileEntry(
        file_key(folder, part.rank), part.rank, part.data_start, part.data_bytes, part.index
    )


def _extras(parts: Sequence[Part]) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Return chunks of private size: per-rank objects by name, then large replicated ones.

    This is also their order inside each file (`ckptd.engine.job.Save.extra` has it already).
    """
    found: dict[tuple[bool, str], list[tuple[int, int, str]]] = {}
    for part in parts:
        for extra in part.extra:
            key = (not extra.on_change, extra.name)
            found.setdefault(key, []).append((part.rank, extra.nbytes, extra.on_change))
    return [(name, found[late, name]) for late, name in sorted(found)]


def merge_objects(parts: Sequence[Part]) -> dict[str, ObjectEntry]:
    """Join the objects that group leaders report; pipeline stages share some of them."""
    merged: dict[str, ObjectEntry] = {}
    for part in parts:
        for entry in part.objects:
            seen = merged.get(entry.name)
            if seen is None or seen == entry:
                merged[entry.name] = entry
            elif entry.kind == seen.kind == "groups":
                value = _join_groups(seen.value, entry.value)
                merged[entry.name] = msgspec.structs.replace(seen, value=value)
            else:
                raise SaveError(
                    "ranks hold different values of a replicated object",
                    kind="replicas-differ",
                    where=entry.name,
                    found=f"{str(seen.value)[:80]} and, on rank {part.rank}, "
                    f"{str(entry.value)[:80]}",
                    hint="declare it per rank: ckptd.PerRank(value, on_change=...)",
                )
    return merged


def _join_groups(a: list[Any], b: list[Any]) -> list[Any]:
    """Unite optimizer groups of several stages: those with equal hyperparameters become one."""
    out: list[dict[str, Any]] = [dict(group) for group in a]
    for group in b:
        rest = {k: v for k, v in group.items() if k != "params"}
        for seen in out:
            if {k: v for k, v in seen.items() if k != "params"} == rest:
                seen["params"] = sorted({*seen["params"], *group["params"]})
                break
        else:
            out.append(dict(group))
    return out
