"""Modules: parameters, persistent buffers and extra state under canonical names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptd.errors import UsageError
from ckptd.format.names import escape_fqn
from ckptd.train.distributed import is_fsdp1, is_fsdp2
from ckptd.train.leaves import Place, TensorKind
from ckptd.train.objects import call_with
from ckptd.train.sink import Sink

__all__ = ["ModuleTensor", "add_module", "module_tensors", "reshard"]

_EXTRA = "_extra_state"
_TRANSPARENT = {
    "_orig_mod",  # torch.compile
    "_checkpoint_wrapped_module",  # activation checkpointing
    "_fsdp_wrapped_module",
}


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A parameter or persistent buffer: its canonical FQN and where the module keeps it."""

    fqn: str
    kind: TensorKind
    tensor: torch.Tensor
    slots: dict[str, Any]
    key: str


def reshard(module: nn.Module) -> None:
    """Register the sharded parameters of FSDP2 modules, as ``module.state_dict()`` does.

    After a forward without a backward the unsharded ones are registered: other objects than
    those the optimizer holds, and whole on every rank.
    """
    for inner in module.modules():
        if is_fsdp2(inner):
            inner.reshard()


def module_tensors(module: nn.Module, place: Place) -> Iterator[ModuleTensor]:
    """Yield parameters and persistent buffers in order; tied ones under each of their names.

    Raises
    ------
    UsageError
        Kinds ``fsdp1`` and ``module-state`` for modules whose state is not in their parameters.
    """
    for prefix, inner in _named_modules(module, "", place):
        _check_module(inner, prefix, place)
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                fqn = escape_fqn(prefix + key)
                yield ModuleTensor(fqn, "param", parameter, inner._parameters, key)
        for key, buffer in inner._buffers.items():
            if buffer is not None and key not in inner._non_persistent_buffers_set:
                fqn = escape_fqn(prefix + key)
                yield ModuleTensor(fqn, "buffer", buffer, inner._buffers, key)


def add_module(sink: Sink, place: Place, module: nn.Module) -> None:
    """Add the leaves of `module`. Changes nothing, but see `reshard`."""
    reshard(module)
    for entry in module_tensors(module, place):
        assign = partial(_set_slot, entry.slots, entry.key)
        at = place.child(entry.fqn, f".{entry.fqn}")
        sink.add_tensor(at, entry.tensor, entry.kind, assign)
    for prefix, inner in _named_modules(module, "", place):
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            fqn = escape_fqn(prefix) + _EXTRA
            put = partial(call_with, inner.set_extra_state, place.child(fqn, "").name)
            value = inner.get_extra_state() if sink.saved is None else None
            sink.add_object(place.child(fqn, f".{fqn}"), value, put)


def _set_slot(slots: dict[str, Any], key: str, new: torch.Tensor) -> None:
    slots[key] = nn.Parameter(new) if isinstance(slots[key], nn.Parameter) else new


def _named_modules(
    module: nn.Module, prefix: str, place: Place, around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield canonical prefixes (empty, or ending in a dot) and modules, shared ones each time."""
    if any(module is m for m in around):
        raise UsageError(
            "a module contains itself", kind="cycle", where=place.child(prefix, "").name
        )
    yield prefix, module
    for key, child in module._modules.items():
        if child is None:
            continue
        # DDP's `module` is an ordinary attribute name elsewhere, so only the wrapper's own goes.
        wrapped = key == "module" and isinstance(module, DistributedDataParallel | DataParallel)
        inner = prefix if wrapped or key in _TRANSPARENT else f"{prefix}{key}."
        yield from _named_modules(child, inner, place, (*around, module))


def _check_module(module: nn.Module, prefix: str, place: Place) -> None:
    where = place.child(prefix.removesuffix("."), "").name
    if is_fsdp1(module):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) flattens parameters, and their names and shapes go",
            kind="fsdp1",
            where=where,
            hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return
    known = {*module._parameters, *module._buffers, _EXTRA}
    kept: OrderedDict[str, Any] = OrderedDict()
    module._save_to_state_dict(kept, "", True)
    if unknown := sorted(set(kept) - known):
        raise UsageError(
            "a module keeps state outside its parameters and buffers",
            kind="module-state",
            where=where,
            found=f"{type(module).__name__}: {', '.join(unknown[:8])}",
            hint="give it get_extra_state() and set_extra_state(), or put "
            "module.state_dict() into the state",
        )
