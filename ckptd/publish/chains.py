"""`DeltaBook`: changes kept from version to version, within a budget; joined for older workers.

In it: how many versions back, digests as well; which blocks are kept.

A slot that is filled is not the one of the version before, so both lie in memory for a while: what
changed in a block is found then, once, and kept within a budget. Deltas of successive versions are
joined for a worker that holds an older one. Where one is missing the block travels whole.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import UsageError
from ckptd.publish.blocks import BLOCK_BYTES, tensor_bytes
from ckptd.publish.deltas import NOTHING, WHOLE, apply, changed
from ckptd.publish.messages import MOST_READ_BYTES, BlockRead, PublishedTensor
from ckptd.reshard.changes import Linear
from ckptd.reshard.live.memory import ArrayMemory
from ckptd.types import DType, dtype_of

U8 = NDArray[np.uint8]

KEPT_VERSIONS = 16
"""How far back digests and deltas are kept: a worker that holds an older version takes all."""
_KEPT_BYTES = 256
"""Memory that a delta takes besides its own bytes, roughly."""
_MOST_BLOCKS = MOST_READ_BYTES // BLOCK_BYTES
"""Blocks that a part may run through whose change is found."""
_AT_ONCE = 2
"""Parts that are gathered out of many blocks at a time: each takes the memory of these."""

_Key = tuple[str, str, int]
"""Of a delta: a tensor, the type it is sent in, and a block."""


@dataclass(eq=False)
class DeltaStep:
    """The changes from version `base` to `number`, as far as they are known."""

    base: int
    number: int
    kept: dict[_Key, bytes] = field(default_factory=dict)
    nbytes: int = 0


class DeltaBook:
    """The steps from version to version, within a budget. Thread-safe.

    Attributes
    ----------
    budget_bytes
        Most memory for deltas that are kept; those of older versions go first.
    asked
        Tensors that workers asked deltas of, with the types that these are sent in, and of which
        version the last time.
    room
        Held by what gathers a part out of many blocks.
    """

    def __init__(self) -> None:
        self.budget_bytes = 0
        self.asked: dict[tuple[str, str], int] = {}
        self.room = threading.Semaphore(_AT_ONCE)
        self._steps: OrderedDict[int, DeltaStep] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, base: int, number: int) -> None:
        """Note that a version has the one before it beside it."""
        with self._lock:
            self._steps[number] = DeltaStep(base, number)
            while len(self._steps) > KEPT_VERSIONS:
                self._steps.popitem(last=False)

    def wanted(self, number: int) -> dict[str, list[str]]:
        """Return the types in which tensors were asked of, of late, by name."""
        out: dict[str, list[str]] = {}
        for (name, cast), last in list(self.asked.items()):
            if number - last <= KEPT_VERSIONS:
                out.setdefault(name, []).append(cast)
        return out

    def before(self, number: int) -> int:
        """Return the version whose slot was beside that of another one; 0: there is none."""
        with self._lock:
            step = self._steps.get(number)
            return 0 if step is None else step.base

    def between(self, since: int, number: int) -> list[DeltaStep]:
        """Return the steps from one version to another one, in their order; empty: not all."""
        out: list[DeltaStep] = []
        with self._lock:
            while number > since and (step := self._steps.get(number)) is not None:
                out.append(step)
                number = step.base
        return out[::-1] if number == since else []

    def keep(self, step: DeltaStep, key: _Key, delta: bytes) -> bool:
        """Keep a delta, if that is possible without those of later versions than its own."""
        with self._lock:
            size = len(delta) + _KEPT_BYTES
            for number in list(self._steps):
                if sum(s.nbytes for s in self._steps.values()) + size <= self.budget_bytes:
                    break
                if number >= step.number:
                    return False
                del self._steps[number]
            if self._steps.get(step.number) is step and key not in step.kept:
                step.kept[key] = delta
                step.nbytes += size
            return True


class VersionDeltas:
    """The changes since one version, for parts of the tensors of a later one.

    Parameters
    ----------
    book
        Keeps what is found.
    steps
        From that version to the later one.
    new, old
        The slots of the later version and of the one before it; without that nothing is found that
        is not kept.

    Attributes
    ----------
    full
        What is found is not kept any more.
    """

    def __init__(
        self, book: DeltaBook, steps: Sequence[DeltaStep], new: Slot, old: Slot | None
    ) -> None:
        self._book = book
        self._steps = steps
        self._new = new
        self._old = old
        self._last: tuple[object, U8 | None] = None, None
        self.full = False

    def of(
        self, tensor: PublishedTensor, block: BlockRead, cut: tuple[int, int] | None
    ) -> bytes | None:
        """Return the delta of a part, or of some bytes of it; None: it is not known, or no gain.

        Parameters
        ----------
        cut
            First byte and end, within one block; None: all of the part, which is gathered.
        """
        size, cast = dtype_of(tensor.dtype).itemsize, block.cast
        sent = dtype_of(cast or tensor.dtype)
        self._book.asked[tensor.name, cast] = self._steps[-1].number
        if cut is not None:
            start, end = cut
            index, at = divmod(start, BLOCK_BYTES)
            if not at and end in (start + BLOCK_BYTES, tensor.numel * size):
                return self.block(tensor, cast, index)
            xor = self._xor(tensor, cast, range(index, index + 1))
            return None if xor is None else _of_xor(xor[at : at + end - start], sent)
        last = sum((n - 1) * s for n, s in zip(block.shape, block.strides, strict=True))
        first, at = divmod(block.start, BLOCK_BYTES // size)
        blocks = range(first, (block.start + last) * size // BLOCK_BYTES + 1)
        if len(blocks) > _MOST_BLOCKS:
            return None
        with self._book.room:
            xor = self._xor(tensor, cast, blocks)
            if xor is None:
                return None
            out = np.empty(math.prod(block.shape) * sent.itemsize, np.uint8)
            ArrayMemory(xor, sent).take(at, block.shape, block.strides, out)
            return _of_xor(out, sent)

    def block(self, tensor: PublishedTensor, cast: str, index: int) -> bytes | None:
        """Return the delta of a whole block; None as `of`."""
        if len(self._steps) == 1:
            return self.found(tensor, cast, index)[0]
        xor = self._xor(tensor, cast, range(index, index + 1))
        return None if xor is None else _of_xor(xor, dtype_of(cast or tensor.dtype))

    def _xor(self, tensor: PublishedTensor, cast: str, blocks: range) -> U8 | None:
        """Return which bits of some blocks have changed; None where a delta is missing."""
        key = tensor.name, cast, blocks
        if self._last[0] == key:  # small parts of one block come one after the other
            return self._last[1]
        size = dtype_of(cast or tensor.dtype).itemsize
        per = BLOCK_BYTES // dtype_of(tensor.dtype).itemsize
        end = min(blocks.stop * per, tensor.numel)
        xor: U8 | None = np.zeros((end - blocks.start * per) * size, np.uint8)
        for index, at in zip(blocks, count(0, per * size), strict=False):
            found = [s.kept.get((tensor.name, cast, index), WHOLE) for s in self._steps[:-1]]
            for delta in (*found, self.found(tensor, cast, index)[0]):
                if xor is None or delta is None or delta == WHOLE:
                    xor = None
                    break
                apply(xor[at : at + per * size], delta, size)
        if len(blocks) == 1:
            self._last = key, xor
        return xor

    def found(
        self, tensor: PublishedTensor, cast: str, index: int, *, rests: bool = False
    ) -> tuple[bytes | None, bytes]:
        """Return the delta of the last step, found now where it is not kept; see `deltas.changed`.

        `rests`: nothing of the block has changed.
        """
        step, key = self._steps[-1], (tensor.name, cast, index)
        delta, made = step.kept.get(key), b""
        if delta is None and self._old is not None and self._old.sealed == step.base:
            if rests:
                delta = NOTHING
            else:
                try:
                    old, new = (_values(s, tensor, cast, index) for s in (self._old, self._new))
                except UsageError:  # a value that does not fit, and may be in no part asked for
                    return None, b""
                delta, made = changed(old, new, dtype_of(cast or tensor.dtype).itemsize)
                delta = WHOLE if delta is None else delta
            if (self._old.sealed, self._new.sealed) != (step.base, step.number):
                return None, b""  # of bytes that were written meanwhile
            self.full = not self._book.keep(step, key, delta)
        return (None if delta == WHOLE else delta), b"" if cast else made


def _values(slot: Slot, tensor: PublishedTensor, cast: str, index: int) -> U8:
    """Return a block of a tensor in the type that it is sent in."""
    data = tensor_bytes(slot, tensor)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
    if not cast:
        return data
    dtype, sent = dtype_of(tensor.dtype), dtype_of(cast)
    out = np.empty(len(data) // dtype.itemsize * sent.itemsize, np.uint8)
    Linear(tensor.name).apply(out.view(sent.numpy), data.view(dtype.numpy))
    return out


def _of_xor(xor: U8, dtype: DType) -> bytes | None:
    return changed(np.zeros_like(xor), np.ascontiguousarray(xor), dtype.itemsize)[0]
