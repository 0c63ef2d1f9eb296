"""Live tensors as buffers that a read can fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.errors import MismatchError, UsageError
from ckptd.layout.block import Block
from ckptd.layout.lay.regions import Fill
from ckptd.load.wants import PlannedWant, Want
from ckptd.reshard.changes import Linear
from ckptd.train.state.describe import Describer
from ckptd.train.state.tensors import as_bytes
from ckptd.types import DType

__all__ = ["Filling", "LaidFilling"]


U8 = NDArray[np.uint8]
_Pieces = tuple[tuple[int, tuple[Block, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Changed:
    """Values that were read in another type, at the places that they have in the target."""

    staged: U8
    source: DType
    target: U8
    dtype: DType
    blocks: tuple[Block, ...]
    change: Linear

    def put(self) -> None:
        for block in self.blocks:
            where = (block.shape, block.target_strides, block.target_start)
            new = _view(self.target, self.dtype, *where)
            self.change.apply(new, _view(self.staged, self.source, *where))


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Numbers of several parameters that become one, and must agree."""

    name: str
    values: tuple[U8, ...]

    def check(self) -> None:
        if any(not np.array_equal(v, self.values[0]) for v in self.values[1:]):
            raise MismatchError(
                "parameters with different numbers become one tensor",
                kind="lay-fit",
                where=self.name,
                found=", ".join(v.tobytes().hex() for v in self.values[:4]),
            )


@dataclass(eq=False)
class LaidFilling:
    """What a load fills by composing layouts; `finish` when everything has been read.

    Attributes
    ----------
    wants
        For `ckptd.load.wants.read_plan`.
    """

    wants: list[PlannedWant] = field(default_factory=list)
    _changes: list[_Changed] = field(default_factory=list)
    _fills: list[tuple[U8, DType, tuple[Fill, ...]]] = field(default_factory=list)
    _same: list[_Same] = field(default_factory=list)

    def copy(self, number: int, pieces: _Pieces, target: U8) -> None:
        """Ask for bytes as they are."""
        self.wants.append(PlannedWant(number, pieces, target))

    def change(
        self,
        number: int,
        pieces: _Pieces,
        source: DType,
        target: U8,
        dtype: DType,
        change: Linear,
    ) -> None:
        """Ask for values that change on the way; they are staged in the type they are read in."""
        blocks = tuple(b for _, found in pieces for b in found)
        numel = max((b.target_span[1] for b in blocks), default=0)
        staged = np.empty(numel * source.itemsize, dtype=np.uint8)
        self.wants.append(PlannedWant(number, pieces, staged))
        self._changes.append(_Changed(staged, source, target, dtype, blocks, change))

    def fill(self, target: U8, dtype: DType, fills: tuple[Fill, ...]) -> None:
        """Write what no element of the source stands for."""
        if fills:
            self._fills.append((target, dtype, fills))

    def same(self, name: str, values: tuple[U8, ...]) -> None:
        """Have numbers compared that were read for one tensor."""
        if len(values) > 1:
            self._same.append(_Same(name, values))

    def finish(self) -> None:
        """Do what is left to do.

        Raises
        ------
        MismatchError, UsageError
            Numbers disagree, or a value does not fit its type (`poisoned`).
        """
        try:
            for same in self._same:
                same.check()
            for changed in self._changes:
                changed.put()
        except UsageError as error:
            error.poisoned = True
            raise
        for target, dtype, fills in self._fills:
            for found in fills:
                shape, strides = tuple(n for n, _ in found.steps), tuple(s for _, s in found.steps)
                _view(target, dtype, shape, strides, found.start)[...] = found.value
        self._changes.clear()
        self._fills.clear()


def _view(
    memory: U8, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> NDArray[Any]:
    """Return elements of a buffer; numpy checks that they lie inside."""
    size = dtype.itemsize
    return np.ndarray(shape, dtype.numpy, memory, start * size, tuple(s * size for s in strides))


class Filling:
    """Collects what a load fills.

    A contiguous tensor on the CPU is filled where it lies. Others (on an accelerator, strided,
    lazily conjugated) get a buffer, and `finish` copies it over.

    Attributes
    ----------
    wants
        For `ckptd.load.wants.read_plan`.
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

    def buffer(self, local: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
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
