"""The leaves of the last state, for as long as nothing in it has another place, memory or form.

Finding the leaves of a state of thousands of tensors takes tens of milliseconds, in which training
stands still; seeing that they are the same takes a few. What may differ from save to save without
anybody noticing (plain values, hyperparameters, random streams) is read anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptd.train.dtypes import local_tensor
from ckptd.train.leaves import Leaves
from ckptd.train.modules import reshard
from ckptd.train.walk import Site

__all__ = ["Recall", "is_heavy"]


def is_heavy(site: Site) -> bool:
    """Whether a site gives tensors: these are recalled, all others are read anew."""
    return isinstance(site.value, nn.Module | torch.optim.Optimizer | torch.Tensor)


@dataclass(frozen=True, slots=True)
class _Guards:
    """What must still hold: values of containers, their sizes, and the memory of leaves."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    entries: tuple[tuple[Any, Any, Any], ...]
    sizes: tuple[tuple[Any, int], ...]
    groups: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...]
    shapes: list[torch.Size]
    memory: tuple[list[int], list[tuple[int, ...]]]

    def hold(self, sites: Sequence[Site]) -> bool:
        heavy = [s for s in sites if is_heavy(s)]
        return (
            self.names == tuple(s.place.name for s in sites)
            and len(heavy) == len(self.values)
            and all(s.value is v for s, v in zip(heavy, self.values, strict=True))
            and all(len(container) == n for container, n in self.sizes)
            and all(container.get(key) is value for container, key, value in self.entries)
            and self.groups == tuple(_groups(heavy))
            and [t.shape for t in self.tensors] == self.shapes
            and _memory(self.tensors) == self.memory
        )


class Recall:
    """Remembers one state."""

    def __init__(self) -> None:
        self._known: tuple[_Guards, Leaves, dict[str, str]] | None = None

    def leaves(self, sites: Sequence[Site]) -> tuple[Leaves, dict[str, str]] | None:
        """Return the tensors that the heavy sites gave the last time, if they would again.

        Returns
        -------
        leaves
            Tensors, aliases and optimizers; objects are still to be added.
        paths
            Path by name, of tensors and aliases.
        """
        if self._known is None:
            return None
        for site in sites:
            if isinstance(site.value, nn.Module):
                reshard(site.value)
        guards, leaves, paths = self._known
        if not guards.hold(sites):
            self._known = None
            return None
        again = Leaves(
            tensors=dict(leaves.tensors),
            aliases=dict(leaves.aliases),
            optimizers=list(leaves.optimizers),
            known=leaves.known,
        )
        return again, dict(paths)

    def keep(self, sites: Sequence[Site], leaves: Leaves, path: Callable[[str], str]) -> None:
        """Remember what a state gave; `path` tells where a name stands in the program."""
        self._known = None
        if any(_rereads(s.value) for s in sites):
            return
        found = leaves.tensors.values()
        heavy = [s for s in sites if is_heavy(s)]
        own = {id(s.value) for s in heavy}
        for leaf in found:
            # A copy that was made because the live memory cannot be filled would grow old, and
            # tensors inside of values are read with them.
            inside = leaf.kind == "ndarray" or (
                leaf.kind == "tensor" and id(leaf.origin) not in own
            )
            if leaf.assign is not None or inside:
                return
        entries, sizes = [], []
        for container in _containers(heavy):
            sizes.append((container, len(container)))
            if isinstance(container, dict):
                entries += [(container, k, v) for k, v in container.items()]
        tensors = tuple(x.origin for x in found)
        guards = _Guards(
            names=tuple(s.place.name for s in sites),
            values=tuple(s.value for s in heavy),
            entries=tuple(entries),
            sizes=tuple(sizes),
            groups=tuple(_groups(heavy)),
            tensors=tensors,
            shapes=[t.shape for t in tensors],
            memory=_memory(tensors),
        )
        names = {n for leaf in found for n in (leaf.name, *leaf.aliases)}
        leaves.known = object()
        self._known = guards, leaves, {n: path(n) for n in names}


def _rereads(value: Any) -> bool:
    """Whether a heavy site gives values besides its tensors that only itself can tell."""
    if isinstance(value, nn.Module):
        plain = nn.Module.get_extra_state
        return any(type(m).get_extra_state is not plain for m in value.modules())
    if isinstance(value, torch.optim.Optimizer):
        return any(
            not isinstance(v, torch.Tensor) for s in value.state.values() for v in s.values()
        )
    return False


def _containers(heavy: Sequence[Site]) -> Iterator[Any]:
    for site in heavy:
        value = site.value
        if isinstance(value, nn.Module):
            for module in value.modules():
                yield from (module._modules, module._parameters, module._buffers)
                yield module._non_persistent_buffers_set
        elif isinstance(value, torch.optim.Optimizer):
            yield value.state
            yield from value.state.values()


def _groups(heavy: Sequence[Site]) -> Iterator[tuple[int, ...]]:
    for site in heavy:
        if isinstance(site.value, torch.optim.Optimizer):
            for group in site.value.param_groups:
                yield tuple(map(id, group["params"]))


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    own = [local_tensor(t) for t in tensors]
    return [x.data_ptr() for x in own], [x.stride() for x in own]
