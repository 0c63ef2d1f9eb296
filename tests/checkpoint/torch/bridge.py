"""A checkpoint in memory: what flatten and restore do, without engine and store between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.leaves import Leaves, SavedNames
from ckptd.checkpoint.torch.state.restore import apply_objects, prepare


@dataclass
class Taken:
    tensors: dict[str, torch.Tensor]
    names: SavedNames
    objects: dict[str, str]
    per_rank: dict[str, str]

    def value(self, name: str) -> Any:
        return codec.decode(json.loads((self.objects | self.per_rank)[name]), name)


def take(state: Mapping[str, Any]) -> Taken:
    """Save: copies of the tensors, text of everything else."""
    leaves = flatten(state)
    return Taken(
        {n: leaf.tensor.clone() for n, leaf in leaves.tensors.items()},
        SavedNames(
            {n: (leaf.dtype, leaf.shape) for n, leaf in leaves.tensors.items()},
            {n: leaf.kind for n, leaf in leaves.objects.items()},
            dict(leaves.aliases),
            {n: leaf.raw for n, leaf in leaves.objects.items() if leaf.kind == "groups"},
        ),
        {n: json.dumps(leaf.raw) for n, leaf in leaves.objects.items()},
        {n: json.dumps(leaf.raw) for n, leaf in leaves.per_rank.items()},
    )


def give(
    taken: Taken,
    state: Mapping[str, Any],
    *,
    device: str | None = None,
    read: Callable[[str], Callable[[int], Any]] | None = None,
    saved_world: int = 1,
    rank: int = 0,
    world: int = 1,
) -> Leaves:
    """Load strictly: every name on either side has its partner."""
    leaves = prepare(state, taken.names, device)
    saved = {*taken.tensors, *taken.names.aliases}
    live = {*leaves.tensors, *leaves.aliases}
    assert saved == live, f"only saved {saved - live}, only live {live - saved}"
    assert set(taken.objects) == set(leaves.objects), set(taken.objects) ^ set(leaves.objects)
    assert set(taken.per_rank) == set(leaves.per_rank)
    for name, leaf in leaves.tensors.items():
        source = taken.tensors[taken.names.aliases.get(name, name)]
        assert (leaf.dtype, leaf.shape) == taken.names.tensor(name), name
        with torch.no_grad():
            leaf.tensor.copy_(source)
    objects = {n: taken.value(n) for n in leaves.objects}
    reader = read or (lambda name: lambda r: taken.value(name))
    chosen = {
        n: leaf.choose(reader(n), saved_world=saved_world, rank=rank, world=world)
        for n, leaf in leaves.per_rank.items()
    }
    apply_objects(leaves, objects, chosen)
    return leaves


def assert_same(a: Taken, b: Taken) -> None:
    """Bit for bit the same."""
    assert list(a.tensors) == list(b.tensors)
    for name, tensor in a.tensors.items():
        assert type(tensor) is type(b.tensors[name]), name
        assert tensor.dtype == b.tensors[name].dtype, name
        assert torch.equal(tensor, b.tensors[name]), name
    assert a.names == b.names
    assert a.objects == b.objects
    assert a.per_rank == b.per_rank
