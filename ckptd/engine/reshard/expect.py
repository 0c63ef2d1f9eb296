"""What the source's witness wants to see in the target.

For each of its values: the position in the source tensor, the element of a logical tensor there,
and where the target's rules put that element. The values go through the same changes as the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.reshard.changes import Linear, change_of, quantized
from ckptd.engine.reshard.composed import Composed, Link
from ckptd.engine.reshard.elements import find, place
from ckptd.engine.reshard.samples import Expected
from ckptd.format.witness import VALUE_BYTES, Witness, WitnessPlan
from ckptd.layout.lay.stored import TensorKey
from ckptd.layout.lay.values import Values
from ckptd.types import DType

__all__ = ["by_indexes", "changed", "expect"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

_Row = tuple[I64, U8, I64]


def expect(composed: Composed) -> dict[int, Expected]:
    """Return what must be found, by number of the link (which is that of the target tensor)."""
    if composed.stock.witness is None:
        return {}
    plan, witness = composed.stock.witness
    by_key = {link.key: n for n, link in enumerate(composed.links)}
    rows: dict[int, list[_Row]] = {}
    seen: set[TensorKey] = set()
    for link in composed.links:
        for key, tensor in link.sources.items():
            if key not in seen:
                seen.add(key)
                for number, row in _tensor(composed, plan, witness, key, tensor.number, by_key):
                    rows.setdefault(number, []).append(row)
    return {number: _sorted(found) for number, found in rows.items()}


def _tensor(
    composed: Composed,
    plan: WitnessPlan,
    witness: Witness,
    key: TensorKey,
    source: int,
    by_key: Mapping[TensorKey, int],
) -> Iterator[tuple[int, _Row]]:
    """Yield where the values of one source tensor must turn up."""
    first, last = int(plan.starts[source]), int(plan.starts[source + 1])
    present = np.flatnonzero(witness.present[first:last])
    positions = plan.positions(source)[present]
    values = witness.values[first:last][present]
    form = composed.composition.source
    rule = form.rules[key[0]]
    numbers = dict(zip(rule.indexes, key[1], strict=True))
    for found in find(rule.equation, numbers, positions, form.scope):
        for target_rule, tags in composed.composition.givers.get(found.family, ()):
            equation, scope = target_rule.equation, composed.composition.target.scope
            placed = place(equation, tags, found.axes, scope)
            which = found.which[placed.which]
            columns = [placed.indexes[a] for a in target_rule.indexes]
            for indexes, rows in by_indexes(columns, len(which)):
                number = by_key.get((target_rule.number, indexes, key[2]))
                if number is None:
                    continue
                change = composed.composition.values(rule, target_rule, key[2])
                if change is not None and quantized(change.target) is not None:
                    continue  # rounded to steps that the witness does not know
                here = which[rows]
                wanted = _wanted(
                    composed, key, composed.links[number], change, values[here], positions[here]
                )
                sources = np.full(len(rows), source, dtype=np.int64)
                yield number, (placed.positions[rows], wanted, sources)


def by_indexes(columns: list[I64], count: int) -> Iterator[tuple[tuple[int, ...], I64]]:
    """Yield the rows of each combination of numbers in names."""
    if not count:
        return
    if not columns:
        yield (), np.arange(count, dtype=np.int64)
        return
    table = np.stack(columns, axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    for i, row in enumerate(unique.tolist()):
        yield tuple(row), np.flatnonzero(inverse.reshape(-1) == i).astype(np.int64)


def _wanted(
    composed: Composed,
    key: TensorKey,
    link: Link,
    change: Values | None,
    values: U8,
    positions: I64,
) -> U8:
    """Return witness values of a source tensor as they are in the target."""
    stocked = link.sources[key]
    if change is None or quantized(change.source) is None:
        operation = change_of(stocked.dtype, link.dtype, change, stocked.name)
        return changed(values, stocked.dtype, link.dtype, operation)
    scaled = composed.dequantized(key, stocked, stocked.grid.piece(0))
    raw = np.ascontiguousarray(values[:, : stocked.dtype.itemsize]).reshape(-1)
    new = scaled.at(raw.view(stocked.dtype.numpy), positions, link.dtype.numpy)
    return _rows(new, link.dtype)


def _rows(values: NDArray[Any], dtype: DType) -> U8:
    out = np.zeros((len(values), VALUE_BYTES), dtype=np.uint8)
    out[:, : dtype.itemsize] = values.view(np.uint8).reshape(-1, dtype.itemsize)
    return out


def changed(values: U8, source: DType, target: DType, change: Linear | None) -> U8:
    """Return witness values as they are in the target's type."""
    if change is None:
        return values
    raw = np.ascontiguousarray(values[:, : source.itemsize]).reshape(-1).view(source.numpy)
    new = np.empty(len(raw), dtype=target.numpy)
    change.apply(new, raw)
    return _rows(new, target)


def _sorted(rows: list[_Row]) -> Expected:
    positions = np.concatenate([r[0] for r in rows])
    order = np.argsort(positions, kind="stable")
    return Expected(
        positions[order],
        np.concatenate([r[1] for r in rows])[order],
        np.concatenate([r[2] for r in rows])[order],
    )
