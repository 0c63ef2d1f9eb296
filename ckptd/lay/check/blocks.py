"""Check of quantized rules: no rank's part ends inside of a block that has one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ckptd.errors import CkptdError
from ckptd.lay.held import held, split_axes
from ckptd.lay.resolve import Bound, Equation, Finding, MeshShape, ValueScope
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Dim, Quantized

_MAX_COORDINATES = 2**20


def block_findings(bound: Bound) -> Iterator[Finding]:
    """Yield the dimensions whose cuts do not lie between blocks."""
    mesh = bound.layout.mesh or MeshShape(1, {}, {})
    scope = ValueScope(bound.sizes, mesh.extents)
    for equation in bound.layout.equations:
        for modifier in equation.modifiers:
            if isinstance(modifier, Quantized):
                for dim, block in zip(equation.dims, modifier.block, strict=False):
                    finding = _inside(equation, dim, block, scope)
                    if finding is not None:
                        yield finding


def _inside(equation: Equation, dim: Dim, block: int, scope: ValueScope) -> Finding | None:
    """Return a finding if a cut of a dimension lies inside of a block."""
    axes = split_axes(dim)
    count = math.prod(scope.extents.get(a, 1) for a in axes)
    if not axes or block < 2 or count > _MAX_COORDINATES:
        return None
    numbers = np.arange(count, dtype=np.int64)
    coordinates = {}
    for axis in reversed(axes):
        numbers, coordinates[axis] = np.divmod(numbers, scope.extents.get(axis, 1))
    try:
        cuts = held(dim, scope, coordinates, count).cuts
    except CkptdError:
        return None
    inside = cuts[(cuts % block != 0) & (cuts != cuts[-1])]
    if not len(inside):
        return None
    at = " ".join(f"@{a}" for a in axes)
    message = f"{at} cuts {show(dim)} at {inside[0]}, inside of a block of {block} with one scale"
    notes = (f"cut between blocks: @{axes[0]}/{block}",)
    return Finding("block", message, equation.at, equation.text, notes, fit=True)
