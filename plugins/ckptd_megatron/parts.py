"""The boxes of tensors that one rank holds, and values that are no tensors."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)

import ckptd
from ckptd.base.grids import flat_regions
from ckptd.errors import UsageError
from ckptd.types import Box

__all__ = ["Part", "is_shard", "objects_of", "parts_of", "storable"]

_SHARD = re.compile(r"/shard_[0-9.]*_[0-9.]*")
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and the part of a local tensor that is in it.

    Attributes
    ----------
    name
        The tensor's name: Megatron's key.
    shape
        Of the whole tensor.
    values
        A view of the shape of `box`.
    padded
        The tensor may have another shape in a checkpoint: its end is padding.
    main
        It is the one that Megatron would save, of those that ranks hold of the same box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    padded: bool
    main: bool = True

    def within(self, shape: tuple[int, ...]) -> Part | None:
        """Return what of the part is within a tensor of this shape."""
        box = self.box.intersect(Box.whole(shape))
        if box is None or box == self.box:
            return self if box or not self.box.numel else None
        values = self.values
        for dim, (offset, first, size) in enumerate(
            zip(box.offset, self.box.offset, box.shape, strict=True)
        ):
            values = values.narrow(dim, offset - first, size)
        return replace(self, box=box, values=values)


def parts_of(sharded: Iterable[ShardedTensor]) -> Iterator[Part]:
    """Yield the boxes that local tensors are: one each, or several where one is a flat range."""
    for tensor in sharded:
        shape, padded = tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch)
        lead = tensor.prepend_axis_num
        cell = Box(tuple(tensor.global_offset), (1,) * lead + tuple(tensor.local_shape))
        flat = getattr(tensor, "flattened_range", None)  # not in Megatron-core since 0.16
        if flat is None:
            found = [(cell, tensor.data[(None,) * lead])]
        else:
            regions = flat_regions(cell, flat.start, flat.stop)
            found = [
                (r.box, tensor.data.narrow(0, r.start, r.box.numel).view(r.box.shape))
                for r in regions
            ]
        for box, values in found:
            # Buckets of an optimizer's buffer are followed by padding that belongs to nothing.
            main = is_main_replica(tensor.replica_id)
            part = Part(tensor.key, shape, box, values, padded, main).within(shape)
            if part is not None:
                yield part


def objects_of(sharded: Any) -> Iterator[ShardedObject]:
    """Yield the objects of a state that each rank has of its own."""
    return (v for v in nested_values(sharded) if isinstance(v, ShardedObject))


def is_shard(name: str) -> bool:
    """Return whether an object of a checkpoint is a part of a `ShardedObject`."""
    return _SHARD.search(name) is not None


# --- values that are no tensors -------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """A value that stands in a checkpoint for one of a type that has no place in it."""

    kind: str
    value: Any


def storable(value: Any, where: str) -> Any:
    """Return a value as a checkpoint holds it: tensors and what else Megatron has among its own.

    Raises
    ------
    UsageError
        kind ``unsavable``: a tensor of more than 256 MB stands where no tensors are saved.
    """
    if isinstance(value, dict):
        return {k: storable(v, f"{where}.{k}") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(storable(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, torch.Tensor):
        if value.nbytes > _MOST_BYTES:
            raise UsageError(
                "a tensor is mixed with non-tensor values",
                kind="unsavable",
                where=where,
                wanted=f"at most {_MOST_BYTES} bytes",
                found=f"{value.nbytes} bytes",
                hint="let the optimizer save as distrib_optim_sharding_type 'fully_reshardable'",
            )
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _Kept("tensor", [_name(value.dtype), list(value.shape), flat])
    if isinstance(value, argparse.Namespace):
        return _Kept("namespace", storable(vars(value), where))
    if isinstance(value, torch.dtype):
        return _Kept("dtype", _name(value))
    if isinstance(value, torch.Size):
        return _Kept("size", list(value))
    if isinstance(value, io.BytesIO):
        return _Kept("bytes", value.getvalue())
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"'unknown dtype: {name!r}")
    return found


def _made(raw: list[Any]) -> Any:
    kind, value = raw
    match kind:
        case "tensor":
            name, shape, flat = value
            flat = np.ascontiguousarray(flat, dtype=np.uint8)
            return torch.from_numpy(flat).view(_dtype(name)).reshape(shape)
        case "namespace":
            return argparse.Namespace(**value)
        case "dtype":
            return _dtype(value)
        case "size":
            return torch.Size(value)
        case "bytes":
            return io.BytesIO(value)
    raise ValueError(f"'unknown kind of value: {kind!r}")


ckptd.register(
    _Kept, name="ckptd_megatron.Kept", encode=lambda kept: [kept.kind, kept.value], decode=_made
)
