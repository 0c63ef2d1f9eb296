"""``mesh``: axes, finer axes and local axes to coordinates; the most ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ckptd.errors import UsageError
from ckptd.lay.resolve.equation import MeshShape
from ckptd.lay.syntax.tree import Mesh, MeshAxis

MAX_WORLD = 2**24
"""Most ranks of a mesh; one with more is a mistake."""

_MAX_DEPTH = 16
_MAX_COUNTED = 2**20


def mesh_shape(meshes: Sequence[Mesh]) -> MeshShape:
    """Return how the coordinates on all axes of some meshes follow from a rank's number.

    The first axis of a mesh is the outermost. ``tp:8=(tk:4 tr:2)`` gives the axes tp, tk and tr,
    with ``tp = tk * 2 + tr``. Local axes have stride 0.

    Parameters
    ----------
    meshes
        At least one; all over the same ranks.

    Raises
    ------
    UsageError
        ``lay-rule``: they differ in their number of ranks, an axis means two things, or its
        parts do not multiply to it.
    """
    world = _world(meshes)
    extents: dict[str, int] = {}
    strides: dict[str, int] = {}
    for mesh in meshes:
        for name, extent, stride in _axes(mesh):
            if (extents.get(name, extent), strides.get(name, stride)) != (extent, stride):
                raise _wrong(mesh, f"axis {name} differs between meshes of this layout")
            extents[name], strides[name] = extent, stride
    return MeshShape(world, extents, strides)


def independent(shape: MeshShape, axes: Sequence[str]) -> bool:
    """Whether each combination of coordinates on some axes is a rank's.

    An axis and a part of it are not independent, nor are, as a rule, axes of different meshes
    over the same ranks: a tensor cut along both would have cells that no rank holds. On a million
    ranks and more, only axes that lie one within the other are known to be.
    """
    spans = sorted((shape.strides[a], shape.extents[a]) for a in axes if shape.strides[a])
    if all(s * n <= t for (s, n), (t, _) in pairwise(spans)):
        return True
    combinations = math.prod(n for _, n in spans)
    if combinations > shape.world or shape.world > _MAX_COUNTED:
        return False
    ranks = np.arange(shape.world, dtype=np.int64)
    number = np.zeros_like(ranks)
    for stride, extent in spans:
        number = number * extent + ranks // stride % extent
    return len(np.unique(number)) == combinations


def _world(meshes: Sequence[Mesh]) -> int:
    """Return the number of ranks, which all meshes must agree on."""
    worlds = [math.prod(a.extent for a in m.axes) for m in meshes]
    for mesh, world in zip(meshes, worlds, strict=True):
        for axis in (*mesh.axes, *mesh.local):
            if axis.extent < 1:
                raise _wrong(mesh, f"axis {axis.name} of mesh {mesh.name} has {axis.extent} parts")
        if world != worlds[0]:
            raise _wrong(
                mesh,
                f"mesh {mesh.name} has {world} ranks and mesh {meshes[0].name} has {worlds[0]}",
                "meshes of one layout are views of the same ranks",
            )
        if not 0 < world <= MAX_WORLD:
            raise _wrong(mesh, f"mesh {mesh.name} has {world} ranks", f"1 to {MAX_WORLD}")
    return worlds[0]


def _axes(mesh: Mesh) -> Iterator[tuple[str, int, int]]:
    """Yield ``(name, extent, stride)`` of all axes of a mesh."""
    seen: set[str] = set()
    stride = math.prod(a.extent for a in mesh.axes)
    found: list[tuple[str, int, int]] = []
    for axis in mesh.axes:
        stride //= axis.extent
        found += _parts(mesh, axis, stride, 0)
    for axis in mesh.local:
        if axis.parts:
            raise _wrong(mesh, f"local axis {axis.name} cannot be seen as finer axes")
        found.append((axis.name, axis.extent, 0))
    for name, extent, stride in found:
        if name in seen:
            raise _wrong(mesh, f"mesh {mesh.name} has two axes named {name}")
        seen.add(name)
        yield name, extent, stride


def _parts(mesh: Mesh, axis: MeshAxis, stride: int, depth: int) -> list[tuple[str, int, int]]:
    """Return an axis and the finer ones that it may be seen as."""
    found = [(axis.name, axis.extent, stride)]
    if not axis.parts:
        return found
    whole = math.prod(p.extent for p in axis.parts)
    if depth == _MAX_DEPTH or whole != axis.extent or min(p.extent for p in axis.parts) < 1:
        shown = " ".join(f"{p.name}:{p.extent}" for p in axis.parts)
        raise _wrong(
            mesh,
            f"axis {axis.name}:{axis.extent} cannot be seen as ({shown})",
            f"parts that multiply to {axis.extent}",
        )
    inner = axis.extent
    for part in axis.parts:
        inner //= part.extent
        found += _parts(mesh, part, stride * inner, depth + 1)
    return found


def _wrong(mesh: Mesh, message: str, wanted: str | None = None) -> UsageError:
    return UsageError(
        message, kind="lay-rule", where=f"{mesh.at.file}:{mesh.at.line}", wanted=wanted
    )
