"""`Sink`: where leaves are collected; names stay unique and shared memory is found here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.errors import UsageError
from ckptd.format.invariants import MAX_DIMS
from ckptd.train.state.leaves import (
    Follower,
    Leaves,
    ObjectKind,
    ObjectLeaf,
    OnChange,
    OwnKind,
    PerRankLeaf,
    Place,
    SavedNames,
    TensorKind,
    TensorLeaf,
    check_name,
    encode,
)
from ckptd.train.state.tensors import dtype_name, is_dtensor, local_tensor

__all__ = ["Sink", "memory_key"]


class Sink:
    """Collects the leaves of one state.

    Parameters
    ----------
    saved
        What a load is going to read; None when the leaves are for a save.
    device
        Where a load puts tensors that are on the meta device.

    Attributes
    ----------
    live
        The live tensors of all leaves and of all their aliases.
    """

    def __init__(self, saved: SavedNames | None = None, device: torch.device | None = None) -> None:
        self.leaves = Leaves()
        self.saved = saved
        self.device = device
        self._paths: dict[str, str] = {}
        self._by_memory: dict[Hashable, TensorLeaf] = {}
        self.live: list[torch.Tensor] = []

    @staticmethod
    def again(leaves: Leaves, paths: dict[str, str]) -> Sink:
        """Return one that has leaves already, under names that stand at `paths`."""
        sink = Sink()
        sink.leaves = leaves
        sink._paths = paths
        return sink

    def path(self, name: str) -> str:
        """Return where a name stands in the program."""
        return self._paths[name]

    def add_tensor(
        self,
        place: Place,
        tensor: torch.Tensor,
        kind: TensorKind,
        assign: Callable[[torch.Tensor], None] | None = None,
        own: OwnKind = "",
    ) -> TensorLeaf:
        """Add a tensor, or an alias when its memory is a leaf already.

        `assign` puts another tensor in its place; it is used only where the memory of this one
        cannot be filled.

        Raises
        ------
        UsageError
            The name is taken or illegal, or the tensor has no plain dense memory.
        """
        self._claim(place)
        check_tensor(place, tensor, loading=self.saved is not None)
        self.live.append(tensor)
        key = memory_key(tensor)
        first = self._by_memory.get(key)
        if first is not None:
            first.aliases += (place.name,)
            self.leaves.aliases[place.name] = first.name
            return first
        live = tensor.detach()
        filled = live if is_fillable(live) else _contiguous_copy(live)
        leaf = TensorLeaf(
            name=place.name,
            tensor=filled,
            section=place.section,
            kind=kind,
            path=place.path,
            origin=tensor,
            assign=None if filled is live else assign or partial(_copy_into, live),
            own=own,
        )
        self._by_memory[key] = leaf
        self.leaves.tensors[place.name] = leaf
        return leaf

    def add_object(
        self,
        place: Place,
        value: Any,
        put: Callable[[Any], None],
        *,
        kind: ObjectKind = "value",
        check: Callable[[Any], None] | None = None,
    ) -> ObjectLeaf:
        """Add a replicated value. Raises `UsageError` when it cannot be encoded or named."""
        self._claim(place)
        raw = encode(value, place.name) if self.saved is None else None
        leaf = ObjectLeaf(place.name, raw, place.section, kind, place.path, put, check)
        self.leaves.objects[place.name] = leaf
        return leaf

    def add_per_rank(
        self,
        place: Place,
        read: Callable[[], Any],
        put: Callable[[Any], None],
        *,
        on_change: OnChange,
        reduce: Callable[[list[Any]], Any] | None = None,
        reseed: Callable[[int], None] | None = None,
        random: bool = False,
        follower: Follower | None = None,
    ) -> PerRankLeaf:
        """Add a per-rank value; `read` gives it.

        Raises `UsageError` when it cannot be encoded or named.
        """
        self._claim(place)
        raw = encode(read(), place.name) if self.saved is None else None
        leaf = PerRankLeaf(
            place.name,
            raw,
            place.section,
            place.path,
            on_change,
            reduce,
            put,
            reseed,
            random,
            follower,
        )
        self.leaves.per_rank[place.name] = leaf
        return leaf

    def _claim(self, place: Place) -> None:
        check_name(place)
        if place.name in self._paths:
            raise UsageError(
                "two values of the state have one name",
                kind="duplicate-name",
                where=place.name,
                found=f"{self._paths[place.name]} and {place.path}",
                hint="give one of them another key",
            )
        self._paths[place.name] = place.path


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for two tensors exactly when they are one view of one memory."""
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        return (memory_key(tensor._local_tensor), tuple(tensor.shape), mesh, placements)
    # The storage object, and not its address: memory that is empty here (an uneven shard) or on
    # the meta device has no address, and ranks must agree on what is an alias.
    storage = tensor.untyped_storage()._cdata
    form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return (storage, form, tensor.is_conj(), tensor.is_neg())


def is_fillable(tensor: torch.Tensor) -> bool:
    """Return whether writing elements one by one into this memory gives the tensor."""
    local = local_tensor(tensor)
    if local.is_conj() or local.is_neg():
        return False
    strides = local.stride()
    return 0 not in strides or not any(
        s == 0 and n > 1 for s, n in zip(strides, local.shape, strict=True)
    )


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _copy_into(live: torch.Tensor, new: torch.Tensor) -> None:
    live.copy_(new)


def check_tensor(place: Place, tensor: torch.Tensor, *, loading: bool) -> None:
    """Raise `UsageError` unless `tensor` has dense memory and a dtype of the format."""
    if is_lazy(tensor):
        raise _bad(
            place,
            "a lazy parameter has no shape yet",
            "UninitializedParameter",
            "run one forward pass before the first save or load",
        )
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if (
        (wrapper and not is_dtensor(tensor))
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
    ):
        raise _bad(
            place,
            "only dense tensors and DTensors can be saved",
            f"{type(tensor).__name__}, layout {tensor.layout}",
            "save the dense tensors that it is made of",
        )
    if tensor.dim() > MAX_DIMS:
        raise _bad(
            place,
            f"a tensor of more than {MAX_DIMS} dimensions",
            f"{tensor.dim()} dimensions",
            "reshape it",
        )
    dtype_name(tensor.dtype, place.name)
    if tensor.is_meta and not loading:
        raise _bad(
            place,
            "a tensor on the meta device has no data to save",
            "device meta",
            "load a checkpoint or initialise the module first",
        )


def _bad(place: Place, message: str, found: str, hint: str) -> UsageError:
    return UsageError(
        f"{message}: {place.path}", kind="unsavable", where=place.name, found=found, hint=hint
    )
