"""Tensors that lie over one another in memory; an image of what both would hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptd.base.grids.grid import reach_of

U8 = NDArray[np.uint8]


class HeldTensor(Protocol):
    """Holder of a tensor of this process."""

    @property
    def local(self) -> torch.Tensor:
        """The tensor."""


H = TypeVar("H", bound=HeldTensor)


def overlapping(leaves: Iterable[H]) -> list[list[H]]:
    """Return leaves that have some memory in common, with all that they reach; each by itself fits.

    It is computed from addresses: two storages may lie over the same memory.
    """
    spans: list[tuple[str, int, int, int, H]] = []
    for leaf in leaves:
        local = leaf.local
        if local.is_meta or not local.numel():
            continue
        start = local.data_ptr()
        device = "" if local.is_cpu else str(local.device)
        reach = local.nbytes if local.is_contiguous() else _reach(local)
        # The number is there so that leaves are never compared.
        spans.append((device, start, len(spans), start + reach, leaf))
    spans.sort()
    groups: list[list[H]] = []
    on, end = "", 0
    for device, start, _, stop, leaf in spans:
        if device == on and start < end:
            groups[-1].append(leaf)
        else:
            groups.append([leaf])
            on, end = device, 0
        end = max(end, stop)
    # Columns of one matrix reach over one another, and have nothing in common.
    return [group for group in groups if len(group) > 1 and _meet(group)]


def are_apart(places: NDArray[np.int64]) -> bool:
    """Tell whether no two runs of memory, rows of address and bytes, have a byte in common."""
    rows = places[places[:, 0].argsort()]
    return bool((rows[:-1].sum(axis=1) <= rows[1:, 0]).all())


def _reach(local: torch.Tensor) -> int:
    """Return how many bytes lie between the beginning of a tensor and its end."""
    return reach_of(tuple(local.shape), local.stride()) * local.element_size()


def _meet(group: Sequence[HeldTensor]) -> bool:
    image = Image(group)
    return any(image.lay(leaf, np.zeros(leaf.local.nbytes, np.uint8))[0] for leaf in group)


class Image:
    """Image of the memory of some tensors on the host, as it would be with values written to it."""

    def __init__(self, group: Sequence[HeldTensor]) -> None:
        self._start = min(leaf.local.data_ptr() for leaf in group)
        size = max(leaf.local.data_ptr() + _reach(leaf.local) for leaf in group) - self._start
        self._bytes = np.zeros(size, np.uint8)
        self._known = np.zeros(size, np.bool_)

    def lay(self, leaf: HeldTensor, values: U8) -> tuple[int, int]:
        """Write the values of a tensor, in the order of its rows.

        Returns
        -------
        met, differ
            How many bytes were written before, and how many of these had another value.
        """
        local = leaf.local
        size = local.element_size()
        shape, strides = (*local.shape, size), (*(s * size for s in local.stride()), 1)
        start = local.data_ptr() - self._start
        there, known = (
            as_strided(memory[start:], shape, strides) for memory in (self._bytes, self._known)
        )
        rows = values.reshape(shape)
        met, differ = int(known.sum()), int((known & (there != rows)).sum())
        there[...] = rows
        known[...] = True
        return met, differ
