"""torch dtypes by the format's names, tensors as raw bytes; tests for DTensor, FSDP, subclasses.

In it: types that this PyTorch lacks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.base.grids.grid import is_unshared, reach_of
from ckptd.base.torch.device import accelerator, kind_of
from ckptd.errors import UsageError
from ckptd.types import DTYPES, dtype_of

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no subclasses: nothing is inside of them."""


def is_async(value: object) -> TypeGuard[AsyncCollectiveTensor]:
    """Tell whether a tensor represents what a collective still computes."""
    return is_of(value, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor."""
    return type(value) not in PLAIN and is_of(value, "torch.distributed.tensor", "DTensor")


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor, or what this rank has of a DTensor, is a wrapper subclass."""
    if type(tensor) in PLAIN:
        return False
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
    plain = type(local) in PLAIN or local.layout is not torch.strided or local.is_nested
    wraps: bool = not plain and is_traceable_wrapper_subclass(local)
    return wraps and not is_dtensor(local) and not is_async(local)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Tell whether a subclass has no memory, though it has values: what it wraps is not known."""
    if type(tensor) in PLAIN or tensor.is_meta or not tensor.numel() or is_async(tensor):
        return False
    try:
        return not tensor.untyped_storage().data_ptr() and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        return True


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Tell whether a module is FSDP1's wrapper."""
    return is_of(value, "torch.distributed.fsdp", "FullyShardedDataParallel")


def is_fsdp2(value: object) -> TypeGuard[FSDPModule]:
    """Tell whether FSDP2's ``fully_shard`` was called on a module."""
    return is_of(value, "torch.distributed.fsdp", "FSDPModule")


def fsdp2_is_loaded() -> bool:
    """Tell whether a module may be one of FSDP2: one look in place of one at each module."""
    return "torch.distributed.fsdp" in sys.modules


def is_of(value: object, module: str, name: str) -> bool:
    """Tell whether a value is of a class whose module may not be imported."""
    # While another thread imports the module, the class may not be there, nor any of its kind.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types that values of so many bytes are copied as, bit by bit."""
DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


def dtype_name(dtype: torch.dtype, where: str | None = None) -> str:
    """Return the format's name of a torch dtype.

    Raises
    ------
    UsageError
        The format has no such type (quantized and sub-byte integer types).
    """
    if (name := DTYPE_NAMES.get(dtype)) is None:
        raise UsageError(
            "a tensor of this dtype cannot be saved",
            where=where,
            wanted=f"one of {', '.join(DTYPES)}",
            found=str(dtype).removeprefix("torch."),
            hint="save the tensor that it was made from, or view it as uint8",
        )
    return name


def torch_dtype(name: str, where: str | None = None) -> torch.dtype:
    """Return the torch dtype called `name` in a manifest.

    Raises
    ------
    CorruptError
        The format has no such name.
    UsageError
        The installed torch lacks the type.
    """
    dtype = getattr(torch, dtype_of(name, where).name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            "this PyTorch lacks a dtype of the checkpoint",
            where=where,
            wanted=name,
            found=f"torch {torch.__version__}",
            hint="pip install --upgrade torch",
        )
    return dtype


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: of a DTensor its part, else the tensor.

    What a collective still computes is waited for: before that it has no memory of its own.
    """
    if type(tensor) in PLAIN:
        return tensor
    part = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part.trigger_wait() if type(part) not in PLAIN and is_async(part) else part


def has_own_places(tensor: torch.Tensor) -> bool:
    """Return whether each element of a tensor has a place of its own in memory."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not tensor.numel() or is_unshared(shape, strides):
        return True
    reach = reach_of(shape, strides)
    if reach < tensor.numel():
        return False
    places = torch.zeros(reach, dtype=torch.bool)
    places.as_strided(shape, strides).fill_(True)
    return int(places.sum()) == tensor.numel()


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor's memory, from its first element to its last, gaps too."""
    reach = reach_of(tuple(tensor.shape), tensor.stride()) if tensor.numel() else 0
    return tensor.as_strided((reach,), (1,), tensor.storage_offset())


def as_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a contiguous CPU tensor of any dtype, as a flat view of its memory.

    Parameters
    ----------
    tensor
        Not a DTensor; 0-d and zero-sized tensors are fine.

    Returns
    -------
    numpy.ndarray
        uint8, shape ``(numel * itemsize,)``. No copy: writing to it writes to the tensor. It is
        of use until the tensor's storage is resized.

    Raises
    ------
    UsageError
        Not on the CPU, not contiguous, a lazily conjugated or negated view, or a subclass that
        wraps tensors and has no memory of its own.
    """
    plain = local_tensor(tensor).detach()
    lazy = plain.is_conj() or plain.is_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous() or lazy:
        raise UsageError(
            "this tensor's memory does not hold its bytes in order",
            wanted="a contiguous CPU tensor",
            found=f"{plain.device}, strides {plain.stride()}{', lazy view' if lazy else ''}",
        )
    nbytes = plain.numel() * plain.element_size()
    if not nbytes:
        return np.empty(0, np.uint8)
    if not plain.data_ptr():
        raise UsageError(
            "this tensor has no memory",
            wanted="a plain tensor, or a DTensor",
            found=f"{type(plain).__name__}, {nbytes} bytes",
            hint="save the tensors that it wraps, or register its type with ckptd.register(...)",
        )
    return bytes_at(plain.data_ptr(), nbytes, plain)


def bytes_at(
    address: int, nbytes: int, keep: object = None
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a flat view of memory of this process, which keeps nothing but `keep`.

    Not all that lies between its ends need be there: what is not must not be touched.
    """
    return np.asarray(_Memory(keep, address, nbytes)) if nbytes else np.empty(0, np.uint8)


class _Memory:
    """Memory for numpy, which keeps the tensor that has it.

    `torch.Tensor.numpy` would forbid for ever that the storage is resized, and so break programs
    that free storages and fill them again.
    """

    def __init__(self, keep: object, address: int, nbytes: int) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def target_device(tensor: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return where memory for `tensor` belongs: `device` when it is on the meta device.

    Without `device`: the device of a DTensor's mesh, else the current device of the accelerator,
    else the CPU.
    """
    if not tensor.is_meta:
        return tensor.device
    if device is not None:
        return device
    kind = kind_of(tensor.device_mesh.device_type) if is_dtensor(tensor) else accelerator()
    if kind is None or not kind.is_available:
        return torch.device("cpu")
    return kind.current_device()


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
    wholes: Sequence[torch.Tensor], together: int = 512
) -> tuple[list[list[Any]], list[torch.Tensor], list[torch.UntypedStorage]]:
    """Return where tensors lie and how that is read; this rank's parts; their storages.

    Columns are of so many `together` as the core's own cache has at a time.
    Two that are equal are the same view of the same memory, as long as a weak reference keeps the
    identity of the storage that was there at first from others.
    """
    plain = {*map(type, wholes)}.issubset(PLAIN)
    # Of many tensors the way to a method costs as much as the method.
    of = partial(getattr, torch.Tensor) if plain else methodcaller
    locals = [*wholes] if plain else [local_tensor(t) for t in wholes]
    memory, storages = list[list[Any]](), list[torch.UntypedStorage]()
    for first in range(0, len(wholes), together):
        some, parts = (all[first : first + together] for all in (wholes, locals))
        storages += map(of("untyped_storage"), parts)
        meshed, dtypes = () if plain else some, [local.dtype for local in parts]
        columns = [
            # The storage says the device. Memory that is empty (an uneven shard) has no address.
            array("Q", [storage._cdata for storage in storages[first:]]),
            array("Q", [*map(of("data_ptr"), parts)]),
            [*map(of("size"), parts)],
            [*map(of("stride"), parts)],
            dtypes,
            [*map(type, some)],  # which a program can set in place
            # The bits of a view change what is read and not where.
            bytes(map(of("is_conj"), parts if any(d.is_complex for d in {*dtypes}) else ())),
            bytes(map(of("is_neg"), parts)),
            # The mesh is an object that others may be equal to: ranks agree on its identity alone.
            [(id(w.device_mesh), w.placements, w.shape) for w in meshed if is_dtensor(w)],
        ]
        memory.append(columns)
    return memory, locals, storages
