"""Live tensors as buffers that a read can fill."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.load.plan import Want
from ckptd.train.state.describe import Describer
from ckptd.train.state.tensors import as_bytes

__all__ = ["U8", "Filling"]

U8 = NDArray[np.uint8]


class Filling:
    """Collects what a load fills.

    A contiguous tensor on the CPU is filled where it lies. Others (on an accelerator, strided,
    lazily conjugated) get a buffer, and `finish` copies it over.

    Attributes
    ----------
    wants
        For `ckptd.load.plan.read_plan`.
    """

    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.wants: list[Want] = []

    def add(self, name: str, tensor: torch.Tensor, number: int) -> None:
        """Ask for what this rank holds of `tensor`, from tensor `number` of the manifest."""
        held = self._describer.held(name, tensor)
        target = self.buffer(held.local.detach())
        if target is not None:
            self.wants.append(Want(number, held.regions, target))

    def buffer(self, local: torch.Tensor) -> U8 | None:
        """Return the bytes that a read fills for a local tensor; None where there are none."""
        if not local.numel():
            return None
        buffer = local
        lazy = local.is_conj() or local.is_neg()
        if local.device.type != "cpu" or not local.is_contiguous() or lazy:
            buffer = torch.empty(local.shape, dtype=local.dtype)
            self._later.append((local, buffer))
        return as_bytes(buffer)

    def finish(self) -> None:
        """Copy the buffers into their tensors; the state is complete on return."""
        with torch.no_grad():
            for local, buffer in self._later:
                local.copy_(buffer)
        self._later.clear()
