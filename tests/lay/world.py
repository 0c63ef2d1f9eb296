"""Ranks and checkpoints of a layout, element by element, by `meaning`.

An element is ``(family, state, (index, ...))`` or the value of a fill; the copies that a plan says
are made on arrays of them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptd.lay.copies import TargetPlan
from ckptd.lay.local import BoundTensor
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm, StoredTensor
from ckptd.lay.syntax import parse
from tests.lay.meaning import Entry, seq

Elements = NDArray[Any]
NOTHING = "nothing"


def bound(text: str, layout: str, **sizes: int) -> Bound:
    """Return a layout of a program, with sizes."""

    def load(name: str) -> Any:
        raise AssertionError(name)

    return Bound(resolve([parse(text)], layout, load), sizes)


def tensor_elements(
    form: StoredForm,
    rule: int,
    indexes: tuple[int, ...],
    state: str,
    coordinates: dict[str, int] | None,
) -> Elements:
    """Return the elements of a stored tensor, or of a rank-local one."""
    place = None if coordinates is None else tuple(coordinates.items())
    return _elements(form, rule, indexes, state, place)


@lru_cache(maxsize=10_000)
def _elements(
    form: StoredForm,
    rule: int,
    indexes: tuple[int, ...],
    state: str,
    place: tuple[tuple[str, int], ...] | None,
) -> Elements:
    coordinates = None if place is None else dict(place)
    found = form.rules[rule]
    equation = found.equation
    dims = [seq(d, form.scope, coordinates) for d in equation.dims]
    said = dict(zip(found.indexes, indexes, strict=True)) | dict(equation.pinned)

    def element(entries: tuple[Entry, ...]) -> Any:
        tags: tuple[str, ...] = ()
        axes = dict(said)
        for e in entries:
            if isinstance(e, float):
                return e
            tags, axes = tags + e[0], axes | e[1]
        return (equation.families[tags].name, state, tuple(sorted(axes.items())))

    out = np.empty(math.prod(len(d) for d in dims), dtype=object)
    for i, entries in enumerate(product(*dims)):
        out[i] = element(entries)
    return out.reshape([len(d) for d in dims])


def piece_elements(form: StoredForm, tensor: StoredTensor, piece: int) -> Elements:
    """Return the elements of one piece, row-major."""
    whole = tensor_elements(form, tensor.rule, tensor.indexes, tensor.state, None)
    found = tensor.grid.piece(piece)
    cell = whole[
        tuple(slice(o, o + n) for o, n in zip(found.box.offset, found.box.shape, strict=True))
    ]
    flat = cell.reshape(-1)
    return flat if found.flat is None else flat[slice(*found.flat)]


def local_elements(form: StoredForm, tensor: BoundTensor, rank: int) -> Elements:
    """Return the elements of a tensor or buffer of a rank, row-major."""
    out = np.full(tensor.numel, 0.0, dtype=object)
    for p in tensor.pieces:
        whole = tensor_elements(
            form, p.rule, p.indexes, tensor.state, form.mesh.coordinates(rank)
        ).reshape(-1)
        out[p.at : p.at + p.hi - p.lo] = whole[p.lo : p.hi]
    return out


def view(
    buffer: Elements, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Elements:
    """Return a strided view of a one-dimensional buffer."""
    last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= start <= last < len(buffer)
    step = buffer.strides[0]
    return as_strided(buffer[start:], shape, tuple(s * step for s in strides))


def execute(plan: TargetPlan, source: StoredForm) -> Elements:
    """Return the target buffer that a plan makes from a checkpoint of the source layout."""
    target = np.full(plan.numel, NOTHING, dtype=object)
    for copy in plan.copies:
        piece = piece_elements(source, copy.source, copy.piece)
        for b in copy.blocks:
            into = view(target, b.target_start, b.shape, b.target_strides)
            assert (into == NOTHING).all(), "an element is written twice"
            into[...] = view(piece, b.source_start, b.shape, b.source_strides)
    for f in plan.fills:
        shape, strides = tuple(n for n, _ in f.steps), tuple(s for _, s in f.steps)
        into = view(target, f.start, shape, strides)
        assert (into == NOTHING).all(), "an element is written twice"
        into[...] = f.value
    return target
