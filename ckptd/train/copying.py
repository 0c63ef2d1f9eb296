"""Copying live tensors into a slot of the arena, in file order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ckptd.engine.arena import Slot
from ckptd.engine.structure import SavePlan
from ckptd.errors import SaveError
from ckptd.format.digest import digest
from ckptd.format.filemap import ChunkRef
from ckptd.layout.region import Region
from ckptd.train.describe import Describer
from ckptd.train.dtypes import as_bytes, local_tensor
from ckptd.train.leaves import TensorLeaf
from ckptd.types import Box

__all__ = ["CopyStep", "Snapshot", "Window", "copy_steps"]

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


class Snapshot:
    """One save's copying: what may not wait at once, the rest in another thread.

    Parameters
    ----------
    steps
        What is copied, in file order.
    sources
        Leaf by the name that steps use.
    slot
        Where it goes.
    held
        Tells of a leaf that nothing mutates it before the gate says so.
    look
        Digest what is held now and again when it is copied: finds also what torch does not count
        as a mutation (writes through ``.data`` or numpy). Costs a pass over the state.

    Notes
    -----
    Tensors on an accelerator are copied at once and synchronously.
    """

    def __init__(
        self,
        steps: Sequence[CopyStep],
        sources: Mapping[str, TensorLeaf],
        slot: Slot,
        held: Callable[[TensorLeaf], bool],
        *,
        look: bool = False,
    ) -> None:
        self._steps = steps
        self._slot = slot
        self._held = held
        self._locals = {s.name: local_tensor(sources[s.name].tensor) for s in steps}
        self._late = {n: x for n, x in self._locals.items() if self.is_held(sources[n])}
        self._versions = {
            name: local._version for name, local in self._late.items() if not local.is_inference()
        }
        self._digests = {name: _digest(local) for name, local in self._late.items() if look}

    def is_held(self, leaf: TensorLeaf) -> bool:
        """Tell whether a leaf is copied late."""
        return leaf.tensor.device.type == "cpu" and self._held(leaf)

    def copy_now(self) -> None:
        """Copy what may change at any time. Returns when it is copied."""
        target = np.frombuffer(self._slot.data, dtype=np.uint8)
        for step in self._steps:
            if step.name not in self._late:
                _copy(_part(self._locals[step.name], step.part), target[step.start : step.end])

    def copy_rest(self) -> None:
        """Copy what is held, front to back; on return the snapshot's tensors are all there.

        Raises
        ------
        SaveError
            kind ``mutated``: something changed before it was copied; the snapshot is worth
            nothing. Names what.
        """
        target = np.frombuffer(self._slot.data, dtype=np.uint8)
        done = reported = 0
        for step in self._steps:
            if step.name in self._late:
                _copy(_part(self._late[step.name], step.part), target[step.start : step.end])
            done = step.end
            if done - reported >= REPORT_BYTES:
                self._slot.staged = reported = done
        self._check()
        self._slot.staged = done

    def _check(self) -> None:
        changed = [n for n, v in self._versions.items() if self._late[n]._version != v]
        changed += [n for n, d in self._digests.items() if _digest(self._late[n]) != d]
        if changed:
            names = sorted(set(changed))
            raise SaveError(
                f"{len(names)} tensors changed before they were copied",
                kind="mutated",
                where=", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
                wanted="no change between save() and before_mutation() or the optimizer's step",
                hint="call before_mutation() of the checkpointer before whatever changes them, or "
                'make it with lazy="off"',
            )


def _part(local: torch.Tensor, part: Box | Window | None) -> torch.Tensor:
    if isinstance(part, Box):
        for dim, (offset, size) in enumerate(zip(part.offset, part.shape, strict=True)):
            local = local.narrow(dim, offset, size)
    elif part is not None:
        flat = local.contiguous().view(-1)
        return flat.as_strided(part.shape, part.strides, flat.storage_offset() + part.start)
    return local


def _digest(local: torch.Tensor) -> bytes:
    plain = local.contiguous().resolve_conj().resolve_neg()
    return digest(as_bytes(plain).data)


def _copy(source: torch.Tensor, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    lazy = source.is_conj() or source.is_neg()
    if source.device.type == "cpu" and source.is_contiguous() and not lazy:
        np.copyto(target, as_bytes(source))
        return
    view = torch.from_numpy(target).view(source.dtype).view(source.shape)
    view.copy_(source)
