"""Tensors of scales of quantized parameters: names, shapes, types, a second scale for all."""

from __future__ import annotations

import numpy as np

from ckptd.base.grids.grid import Axis, Grid, whole
from ckptd.base.grids.owners import Owners, single_owner
from ckptd.errors import MismatchError
from ckptd.lay.resolve import Equation
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.stored import StoredForm, StoredTensor
from ckptd.lay.syntax.tree import Name, NameIndex, NamePart, Quantized, Text, join

HALF_BYTE = "float4_e2m1fn"
"""Quantized values of this type are two in a byte: of the last dimension, the first one low."""
SCALE_KINDS = ("", "float32", "float8_e8m0fnu", "uint8", "float8_e4m3fn")
"""Types of scales; bytes are exponents of two, as `float8_e8m0fnu` has them."""


def held_shape(equation: Equation, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a stored parameter in elements, which may be two in a byte."""
    modifiers = equation.modifiers
    packed = any(isinstance(m, Quantized) and m.dtype == HALF_BYTE for m in modifiers)
    return (*shape[:-1], 2 * shape[-1]) if packed and shape else shape


def scale_tensor(form: StoredForm, rule: int, indexes: tuple[int, ...]) -> StoredTensor | None:
    """Return the stored tensor of a quantized parameter's scales; None if it is not quantized.

    It is cut where the parameter is: a scale belongs to the rank that has the first element of
    its block, and where splits keep to whole blocks (``@tp/128``) no rank needs another's.

    Parameters
    ----------
    form
        The layout.
    rule, indexes
        The parameter.

    Raises
    ------
    MismatchError
        ``lay-fit``: the blocks have another number of dimensions than the tensor.
    """
    found = form.rules[rule]
    quantized = quantized_as(form, rule)
    if quantized is None:
        return None
    if len(quantized.block) != len(found.shape) or any(b < 1 for b in quantized.block):
        raise MismatchError(
            "the blocks of a quantized tensor do not fit its dimensions",
            kind="lay-fit",
            where=found.global_name(indexes),
            wanted=f"{len(found.shape)} sizes of one or more",
            found=quantized.block,
        )
    grid, owners = _cut(form, found, indexes, quantized.block)
    name = form.name(_name(quantized.scale, found.global_name(indexes)), "")
    base = found.base(indexes) if found.plain else 0
    return StoredTensor(name, rule, indexes, "", grid, owners, base)


def overall_scale(form: StoredForm, rule: int, indexes: tuple[int, ...]) -> StoredTensor | None:
    """Return the stored number that multiplies a quantized parameter's scales; None: none does."""
    found, quantized = form.rules[rule], quantized_as(form, rule)
    if quantized is None or quantized.overall is None:
        return None
    name = form.name(_name(quantized.overall, found.global_name(indexes)), "")
    first = max(0, int(form.cell_owners(found, indexes).reshape(-1)[0]))
    base = found.base(indexes) if found.plain else 0
    return StoredTensor(name, rule, indexes, "", whole(()), single_owner(first), base)


def quantized_as(form: StoredForm, rule: int) -> Quantized | None:
    """Return what a rule says of quantization; None: nothing."""
    modifiers = form.rules[rule].equation.modifiers
    return next((m for m in modifiers if isinstance(m, Quantized)), None)


def local_scales(form: StoredForm, rule: int, indexes: tuple[int, ...]) -> str:
    """Return the name of a quantized parameter's scales on the ranks that hold it."""
    quantized = quantized_as(form, rule)
    local = form.rules[rule].local_name(indexes)
    return "" if quantized is None else form.name(_name(quantized.scale, local), "")


def _cut(
    form: StoredForm, rule: RuleForm, indexes: tuple[int, ...], block: tuple[int, ...]
) -> tuple[Grid, Owners]:
    axes: list[Axis] = []
    cells = []
    for held, size in zip(rule.held, block, strict=True):
        cuts = np.unique(-(-held.cuts // size))
        axes.append(Axis.from_sizes(np.diff(cuts).tolist()))
        first = np.searchsorted(held.cuts, cuts[:-1] * size, side="right") - 1
        cells.append(first if len(first) else np.zeros(1, dtype=np.int64))
    owners = form.cell_owners(rule, indexes).reshape(rule.grid.cell_shape)
    return Grid(tuple(axes)), Owners.from_array(owners[np.ix_(*cells)].reshape(-1))


def _name(pattern: Name, name: str) -> str:
    """Return a scale's name: ``{name}`` represents that of the tensor."""
    parts: list[NamePart] = [
        Text(name) if isinstance(p, NameIndex) and p.axis == "name" else p for p in pattern.parts
    ]
    return "".join(p.text for p in join(parts) if isinstance(p, Text))
