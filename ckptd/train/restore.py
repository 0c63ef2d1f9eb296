"""Restoring: leaves for a load, and the values put back into the state.

The order of a load: `prepare` the leaves, compare them with the checkpoint, fill
``leaf.tensor`` of each tensor, `apply_objects`. Until then the state is unchanged but for the
tensors that were filled: made tensors are not attached yet, meta tensors still are meta.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ckptd.errors import MismatchError
from ckptd.train.flatten import collect
from ckptd.train.leaves import Leaves, PerRankLeaf, SavedNames
from ckptd.train.meta import check_buffers, materialise
from ckptd.train.perrank import Dropped, Reseed
from ckptd.train.sink import Sink
from ckptd.train.walk import walk

__all__ = ["apply_objects", "check_objects", "prepare"]


def prepare(
    state: Mapping[str, Any], saved: SavedNames, device: torch.device | str | None = None
) -> Leaves:
    """Return the leaves of `state` for a load; changes nothing.

    Optimizer state that was saved and is not there yet, tensors of objects that were saved and
    are not there yet, and memory for tensors on the meta device are made: they are the `tensor`
    of their leaves, and become part of the state in `apply_objects`.

    Parameters
    ----------
    state
        As for `ckptd.train.flatten.flatten`.
    saved
        What this load is going to read.
    device
        Where tensors on the meta device get their memory; see `ckptd.train.meta.target_device`.

    Raises
    ------
    UsageError
        As `flatten`; also kinds ``meta`` and ``meta-buffer``.
    """
    target = None if device is None else torch.device(device)
    sink = Sink(saved, target)
    sites = walk(state, saved)
    modules = [(s.place, s.value) for s in sites if isinstance(s.value, nn.Module)]
    for place, module in modules:
        check_buffers(module, place.name)
    collect(sink, sites)
    materialise(sink.leaves, saved, [m for _, m in modules], target)
    return sink.leaves


def apply_objects(
    leaves: Leaves,
    values: Mapping[str, Any],
    per_rank: Mapping[str, Any] | None = None,
    *,
    tensors: Collection[str] | None = None,
) -> None:
    """Put everything into the state that is not the content of a tensor.

    Parameters
    ----------
    leaves
        What `prepare` returned, with the tensors filled.
    values
        Decoded values by object name. Objects that are not named keep their live value.
    per_rank
        By name: the decoded value of this rank, or what `PerRankLeaf.choose` gave.
    tensors
        Names of the leaves that were filled; None when all were, but for those of optimizers
        whose groups are not among `values`. Memory that was made for others does not enter the
        state: an optimizer must not find moments that nobody wrote.

    Raises
    ------
    MismatchError
        A value has no leaf or does not fit; nothing was changed.
    UsageError
        kind ``load-state-dict``: an object's ``load_state_dict`` or ``set_extra_state`` raised;
        kind ``meta``: a meta tensor could not be replaced. The state is then partly loaded.
    """
    chosen = per_rank or {}
    check_objects(leaves, values, chosen)
    filled = leaves.tensors.keys() if tensors is None else set(tensors)
    for pending in leaves.pending:
        loaded = pending.name in filled or pending.name in values
        if loaded and (tensors is not None or not pending.unit or pending.unit in values):
            pending.change()
    leaves.pending.clear()
    for tensor in leaves.tensors.values():
        if tensor.assign is not None and tensor.name in filled:
            tensor.assign(tensor.tensor)
    # Groups first: a scheduler's load_state_dict may look at its optimizer.
    objects = [leaf for name, leaf in leaves.objects.items() if name in values]
    for leaf in sorted(objects, key=lambda o: o.kind != "groups"):
        leaf.put(values[leaf.name])
    # Random streams last: what came before may have drawn from them.
    own = [leaf for name, leaf in leaves.per_rank.items() if name in chosen]
    for value in sorted(own, key=lambda v: v.random):
        _put_per_rank(value, chosen[value.name])


def check_objects(leaves: Leaves, values: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
    """Raise `MismatchError` when `apply_objects` would; changes nothing."""
    unknown = [n for n in values if n not in leaves.objects]
    unknown += [n for n in per_rank if n not in leaves.per_rank]
    if unknown:
        raise MismatchError(
            "values without a place in the state",
            found=", ".join(unknown[:16])
            + (f", ... {len(unknown)} in all" if unknown[16:] else ""),
        )
    for name, value in values.items():
        check = leaves.objects[name].check
        if check is not None:
            check(value)
    for name, value in per_rank.items():
        if isinstance(value, Reseed) and leaves.per_rank[name].reseed is None:
            raise MismatchError("a value cannot be reseeded", kind="per-rank", where=name)


def _put_per_rank(leaf: PerRankLeaf, value: Any) -> None:
    if isinstance(value, Reseed):
        if leaf.reseed is not None:
            leaf.reseed(value.seed)
    elif not isinstance(value, Dropped):
        leaf.put(value)
