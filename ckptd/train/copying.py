"""Copying live tensors into the staging buffer, in file order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ckptd.engine.staging import Staging
from ckptd.engine.structure import SavePlan
from ckptd.format.filemap import ChunkRef
from ckptd.layout.region import Region
from ckptd.train.describe import Describer
from ckptd.train.dtypes import as_bytes
from ckptd.train.leaves import TensorLeaf
from ckptd.types import Box

__all__ = ["CopyStep", "Window", "copy_all", "copy_steps"]

REPORT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Window:
    """A strided part of a contiguous tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One chunk, or a part: which part of which local tensor goes where in the buffer.

    `part` is in the local tensor's own coordinates; None means all of it.
    """

    name: str
    part: Box | Window | None
    start: int
    end: int


class LaidSteps(Protocol):
    """Knows the chunks of tensors that a layout describes."""

    def steps(self, name: str, chunk: ChunkRef) -> Iterable[CopyStep] | None:
        """Return the steps of a chunk; None when the layout does not describe its tensor."""


def copy_steps(
    plan: SavePlan,
    rank: int,
    leaves: Mapping[str, TensorLeaf],
    describer: Describer,
    laid: LaidSteps | None = None,
) -> list[CopyStep]:
    """Return the steps for what `rank` writes under `plan`, in file order.

    `laid` gives the steps of tensors that a layout describes.
    """
    steps: list[CopyStep] = []
    for chunk in plan.filemap.chunks(rank):
        if chunk.end == chunk.start:
            continue
        name = plan.tensors[chunk.tensor].name
        special = None if laid is None else laid.steps(name, chunk)
        if special is not None:
            steps += special
            continue
        held = describer.held(name, leaves[name].tensor)
        box = _local_box(chunk, held.regions, tuple(held.local.shape))
        everything = box.shape == tuple(held.local.shape)
        steps.append(CopyStep(name, None if everything else box, chunk.start, chunk.end))
    return steps


def _local_box(chunk: ChunkRef, regions: Sequence[Region], local_shape: tuple[int, ...]) -> Box:
    piece = chunk.piece.box
    for region in regions:
        if region.box.intersect(piece) == piece or region.box == piece:
            corner = np.unravel_index(region.start, local_shape) if local_shape else ()
            offset = tuple(
                int(c) + p - r
                for c, p, r in zip(corner, piece.offset, region.box.offset, strict=True)
            )
            return Box(offset, piece.shape)
    raise AssertionError(f"plan gives this rank a piece it does not hold: {piece}")


def copy_all(steps: Sequence[CopyStep], leaves: Mapping[str, TensorLeaf], staging: Staging) -> int:
    """Copy every chunk and advance the counter as it goes; return the bytes copied.

    Tensors on an accelerator are copied synchronously: on return every value is the one at the
    time of the call.
    """
    target = np.frombuffer(staging.data, dtype=np.uint8)
    done = reported = 0
    for step in steps:
        tensor = leaves[step.name].tensor
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        if isinstance(step.part, Box):
            pairs = zip(step.part.offset, step.part.shape, strict=True)
            for dim, (offset, size) in enumerate(pairs):
                local = local.narrow(dim, offset, size)
        elif step.part is not None:
            flat, window = local.contiguous().view(-1), step.part
            local = flat.as_strided(
                window.shape, window.strides, flat.storage_offset() + window.start
            )
        _copy(local, target[step.start : step.end])
        done = step.end
        if done - reported >= REPORT_BYTES:
            staging.staged = reported = done
    staging.staged = done
    return done


def _copy(source: torch.Tensor, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    lazy = source.is_conj() or source.is_neg()
    if source.device.type == "cpu" and source.is_contiguous() and not lazy:
        np.copyto(target, as_bytes(source))
        return
    view = torch.from_numpy(target).view(source.dtype).view(source.shape)
    view.copy_(source)
