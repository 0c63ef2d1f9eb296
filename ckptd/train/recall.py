"""The leaves of the last state, for as long as nothing in it has another place, memory or form.

Finding the leaves of a state of thousands of tensors takes tens of milliseconds, in which training
stands still; seeing that they are the same takes a few. Each time modules and optimizers are asked
afresh what they hold: a container that was looked at once may have been left by its owner since, as
`Optimizer.load_state_dict` leaves its dict of states, and then says nothing of the state. What may
differ from save to save without anybody noticing (plain values, hyperparameters, random streams) is
read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptd.train.distributed import is_dtensor
from ckptd.train.dtypes import local_tensor
from ckptd.train.leaves import Leaves
from ckptd.train.modules import reshard
from ckptd.train.walk import Site

__all__ = ["Recall", "is_heavy"]


def is_heavy(site: Site) -> bool:
    """Whether a site gives tensors: these are recalled, all others are read anew."""
    return isinstance(site.value, nn.Module | torch.optim.Optimizer | torch.Tensor)


@dataclass(slots=True)
class _Look:
    """What heavy sites hold, so that two looks are equal exactly when they give the same leaves.

    Attributes
    ----------
    things
        What must be the very same objects, in order. They are kept alive, so that no id can be
        that of another object.
    facts
        What must be equal, in order.
    rereads
        Whether something is held that only another flattening can tell.
    """

    things: list[Any] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)
    rereads: bool = False

    @staticmethod
    def at(sites: Sequence[Site]) -> _Look:
        """Look at what the heavy ones of `sites` hold now."""
        look = _Look()
        for site in sites:
            look.facts.append(site.place.name)
            if not is_heavy(site):
                continue
            look.things.append(site.value)
            if isinstance(site.value, nn.Module):
                look._module(site.value)
            elif isinstance(site.value, torch.optim.Optimizer):
                look._optimizer(site.value)
        return look

    def same(self, other: _Look) -> bool:
        """Tell whether both saw the same."""
        return self.facts == other.facts and _ids(self.things) == _ids(other.things)

    def _module(self, top: nn.Module) -> None:
        plain = nn.Module
        for module in top.modules():
            kind = type(module)
            self.things += (module, kind)
            for slots in (module._modules, module._parameters, module._buffers):
                self.facts.append(tuple(slots))
                self.things += slots.values()
            if module._buffers:
                self.facts.append(frozenset(module._non_persistent_buffers_set))
            if (
                kind.get_extra_state is not plain.get_extra_state
                or kind._save_to_state_dict is not plain._save_to_state_dict
            ):
                self.rereads = True

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self.facts.append(len(group["params"]))
            self.things += group["params"]
        for parameter, held in optimizer.state.items():
            if not isinstance(held, dict) or not all(map(_is_tensor, held.values())):
                self.rereads = True
                return
            self.things.append(parameter)
            self.facts.append(tuple(held))
            self.things += held.values()


class Recall:
    """Remembers one state."""

    def __init__(self) -> None:
        self._known: tuple[_Look, list[torch.Tensor], list[Any], Leaves, dict[str, str]] | None
        self._known = None

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
        look, tensors, memory, leaves, paths = self._known
        now = _Look.at(sites)
        if now.rereads or not now.same(look) or _memory(tensors) != memory:
            self._known = None
            return None
        again = Leaves(
            tensors=dict(leaves.tensors),
            aliases=dict(leaves.aliases),
            optimizers=list(leaves.optimizers),
            known=leaves.known,
        )
        return again, dict(paths)

    def keep(
        self,
        sites: Sequence[Site],
        leaves: Leaves,
        tensors: Sequence[torch.Tensor],
        path: Callable[[str], str],
    ) -> None:
        """Remember what a state gave.

        Parameters
        ----------
        tensors
            The live tensors of all leaves and of all their aliases: one of two that shared memory
            may get memory of its own.
        path
            Tells where a name stands in the program.
        """
        self._known = None
        look = _Look.at(sites)
        if look.rereads:
            return
        own = {id(s.value) for s in sites if is_heavy(s)}
        for leaf in leaves.tensors.values():
            # A copy that was made because the live memory cannot be filled would grow old, and
            # tensors inside of values are read with them.
            inside = leaf.kind == "ndarray" or (
                leaf.kind == "tensor" and id(leaf.origin) not in own
            )
            if leaf.assign is not None or inside:
                return
        names = {n for leaf in leaves.tensors.values() for n in (leaf.name, *leaf.aliases)}
        leaves.known = object()
        paths = {n: path(n) for n in names}
        self._known = look, list(tensors), _memory(tensors), leaves, paths


def _ids(things: Iterable[Any]) -> list[int]:
    return list(map(id, things))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return where tensors lie and how their memory is read.

    Two that are equal are the same view of the same memory, as long as the memory that was there at
    first is kept alive.
    """
    found: list[Any] = []
    for tensor in tensors:
        local = local_tensor(tensor)
        if local is not tensor and is_dtensor(tensor):
            # The mesh is an object that others may be equal to: ranks agree on its identity alone.
            found += (id(tensor.device_mesh), tensor.placements, tensor.shape)
        at = local.data_ptr()
        found += (at, local.shape, local.stride(), local.dtype, local.device)
        # Bits of a view, which change what is read and not where.
        found += (local.is_conj(), local.is_neg())
        if not at:  # nothing here (an empty shard): what it shares is said by its storage alone
            found.append(local.untyped_storage()._cdata)
    return found
