from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import Fill, Region
from ckptd.base.grids.grid import strides_of
from ckptd.lay.boxes import Run, sequence
from ckptd.lay.regions import BoxPart, BufferParts, box_parts, flat_parts, region
from ckptd.lay.resolve import ValueScope
from ckptd.lay.syntax.tree import Atom, Branch, Dim, One, Product, Split, Sum
from ckptd.types import Box
from tests.lay.meaning import Entry, dimensions, places, seq

SCOPE = ValueScope({"kv": 4, "rep": 2, "hd": 8, "h": 6, "e": 4, "f": 3}, {"tp": 2})
GROUP = Sum((Branch("q", Atom("rep")), Branch("k", One()), Branch("v", One())))
QKV = Product((Split(Atom("kv"), "tp"), GROUP, Atom("hd")))


def elements(found: BufferParts) -> dict[int, Entry]:
    """Place by place of the buffer what parts and fills say."""
    out: dict[int, Entry] = {}
    for p in found.parts:
        for ids in product(*(range(r.size) for r in p.runs)):
            at = p.start + sum(i * r.stride for i, r in zip(ids, p.runs, strict=True))
            assert at not in out
            out[at] = (p.tags, {r.axis: r.start + i for i, r in zip(ids, p.runs, strict=True)})
    for f in found.fills:
        for ids in product(*(range(n) for n, _ in f.steps)):
            at = f.start + sum(i * s for i, (_, s) in zip(ids, f.steps, strict=True))
            assert at not in out
            out[at] = f.value
    return out


def test_fused_heads() -> None:
    dims = [sequence(QKV, SCOPE, {"tp": 1}), sequence(Atom("h"), SCOPE)]
    found = box_parts(dims, Box((0, 0), (64, 6)))
    assert not found.fills
    q, k, v = found.parts
    assert [p.tags for p in found.parts] == [("q",), ("k",), ("v",)]
    assert region(q, ("l", "kv", "rep", "hd", "h"), {"l": 5}) == Region(
        Box((5, 2, 0, 0, 0), (1, 2, 2, 8, 6)), 0, (0, 192, 48, 6, 1)
    )
    assert k.start == 2 * 8 * 6
    assert v.start == 3 * 8 * 6


def test_stacked_experts_are_an_axis() -> None:
    dims = [sequence(Atom("h"), SCOPE), sequence(Product((Atom("e"), Atom("f"))), SCOPE)]
    (part,) = box_parts(dims, Box((0, 3), (6, 6))).parts
    assert region(part, ("l", "e", "f", "h"), {"l": 0}) == Region(
        Box((0, 1, 0, 0), (1, 2, 3, 6)), 0, (0, 3, 1, 6)
    )


def test_an_axis_that_nothing_speaks_of() -> None:
    with pytest.raises(KeyError):
        region(BoxPart((), (Run("h", 0, 6, 1),), 0), ("l", "h"), {})


def test_no_dimensions() -> None:
    assert box_parts([], Box((), ())) == BufferParts((BoxPart((), (), 0),), ())


@given(st.lists(dimensions(), max_size=2), st.data())
def test_same_as_the_definition(drawn: list[tuple[Dim, ValueScope]], data: st.DataObject) -> None:
    place = data.draw(st.sampled_from([None, *places()]))
    entries = [seq(dim, scope, place) for dim, scope in drawn]
    dims = [sequence(dim, scope, place) for dim, scope in drawn]
    lows = [data.draw(st.integers(0, len(e))) for e in entries]
    highs = [data.draw(st.integers(lo, len(e))) for lo, e in zip(lows, entries, strict=True)]
    box = Box(tuple(lows), tuple(hi - lo for lo, hi in zip(lows, highs, strict=True)))

    def combined(ids: tuple[int, ...]) -> Entry:
        chosen = [e[i] for e, i in zip(entries, ids, strict=True)]
        fill = next((c for c in chosen if isinstance(c, float)), None)
        if fill is not None:
            return fill
        pairs = [c for c in chosen if not isinstance(c, float)]
        # Both dimensions number their axes from zero; only positions are compared here.
        return tuple(t for tags, _ in pairs for t in tags), {
            a: i for _, axes in pairs for a, i in axes.items()
        }

    wanted = [
        combined(ids)
        for ids in product(*(range(lo, hi) for lo, hi in zip(lows, highs, strict=True)))
    ]
    strides = tuple(2 * s for s in strides_of(box.shape))
    got = elements(box_parts(dims, box, strides, 3))
    assert got == {3 + 2 * i: e for i, e in enumerate(wanted)}
    lo = data.draw(st.integers(0, len(wanted)))
    hi = data.draw(st.integers(lo, len(wanted)))
    got = elements(flat_parts(dims, box, lo, hi, 5))
    assert got == {5 + i: e for i, e in enumerate(wanted[lo:hi])}


def test_numel() -> None:
    assert Fill(((2, 8), (3, 1)), 0, 0.0).numel == 6
    assert BoxPart((), (Run("h", 0, 6, 1), Run("e", 1, 2, 9)), 0).numel == 12
