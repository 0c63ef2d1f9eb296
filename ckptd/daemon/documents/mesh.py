"""The job's mesh, read from its groups: which place each rank has along pp, dp, tp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptd.daemon.documents.columns import Names
from ckptd.monitor.stats import Array

__all__ = ["AXES", "mesh_of"]

AXES = ("pp", "dp", "dp_replicate", "dp_shard", "fsdp", "cp", "ep", "tp")
"""Kinds of groups that are axes, the slowest first."""


def mesh_of(
    names: Names, members: Mapping[int, Sequence[int]], ranks: Array
) -> dict[str, Any] | None:
    """Return ``{"axes": names, "coords": one row a rank}``; None if no group is an axis.

    A rank's place along an axis is its place in its group of that kind. Where a kind says less
    than which group a rank is in (one axis is told and the other is not), there is no mesh.

    Parameters
    ----------
    names, members
        Groups; those told by agents.
    ranks
        Global ranks of the rows.
    """
    if not len(ranks):
        return None
    found: dict[str, Array] = {}
    size = int(ranks.max()) + 1
    for ident, group in list(members.items()):
        axis = names.kind(ident)
        if axis not in AXES or len(group) < 2:
            continue
        column = found.setdefault(axis, np.full(size, -1))
        listed = np.asarray(group)
        inside = (listed >= 0) & (listed < size)
        column[listed[inside]] = np.flatnonzero(inside)
    axes = [axis for axis in AXES if axis in found]
    if not axes:
        return None
    coords = np.stack([found[axis][ranks] for axis in axes], axis=1)
    if (coords < 0).any() or len(np.unique(coords, axis=0)) < len(coords):
        return None
    return {"axes": axes, "coords": coords}
