"""From what the ranks reported to a manifest: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    extras = _extras(parts)
    _check_per_rank(extras, plan, objects)
    for name, holders in extras:
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


def _check_per_rank(
    extras: Sequence[tuple[str, list[tuple[int, int, str]]]],
    plan: SavePlan,
    objects: Mapping[str, ObjectEntry],
) -> None:
    """Raise where a value of each rank's own is something else on another rank.

    A checkpoint could hold both, and a load would have to pick.
    """
    tensors = {n for t in plan.tensors for n in (t.name, *t.aliases)}
    for name, holders in extras:
        rank, _, declared = holders[0]
        other = next((h for h in holders if h[2] != declared), None)
        if other is not None:
            found = f"{_declared(other[2])} on rank {other[0]}"
        elif name in tensors:
            found = "a tensor on another rank"
        elif declared and (name in objects or name in plan.homes):
            found = "a value that ranks have in common on another rank"
        else:
            continue
        raise SaveError(
            "a name has two meanings",
            kind="structure",
            where=name,
            wanted=f"{_declared(declared)} on every rank that has it, as on rank {rank}",
            found=found,
            hint="declare it in the same way on every rank",
        )


def _declared(on_change: str) -> str:
    return f'PerRank(on_change="{on_change}")' if on_change else "a value in common"


def merge_objects(parts: Sequence[Part]) -> dict[str, ObjectEntry]:
    """Join the objects that group leaders report; pipeline stages share some of them."""
    merged: dict[str, ObjectEntry] = {}
    groups: dict[str, _Groups] = {}
    for part in parts:
        for entry in part.objects:
            seen = merged.setdefault(entry.name, entry)
            if seen.kind == entry.kind == "groups":
                if seen is not entry and entry.name not in groups and seen != entry:
                    groups[entry.name] = _Groups(entry.name, seen.value)
                if entry.name in groups:
                    groups[entry.name].add(entry.value, part.rank)
            elif seen != entry:
                raise SaveError(
                    "ranks hold different values of a replicated object",
                    kind="replicas-differ",
                    where=entry.name,
                    found=f"{str(seen.value)[:80]} and, on rank {part.rank}, "
                    f"{str(entry.value)[:80]}",
                    hint="declare it per rank: ckptd.PerRank(value, on_change=...)",
                )
    for name, joined in groups.items():
        merged[name] = msgspec.structs.replace(merged[name], value=joined.value())
    return merged


class _Groups:
    """Optimizer groups of several stages: those with equal hyperparameters become one."""

    def __init__(self, name: str, groups: list[Any]) -> None:
        self._name = name
        self._groups: list[tuple[dict[str, Any], set[str]]] = []
        self._numbers: dict[bytes, list[int]] = {}
        self._of: dict[str, int] = {}
        for group in groups:
            # As they stand: one rank's groups may be alike and yet be several.
            self._numbers.setdefault(_hyper(group), []).append(len(self._groups))
            self._put(group)

    def _put(self, group: dict[str, Any]) -> None:
        self._of.update(dict.fromkeys(group["params"], len(self._groups)))
        self._groups.append((group, set(group["params"])))

    def add(self, groups: list[Any], rank: int) -> None:
        """Add the groups of another rank.

        Raises
        ------
        SaveError
            kind ``replicas-differ``: it has a parameter under other hyperparameters.
        """
        for group in groups:
            same = self._numbers.setdefault(_hyper(group), [])
            for name in group["params"]:
                if name in self._of and self._of[name] not in same:
                    raise self._differ(name, self._groups[self._of[name]][0], group, rank)
            if same:
                self._groups[same[0]][1].update(n for n in group["params"] if n not in self._of)
                self._of.update({n: same[0] for n in group["params"] if n not in self._of})
            else:
                same.append(len(self._groups))
                self._put(group)

    def value(self) -> list[dict[str, Any]]:
        """Return all groups."""
        return [{**group, "params": sorted(names)} for group, names in self._groups]

    def _differ(
        self, param: str, one: dict[str, Any], other: dict[str, Any], rank: int
    ) -> SaveError:
        keys = sorted({*one, *other} - {"params"})
        keys = [k for k in keys if one.get(k) != other.get(k)]
        return SaveError(
            "ranks have different hyperparameters for one parameter",
            kind="replicas-differ",
            where=f"{self._name}: {param}",
            wanted=", ".join(f"{k}={str(one.get(k))[:40]}" for k in keys[:4]),
            found=", ".join(f"{k}={str(other.get(k))[:40]}" for k in keys[:4]) + f" on rank {rank}",
            hint="build the optimizer and its scheduler alike on every rank",
        )


def _hyper(group: dict[str, Any]) -> bytes:
    return msgspec.json.encode({k: v for k, v in group.items() if k != "params"}, order="sorted")
