"""Tensors on the meta device: given memory for a load, and their identity kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ckptd.errors import UsageError
from ckptd.train.distributed import is_dtensor, is_fsdp2
from ckptd.train.leaves import Leaves, Pending, SavedNames, TensorLeaf

__all__ = ["check_buffers", "materialise", "target_device"]


def target_device(tensor: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return where memory for `tensor` belongs: `device` when it is on the meta device.

    Without `device`: the device of a DTensor's mesh, else the current CUDA device, else the CPU.
    """
    if not tensor.is_meta:
        return tensor.device
    if device is not None:
        return device
    if is_dtensor(tensor):
        kind = tensor.device_mesh.device_type
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def materialise(
    leaves: Leaves, saved: SavedNames, modules: Iterable[nn.Module], device: torch.device | None
) -> None:
    """Give memory to the meta leaves that the checkpoint has; the state follows on apply.

    Parameters keep their identity (and so their ties and the optimizers that hold them): on
    apply the contents of the Python objects are swapped. Leaves that the checkpoint lacks stay
    on the meta device.

    Raises
    ------
    UsageError
        kind ``meta``: somebody holds a weak reference to the tensor, which forbids the swap.
    """
    held = {
        id(parameter.sharded_param): parameter
        for module in modules
        for inner in module.modules()
        for parameter in _fsdp_parameters(inner)
    }
    swaps = []
    for leaf in leaves.tensors.values():
        names = (leaf.name, *leaf.aliases)
        if leaf.origin.is_meta and any(saved.tensor(n) is not None for n in names):
            change = partial(_swap, leaf, _make(leaf, device), held.get(id(leaf.origin)))
            swaps.append(Pending(leaf.name, change))
    leaves.pending[:0] = swaps


def check_buffers(module: nn.Module, where: str) -> None:
    """Raise `UsageError` (kind ``meta-buffer``) for meta buffers that no checkpoint holds."""
    names = [
        f"{prefix}.{key}" if prefix else key
        for prefix, inner in module.named_modules()
        for key in sorted(inner._non_persistent_buffers_set)
        if (buffer := inner._buffers.get(key)) is not None and buffer.is_meta
    ]
    if names:
        raise UsageError(
            "non-persistent buffers are on the meta device, and no checkpoint holds them",
            kind="meta-buffer",
            where=where,
            found=", ".join(names[:16]) + (f", ... {len(names)} in all" if names[16:] else ""),
            hint="compute them on a real device before the load",
        )


def _make(leaf: TensorLeaf, device: torch.device | None) -> torch.Tensor:
    if weakref.getweakrefs(leaf.origin):
        raise UsageError(
            "a meta tensor cannot be replaced while a weak reference to it exists",
            kind="meta",
            where=leaf.name,
            hint="call module.to_empty(device=...) before the load",
        )
    live = leaf.origin.detach()
    new = torch.empty_like(live, device=target_device(live, device))
    if isinstance(leaf.origin, nn.Parameter):
        new = nn.Parameter(new, requires_grad=leaf.origin.requires_grad)
    leaf.tensor = new.detach()
    return new


def _swap(leaf: TensorLeaf, new: torch.Tensor, held: Any) -> None:
    try:
        torch.utils.swap_tensors(leaf.origin, new)
    except RuntimeError as error:
        raise UsageError(
            "a meta tensor cannot be replaced",
            kind="meta",
            where=leaf.name,
            found=str(error)[:300],
            hint="drop graphs and views of it, or call module.to_empty(device=...) before the load",
        ) from error

    if held is not None:
        # FSDP2 keeps the local memory by itself, and padded.
        with torch.no_grad():
            held.reset_sharded_param()


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    if is_fsdp2(module):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        groups = several if several is not None else [state._fsdp_param_group]
        for group in groups:
            yield from group.fsdp_params if group is not None else ()
