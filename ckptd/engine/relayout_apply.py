"""What becomes of values that arrive: put as they are, changed by the rules, or combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.relayout_memory import Memory
from ckptd.engine.relayout_plan import Incoming
from ckptd.engine.relayout_stream import Chunk, Piece
from ckptd.engine.reshard.changes import Linear, change_of, changed_dtype
from ckptd.errors import MismatchError, UsageError
from ckptd.layout.lay.modifiers import Average
from ckptd.layout.lay.values import Values
from ckptd.types import DType

__all__ = ["Arrivals", "change_between", "chunk_numel", "place_of"]

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]


def chunk_numel(chunk: Chunk) -> int:
    """Return the number of elements of a chunk."""
    return chunk.block.numel if isinstance(chunk, Piece) else len(chunk.target)


def change_between(
    source: DType, memory: Memory, values: Values | None, name: str
) -> Linear | None:
    """Return what happens to values on their way; None: they stay as they are.

    Raises
    ------
    MismatchError
        ``lay-fit``: the tensor is of another type, and no rule casts.
    """
    wanted = changed_dtype(source, values, name)
    if wanted != memory.dtype:
        raise MismatchError(
            "a tensor is of another type than what arrives for it",
            kind="lay-fit",
            where=name,
            wanted=memory.dtype.name,
            found=wanted.name,
            hint=f"cast({memory.dtype.name}) in the target's rule",
        )
    change = change_of(source, memory.dtype, values, name)
    if not isinstance(change, Linear | None):
        raise UsageError("quantized tensors are not moved live", kind="lay-use", where=name)
    return change


def place_of(incoming: Incoming) -> Memory:
    """Return the memory that something arrives for.

    Raises
    ------
    UsageError
        The state has none.
    """
    if incoming.memory is None:
        raise UsageError(
            "the state has no place for what arrives",
            kind="lay-use",
            where=incoming.tensor.name,
            hint="leave states out on every rank: states=False",
        )
    return incoming.memory


@dataclass(eq=False)
class _Sum:
    """Values of several ranks that become one."""

    incoming: Incoming
    source: DType
    total: F64
    values: Values | None
    divisor: int
    where: NDArray[np.bool_]


@dataclass(eq=False)
class Arrivals:
    """Puts values into the tensors of one process. One thread.

    Parameters
    ----------
    room
        Most bytes for values that are combined from several ranks.
    """

    room: int = 1 << 62
    _sums: dict[tuple[str, Values | None], _Sum] = field(default_factory=dict)

    def put(self, incoming: Incoming, source: DType, chunk: Chunk, data: U8) -> None:
        """Put the values of a chunk, in the giver's type, into their places."""
        memory = place_of(incoming)
        if isinstance(chunk, Piece):
            self._part(incoming, memory, source, chunk.part, chunk, data)
            return
        for part in np.unique(chunk.parts).tolist():
            rows = np.flatnonzero(chunk.parts == part)
            picked = chunk._replace(
                source=chunk.source[rows], target=chunk.target[rows], parts=chunk.parts[rows]
            )
            own = data.reshape(-1, source.itemsize)[rows].reshape(-1)
            self._part(incoming, memory, source, part, picked, own)

    def _part(
        self, incoming: Incoming, memory: Memory, source: DType, part: int, chunk: Chunk, data: U8
    ) -> None:
        values, of = incoming.parts[part]
        if of > 1:
            self._add(incoming, memory, source, values, of, chunk, data)
            return
        change = change_between(source, memory, values, incoming.tensor.name)
        if change is not None:
            new = np.empty(chunk_numel(chunk), dtype=memory.dtype.numpy)
            change.apply(new, data.view(source.numpy))
            data = new.view(np.uint8)
        if isinstance(chunk, Piece):
            block = chunk.block
            memory.put(block.target_start, block.shape, block.target_strides, data)
        else:
            memory.put_at(chunk.target, data)

    def _add(
        self,
        incoming: Incoming,
        memory: Memory,
        source: DType,
        values: Values | None,
        of: int,
        chunk: Chunk,
        data: U8,
    ) -> None:
        key = (incoming.tensor.name, values)
        found = self._sums.get(key)
        if found is None:
            self.room -= 9 * memory.numel
            if self.room < 0:
                raise UsageError(
                    "values of several ranks are combined in more memory than the budget allows",
                    kind="budget",
                    where=incoming.tensor.name,
                    hint="give a larger budget_bytes, or write `any` to take one rank's",
                )
            total = np.zeros(memory.numel, dtype=np.float64)
            where = np.zeros(memory.numel, dtype=np.bool_)
            divisor = of if _is_average(values, incoming.tensor.name) else 1
            found = _Sum(incoming, source, total, values, divisor, where)
            self._sums[key] = found
        new = data.view(source.numpy).astype(np.float64)
        if isinstance(chunk, Piece):
            b = chunk.block
            steps = tuple(8 * s for s in b.target_strides)
            view: F64 = np.ndarray(b.shape, np.float64, found.total, 8 * b.target_start, steps)
            view += new.reshape(b.shape)
            marks: NDArray[Any] = np.ndarray(
                b.shape, np.bool_, found.where, b.target_start, b.target_strides
            )
            marks[...] = True
        else:
            found.total[chunk.target] += new
            found.where[chunk.target] = True

    def finish(self) -> None:
        """Write what was combined."""
        for found in self._sums.values():
            memory = found.incoming.memory
            if memory is None:
                continue
            at = np.flatnonzero(found.where).astype(np.int64)
            mean = found.total[at] / found.divisor
            name = found.incoming.tensor.name
            change = change_between(found.source, memory, found.values, name) or Linear(name)
            new = np.empty(len(at), dtype=memory.dtype.numpy)
            change.apply(new, mean)
            memory.put_at(at, new.view(np.uint8))
        self._sums.clear()


def _is_average(values: Values | None, name: str) -> bool:
    kinds = {m.kind for m in (values.source if values else ()) if isinstance(m, Average)}
    if len(kinds) > 1:
        raise UsageError("averages and sums of one tensor are mixed", kind="lay-use", where=name)
    return kinds == {"avg"}
