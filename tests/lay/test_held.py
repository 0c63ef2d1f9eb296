from __future__ import annotations

import numpy as np
from hypothesis import given

from ckptd.lay.boxes import sequence
from ckptd.lay.held import Held, held, split_axes
from ckptd.lay.resolve import ValueScope
from ckptd.lay.syntax.tree import Atom, Branch, Dim, Even, Number, Pad, Split, Sum
from tests.lay.meaning import EXTENTS, dimensions, places, seq

SCOPE = ValueScope({"f": 7, "v": 10}, {"tp": 2, "dp": 3})


def all_held(dim: Dim, scope: ValueScope) -> Held:
    coordinates = {a: np.array([p[a] for p in places()]) for a in EXTENTS}
    return held(dim, scope, coordinates, len(places()))


@given(dimensions())
def test_same_as_the_definition(drawn: tuple[Dim, ValueScope]) -> None:
    dim, scope = drawn
    found = all_held(dim, scope)
    stored = seq(dim, scope, None)
    assert found.extent == len(stored) == sequence(dim, scope).length
    for i, place in enumerate(places()):
        local = seq(dim, scope, place)
        assert found.lengths[i] == len(local)
        seen = set()
        for k in np.flatnonzero(found.who == i):
            for j in range(int(found.size[k])):
                at = int(found.local[k]) + j
                assert local[at] == stored[int(found.stored[k]) + j]
                seen.add(at)
        missed = [e for at, e in enumerate(local) if at not in seen]
        # Only fills inside of a split have no place in the stored sequence.
        assert all(isinstance(e, float) for e in missed)


@given(dimensions())
def test_cells_tile_the_dimension(drawn: tuple[Dim, ValueScope]) -> None:
    dim, scope = drawn
    found = all_held(dim, scope)
    assert found.axis.extent == found.extent
    for i in range(len(places())):
        rows = found.who == i
        cells, local = found.cells_of(i)
        starts = found.cuts[cells]
        wanted = [
            (s + j, at + j)
            for s, at, n in zip(
                found.stored[rows], found.local[rows], found.size[rows], strict=True
            )
            for j in range(n)
        ]
        sizes = found.cuts[cells + 1] - starts if len(cells) else starts
        got = [
            (s + j, at + j) for s, at, n in zip(starts, local, sizes, strict=True) for j in range(n)
        ]
        assert got == wanted


def test_uneven_nested() -> None:
    dim = Split(Split(Atom("f"), "tp", Even("ceil")), "dp", Even("ceil"))
    assert split_axes(dim) == ("tp", "dp")
    coordinates = {"tp": np.repeat(np.arange(2), 3), "dp": np.tile(np.arange(3), 2)}
    found = held(dim, SCOPE, coordinates, 6)
    assert found.stored.tolist() == [0, 2, 4, 5, 6]
    assert found.size.tolist() == [2, 2, 1, 1, 1]
    assert found.lengths.tolist() == [2, 2, 0, 1, 1, 1]


def test_gate_and_up_cells() -> None:
    dim = Sum((Branch("g", Split(Atom("v"), "tp")), Branch("u", Split(Atom("v"), "tp"))))
    found = held(dim, SCOPE, {"tp": np.arange(2)}, 2)
    assert found.axis.runs == ((5, 4),)
    assert found.cells_of(1)[0].tolist() == [1, 3]
    assert found.cells_of(1)[1].tolist() == [0, 5]
    assert found.holders(2).tolist() == [0]


def test_fills_that_nobody_holds() -> None:
    found = held(Pad(Split(Atom("v"), "tp"), Number(8)), SCOPE, {"tp": np.arange(2)}, 2)
    assert found.lengths.tolist() == [8, 8]
    assert found.axis.runs == ((5, 2), (6, 1))
    assert found.holders(2).tolist() == []
