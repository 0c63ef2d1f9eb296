"""Replicas in a save under a layout: which parts of its tensors a rank shares with others.

They do not depend on values, so the first save computes them for all; each
save only makes views of its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ckptd.base.grids.block import flat_regions
from ckptd.base.grids.grid import strides_of
from ckptd.base.grouping import by_key
from ckptd.checkpoint.torch.feed import StridedWindow
from ckptd.lay.local import LocalPiece
from ckptd.lay.replicated import ReplicatedPart, ReplicatedParts
from ckptd.lay.stored import TensorKey
from ckptd.types import Box


class CommonPart(NamedTuple):
    """Part of a tensor that this rank and others hold.

    Attributes
    ----------
    group
        The same text for the same ranks; of a tensor that has aliases, also for the same part only.
    first
        Whether this is the lowest of those ranks.
    windows
        Where it lies in this rank's tensor or buffer; None: it is the whole one.
    """

    group: str
    first: bool
    windows: tuple[Box | StridedWindow, ...] | None

    def views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return views of it: the same shapes on all ranks that hold it."""
        if self.windows is None:
            return [tensor]
        plain = tensor.detach()
        return [_view(plain, window) for window in self.windows]


def _view(tensor: torch.Tensor, window: Box | StridedWindow) -> torch.Tensor:
    if isinstance(window, Box):
        ends = zip(window.offset, window.shape, strict=True)
        return tensor[tuple(slice(o, o + n) for o, n in ends)]
    step = tensor.stride(0)
    start = tensor.storage_offset() + window.start * step
    return tensor.as_strided(window.shape, [s * step for s in window.strides], start)


@dataclass(frozen=True, eq=False)
class CommonParts:
    """Finds what a rank has in common with others, once for each tensor.

    Attributes
    ----------
    replicated
        The parts that several ranks hold.
    coordinates
        Of the rank.
    rank
        Its number in the layout.
    """

    replicated: ReplicatedParts
    coordinates: Mapping[str, int]
    rank: int

    def of(self, piece: LocalPiece, state: str) -> tuple[CommonPart, ...]:
        """Return what is common of a tensor, or of an alias of one.

        Parameters
        ----------
        piece
            What this rank has of it.
        state
            Short name of the state, or empty.
        """
        key = (piece.rule, piece.indexes, state)
        found = self._found.get(key)
        if found is None:
            replicated = self.replicated
            aliased = piece.rule in replicated.copied or piece.rule in replicated.originals
            parts = self._one_by_one if aliased else self._in_groups
            found = self._found[key] = tuple(parts(key, piece))
        return found

    @cached_property
    def _found(self) -> dict[TensorKey, tuple[CommonPart, ...]]:
        return {}

    def _one_by_one(self, key: TensorKey, piece: LocalPiece) -> Iterator[CommonPart]:
        """Yield what is common of a tensor that has aliases, or of an alias, part by part.

        Ranks that have only a copy do not have the tensor's name, and a rank may have one part of
        the tensor and another one of a copy.
        """
        name = self.replicated.form.tensor(self._original(piece.rule), *key[1:]).name
        for found in self.replicated.of_rank(key, self.rank):
            group = f"lay:{found.group}:{name}:{found.cell}:{found.lo}"
            windows = tuple(self._windows(key, piece, found))
            yield CommonPart(group, self._is_first(found), windows)

    def _original(self, rule: int) -> int:
        return self.replicated.originals.get(rule, rule)

    def _in_groups(self, key: TensorKey, piece: LocalPiece) -> Iterator[CommonPart]:
        """Yield what is common of any other tensor, all parts of a group of ranks as one."""
        groups = by_key((part.group, part) for part in self.replicated.of_rank(key, self.rank))
        for group, parts in groups.items():
            windows = None
            if len(groups) > 1 or not self._is_whole(key, piece, parts):
                windows = tuple(w for part in parts for w in self._windows(key, piece, part))
            yield CommonPart(f"lay:{group}", self._is_first(parts[0]), windows)

    def _is_first(self, part: ReplicatedPart) -> bool:
        return int(part.ranks[0]) == self.rank

    def _is_whole(self, key: TensorKey, piece: LocalPiece, parts: Sequence[ReplicatedPart]) -> bool:
        """Whether all ranks of a group hold the whole of the same tensor, and nothing beside."""
        form = self.replicated.form
        mesh, axes = form.mesh, form.rules[piece.rule].axes
        ranks, at = parts[0].ranks, self.coordinates
        return (
            form.packing.flat_of(*key) is None
            and sum(p.hi - p.lo for p in parts) == piece.hi - piece.lo
            and all((ranks // mesh.strides[a] % mesh.extents[a] == at[a]).all() for a in axes)
        )

    def _windows(
        self, key: TensorKey, piece: LocalPiece, found: ReplicatedPart
    ) -> Iterator[Box | StridedWindow]:
        """Yield where a part lies in this rank's tensor or buffer."""
        form = self.replicated.form
        rule = form.rules[piece.rule]
        who = rule.who(self.coordinates)
        box = self.replicated.boxes(rule, who)[found.cell]
        if form.packing.flat_of(*key) is None:
            yield box
            return
        strides = strides_of(rule.local_shape(who))
        for region in flat_regions(box, found.lo, found.hi):
            at = sum(o * s for o, s in zip(region.box.offset, strides, strict=True))
            yield StridedWindow(region.box.shape, strides, at - piece.lo + piece.at)
