"""Whether something is of one of torch.distributed's classes, without importing what makes them.

DTensor and FSDP take 0.7 s to import, more than everything else that a process needs which loads a
checkpoint. What is of such a class was made by a program that has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

__all__ = ["is_async", "is_dtensor", "is_fsdp1", "is_fsdp2"]


def is_async(value: object) -> TypeGuard[AsyncCollectiveTensor]:
    """Tell whether a tensor stands for what a collective still computes."""
    return _is(value, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Tell whether a module is FSDP1's wrapper."""
    return _is(value, "torch.distributed.fsdp", "FullyShardedDataParallel")


def is_fsdp2(value: object) -> TypeGuard[FSDPModule]:
    """Tell whether FSDP2's ``fully_shard`` was called on a module."""
    return _is(value, "torch.distributed.fsdp", "FSDPModule")


def _is(value: object, module: str, name: str) -> bool:
    # While another thread imports the module, the class may not be there, nor any of its kind.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
