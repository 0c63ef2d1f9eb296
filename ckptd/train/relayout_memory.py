"""Live tensors as memory that a move takes from, or puts into."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.engine.relayout_memory import ArrayMemory, Memory
from ckptd.errors import UsageError
from ckptd.train.dtypes import as_bytes, dtype_name
from ckptd.types import DType, dtype_of

__all__ = ["TorchMemory", "check_apart", "memory_of"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


def memory_of(tensor: torch.Tensor, name: str) -> Memory:
    """Return a rank-local tensor as memory.

    Raises
    ------
    UsageError
        kind ``not-bytes``: it is not contiguous.
    """
    lazy = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_contiguous() or lazy:
        raise UsageError(
            "a tensor that is not contiguous cannot be moved",
            kind="not-bytes",
            where=name,
            found=f"strides {tensor.stride()} of {tuple(tensor.shape)}",
            hint="move its contiguous() copy, and copy that back",
        )
    dtype = dtype_of(dtype_name(tensor.dtype, name), name)
    if tensor.device.type == "cpu":
        return ArrayMemory(as_bytes(tensor), dtype)
    return TorchMemory(tensor, dtype)


class TorchMemory:
    """A contiguous tensor on any device, as `ckptd.engine.relayout_memory.Memory`."""

    def __init__(self, tensor: torch.Tensor, dtype: DType) -> None:
        self.dtype = dtype
        self.numel = tensor.numel()
        self._flat = tensor.reshape(-1)

    def take(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], out: U8) -> None:
        """See `ckptd.engine.relayout_memory.Memory`."""
        self._host(out).view(shape).copy_(self._part(start, shape, strides))

    def take_at(self, at: I64, out: U8) -> None:
        """See `ckptd.engine.relayout_memory.Memory`."""
        index = torch.from_numpy(at).to(self._flat.device)
        self._host(out).copy_(self._flat[index])

    def put(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], data: U8) -> None:
        """See `ckptd.engine.relayout_memory.Memory`."""
        self._part(start, shape, strides).copy_(self._host(data).view(shape))

    def put_at(self, at: I64, data: U8) -> None:
        """See `ckptd.engine.relayout_memory.Memory`."""
        index = torch.from_numpy(at).to(self._flat.device)
        self._flat[index] = self._host(data).to(self._flat.device)

    def region(self) -> tuple[object, int, int]:
        """See `ckptd.engine.relayout_memory.Memory`."""
        start = self._flat.data_ptr()
        return str(self._flat.device), start, start + self.numel * self.dtype.itemsize

    def _part(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return self._flat.as_strided(shape, strides, self._flat.storage_offset() + start)

    def _host(self, data: U8) -> torch.Tensor:
        return torch.from_numpy(data).view(self._flat.dtype)


def check_apart(sources: dict[str, Memory], targets: dict[str, Memory]) -> None:
    """Raise `UsageError` (kind ``overlap``) when something is both taken from and put into."""
    found = [(*m.region(), 0, n) for n, m in sources.items() if m.numel]
    found += [(*m.region(), 1, n) for n, m in targets.items() if m.numel]
    found.sort(key=lambda r: (str(r[0]), r[1]))
    ends: dict[tuple[str, int], tuple[int, str]] = {}
    for device, start, end, side, name in found:
        other = ends.get((str(device), 1 - side))
        if other is not None and other[0] > start:
            raise UsageError(
                "a tensor is both moved and filled",
                kind="overlap",
                where=f"{name}, {other[1]}",
                hint="give the new tensors memory of their own; free the old ones after the move",
            )
        known = ends.get((str(device), side))
        if known is None or known[0] < end:
            ends[(str(device), side)] = (end, name)
