"""Places of many tensors in memory: compared in columns, kept without keeping the tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any

import torch

from ckptd.base.torch.tensors import PLAIN, is_dtensor, local_tensor


class WeakStorages:
    """Weak references to storages, a number each."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        # Modules go before objects do.
        self._free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
        references: list[Any] = [s._weak_ref() for s in storages]
        self._references = array("Q", references)

    def __del__(self) -> None:
        for reference in self._references:
            self._free(reference)


def memory_of(
    tensors: Iterable[torch.Tensor],
) -> tuple[list[Any], list[torch.Tensor], list[torch.UntypedStorage]]:
    """Return where tensors lie and how that is read, in columns; this rank's parts; their storages.

    Two that are equal are the same view of the same memory, as long as a weak reference keeps the
    identity of the storage that was there at first from others.
    """
    wholes = [*tensors]
    locals = [t if type(t) in PLAIN else local_tensor(t) for t in wholes]
    storages = [local.untyped_storage() for local in locals]
    columns = [
        # The storage says the device. Memory that is empty here (an uneven shard) has no address.
        array("Q", [storage._cdata for storage in storages]),
        array("Q", map(methodcaller("data_ptr"), locals)),
        [local.shape for local in locals],
        [local.stride() for local in locals],
        [local.dtype for local in locals],
        # The bits of a view change what is read and not where.
        bytes(map(methodcaller("is_conj"), locals)),
        bytes(map(methodcaller("is_neg"), locals)),
        # The mesh is an object that others may be equal to: ranks agree on its identity alone.
        [
            (at, id(whole.device_mesh), whole.placements, whole.shape)
            for at, (whole, local) in enumerate(zip(wholes, locals, strict=True))
            if local is not whole and is_dtensor(whole)
        ],
    ]
    return columns, locals, storages
