"""Witness check after a load between layouts: stored sample values, looked for in live tensors.

Positions are followed by the elements' own arithmetic (`ckptd.reshard.elements`), which has
nothing in common with the planner: a wrong plan does not excuse itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.format.witness import Witness, WitnessPlan, select
from ckptd.checkpoint.torch.filling import Filling
from ckptd.errors import CorruptError, first_few
from ckptd.lay.local import LocalPiece
from ckptd.lay.stored import TensorKey
from ckptd.reshard.changes import change_of
from ckptd.reshard.elements import follow
from ckptd.reshard.torch.layout.loading import BoundLoad, FilledTensor
from ckptd.reshard.verify import changed
from ckptd.types import dtype_of

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


def check_laid_witness(
    load: BoundLoad, filling: Filling, plan: WitnessPlan, witness: Witness
) -> int:
    """Compare what a load filled with the checkpoint's witness; return how many values were seen.

    Parameters
    ----------
    load
        The load, finished.
    filling
        Its targets.
    plan, witness
        The checkpoint's witness.

    Raises
    ------
    CorruptError
        Names the tensors; the live state is wrong (`state_corrupted`).
    """
    checked = 0
    wrong: list[str] = []
    expected = list(_expected(load, plan, witness))
    counts = [len(at) for _, at, _ in expected]
    read = filling.values(
        [f.target for f, _, _ in expected],
        np.array([dtype_of(f.leaf.dtype).itemsize for f, _, _ in expected], np.int64),
    )
    elements = np.concatenate([np.empty(0, np.int64), *(at for _, at, _ in expected)])
    values = read(np.repeat(np.arange(len(expected)), counts), elements)
    each = np.split(values, np.cumsum(counts))[:-1]
    for (filled, elements, wanted), found in zip(expected, each, strict=True):
        bad = int((found != wanted).any(axis=1).sum())
        checked += len(elements)
        if bad:
            wrong.append(f"{filled.leaf.name} ({bad} of {len(elements)} values)")
    if wrong:
        error = CorruptError(
            "values arrived at the wrong places",
            where=first_few(wrong),
            hint="one of the two layouts is not that of the tensors, or the plan is wrong",
        )
        error.state_corrupted = True
        raise error
    return checked


def _expected(
    load: BoundLoad, plan: WitnessPlan, witness: Witness
) -> Iterator[tuple[FilledTensor, I64, U8]]:
    """Yield elements of filled tensors and the values that they must have."""
    wanted = _by_key(load)
    keys = load.source.form.by_name
    numbers = {w.tensor for w in load.wants}
    for name, number in load.source.names.tensors.items():
        if number not in numbers or name not in keys:
            continue
        first, last = int(plan.starts[number]), int(plan.starts[number + 1])
        present = np.flatnonzero(witness.present[first:last])
        positions = plan.positions(number)[present]
        values = witness.values[first:last][present]
        yield from _tensor(load, wanted, keys[name], number, positions, values)


def _tensor(
    load: BoundLoad,
    wanted: Mapping[TensorKey, tuple[FilledTensor, LocalPiece]],
    key: TensorKey,
    number: int,
    positions: I64,
    values: U8,
) -> Iterator[tuple[FilledTensor, I64, U8]]:
    """Follow the values of one tensor of the checkpoint."""
    composition = load.source.composition
    source = composition.source.rules[key[0]]
    dtype = load.source.filemap.dtypes[number]
    at = None if load.job.whole else load.job.coordinates
    scope, target = composition.source.scope, composition.target.scope
    takers = composition.takers
    for hit in follow(source, key[1], positions, scope, takers, target, target_at=at):
        known = wanted.get((hit.rule.number, hit.indexes, key[2]))
        if known is None:
            continue
        filled, piece = known
        kept, elements = _elements(load, filled, piece, hit.positions)
        change = composition.values(source, hit.rule, key[2])
        to = dtype_of(filled.leaf.dtype)
        operation = change_of(dtype, to, change, filled.leaf.name)
        yield filled, elements, changed(values[hit.which[kept]], dtype, to, operation)


def _by_key(load: BoundLoad) -> dict[TensorKey, tuple[FilledTensor, LocalPiece]]:
    """Return what was filled, by the target tensors that it holds something of."""
    return {
        (p.rule, p.indexes, filled.tensor.state): (filled, p)
        for filled in load.filled
        for p in filled.tensor.pieces
    }


def _elements(load: BoundLoad, filled: FilledTensor, piece: LocalPiece, at: I64) -> tuple[I64, I64]:
    """Return which positions of a tensor a buffer holds, and where."""
    if not load.job.whole:
        kept = np.flatnonzero((at >= piece.lo) & (at < piece.hi)).astype(np.int64)
        return kept, at[kept] - piece.lo + piece.at
    order = np.argsort(at, kind="stable").astype(np.int64)
    found = [select(at[order], filled.tensor.shape, r, 0) for r in filled.regions]
    slots = np.concatenate([s for s, _ in found]) if found else np.empty(0, np.int64)
    elements = np.concatenate([e for _, e in found]) if found else np.empty(0, np.int64)
    return order[slots], elements
