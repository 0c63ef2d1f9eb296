"""Coordinates follow from mesh declarations, for every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.resolve import independent
from ckptd.lay.resolve.mesh import mesh_shape
from ckptd.lay.syntax.tree import Mesh, MeshAxis


def mesh(*axes: tuple[str, int], local: tuple[tuple[str, int], ...] = ()) -> Mesh:
    return Mesh("M", tuple(MeshAxis(*a) for a in axes), tuple(MeshAxis(*a) for a in local))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=30)
def test_ranks_run_through_the_axes_row_major(extents: list[int]) -> None:
    names = [f"a{i}" for i in range(len(extents))]
    shape = mesh_shape([mesh(*zip(names, extents, strict=True))])
    for rank, wanted in enumerate(itertools.product(*map(range, extents))):
        assert shape.coordinates(rank) == dict(zip(names, wanted, strict=True))
    assert shape.world == rank + 1


def test_an_axis_and_its_parts_agree_on_every_rank() -> None:
    parts = (MeshAxis("tk", 4, (MeshAxis("x", 2), MeshAxis("y", 2))), MeshAxis("tr", 3))
    shape = mesh_shape(
        [Mesh("M", (MeshAxis("dp", 2), MeshAxis("tp", 12, parts), MeshAxis("z", 2)))]
    )
    assert shape.world == 48
    for rank in range(48):
        c = shape.coordinates(rank)
        assert c["tp"] == c["tk"] * 3 + c["tr"]
        assert c["tk"] == c["x"] * 2 + c["y"]


def test_two_meshes_over_the_same_ranks() -> None:
    shape = mesh_shape(
        [
            mesh(("pp", 2), ("dp", 4), ("tp", 2)),
            mesh(("pp", 2), ("edp", 1), ("ep", 8), local=(("vpp", 3),)),
        ]
    )
    assert shape.coordinates(13) == {"pp": 1, "dp": 2, "tp": 1, "edp": 0, "ep": 5}
    assert shape.local == ("vpp",)


@pytest.mark.parametrize(
    ("meshes", "says"),
    [
        ([mesh(("a", 2)), mesh(("b", 3))], "3 ranks and mesh M has 2"),
        ([mesh(("a", 2), ("b", 3)), mesh(("b", 3), ("a", 2))], "axis b differs between meshes"),
        ([mesh(("a", 2), ("a", 2))], "two axes named a"),
        ([mesh(("a", 0))], "has 0 parts"),
        ([mesh(("a", 2**13), ("b", 2**13))], "ranks"),
        (
            [Mesh("M", (MeshAxis("tp", 8, (MeshAxis("tk", 4), MeshAxis("tr", 4))),))],
            r"tp:8 cannot be seen as \(tk:4 tr:4\)",
        ),
    ],
)
def test_what_is_no_mesh(meshes: list[Mesh], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        mesh_shape(meshes)
    assert caught.value.kind == "lay-rule"


def test_axes_that_depend_on_each_other() -> None:
    shape = mesh_shape(
        [
            Mesh(
                "M", (MeshAxis("dp", 3), MeshAxis("tp", 4, (MeshAxis("tk", 2), MeshAxis("tr", 2))))
            ),
            mesh(("ep", 6), ("etp", 2)),
        ]
    )
    for axes in itertools.combinations(shape.extents, 2):
        seen = {tuple(shape.coordinates(r)[a] for a in axes) for r in range(12)}
        wanted = len(seen) == shape.extents[axes[0]] * shape.extents[axes[1]]
        assert independent(shape, axes) == wanted, axes
    assert not independent(shape, ("tp", "tp"))
