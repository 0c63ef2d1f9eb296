"""Objects of the target: copied, or done to as each declares for another world.

Replicated objects are copied. Optimizer groups are sets of names, and names change with the
layout. Values of ranks are kept where the world stays as large; else `on_change` decides, as it
does in a load: what a live object has to do then (drawing a seed, reducing values) is written down
for it, since no live object is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.errors import CorruptError, MismatchError
from ckptd.format.manifest import ObjectEntry
from ckptd.format.reseed import DROP, REDUCE, RESEED, derive_seed, marked
from ckptd.reshard.source import Stock, StockTensor

__all__ = ["Carried", "Changed", "carry_objects"]

Renames = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A per-rank object of another world: the encoded value of each rank of the target."""

    entry: ObjectEntry
    values: Sequence[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What becomes of the objects.

    Attributes
    ----------
    entries
        Objects of the target, in order; those with a tensor are in one of the next two as well.
    copied
        Tensors of the source that hold encoded objects and are copied as they are.
    changed
        Objects with new values.
    dropped
        Names of those whose values are left out.
    """

    entries: Sequence[ObjectEntry]
    copied: Sequence[tuple[ObjectEntry, StockTensor]]
    changed: Sequence[Changed]
    dropped: Sequence[str]


def carry_objects(
    stock: Stock,
    world: int,
    groups: Mapping[str, tuple[str, Renames]],
    declared: Mapping[str, str],
) -> Carried:
    """Return the target's objects.

    Parameters
    ----------
    stock
        The source.
    world
        Ranks of the target.
    groups
        For the name of a groups object: its new name, and the new names of each parameter.
    declared
        What the target's layout says of objects on a change of world, by name.

    Raises
    ------
    MismatchError
        kind ``per-rank``: an object says that another world is an error. kind ``lay-fit``:
        parameters of different groups become one tensor.
    """
    entries: list[ObjectEntry] = []
    copied: list[tuple[ObjectEntry, StockTensor]] = []
    changed: list[Changed] = []
    dropped: list[str] = []
    for entry in stock.objects:
        if entry.per_rank and world != stock.world:
            on_change = declared.get(entry.name, entry.per_rank)
            if on_change == "drop":
                dropped.append(entry.name)
            values = _changed(stock, entry, on_change, world)
            entry = msgspec.structs.replace(entry, per_rank=on_change)
            changed.append(Changed(entry, values))
        elif entry.tensor:
            copied.append((entry, stock.by_name[entry.tensor]))
        elif entry.kind == "groups" and entry.name in groups:
            name, renames = groups[entry.name]
            value = _renamed(entry, renames)
            entry = msgspec.structs.replace(entry, name=name, value=value)
        entries.append(entry)
    return Carried(entries, copied, changed, dropped)


# --- per-rank values ----------------------------------------------------------------------------


def _changed(stock: Stock, entry: ObjectEntry, on_change: str, world: int) -> list[bytes]:
    """Return what each rank of another world gets."""
    if on_change == "error":
        raise MismatchError(
            "a per-rank value does not fit another number of ranks",
            kind="per-rank",
            where=entry.name,
            wanted=f"{stock.world} ranks, as saved",
            found=f"{world} ranks",
            hint=f"say what becomes of it in the target's layout: obj {entry.name} on-change drop",
        )
    if on_change == "drop":
        return [msgspec.json.encode(marked(DROP, None))] * world
    by_rank = stock.per_rank(entry.name)
    values = [_decoded(by_rank[rank], entry.name) for rank in sorted(by_rank)]
    if on_change == "reduce":
        return [msgspec.json.encode(marked(REDUCE, values))] * world
    texts = {json.dumps(v, sort_keys=True) for v in values}
    if len(texts) == 1 and len(values) > 1:
        # Streams that all ranks shared must not drift apart because a rank more takes part.
        return [msgspec.json.encode(values[0])] * world
    seeds = (derive_seed(values[0], rank, world) for rank in range(world))
    return [msgspec.json.encode(marked(RESEED, seed)) for seed in seeds]


def _decoded(raw: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(
            "an encoded object is not JSON", kind="bad-object", where=where, found=str(error)[:200]
        ) from None


# --- groups -------------------------------------------------------------------------------------


def _renamed(entry: ObjectEntry, renames: Renames) -> list[dict[str, Any]]:
    """Return optimizer groups with the target's names; a name belongs to one group."""
    out: list[dict[str, Any]] = []
    home: dict[str, int] = {}
    for number, group in enumerate(entry.value):
        names: dict[str, None] = {}
        for old in group["params"]:
            # What is no tensor of the checkpoint keeps its name.
            for new in renames.get(old, (old,)):
                names[new] = None
                if home.setdefault(new, number) != number:
                    raise MismatchError(
                        "parameters of different optimizer groups become one tensor",
                        kind="lay-fit",
                        where=f"{entry.name}: {new}",
                        found=f"{old} is in group {number}, another part in group {home[new]}",
                    )
        out.append({**group, "params": sorted(names)})
    return out
