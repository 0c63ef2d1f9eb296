from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.boxes import DimBox, DimFill, Run, boxes, length
from ckptd.lay.resolve import ValueScope
from ckptd.lay.syntax.tree import Atom, Branch, Dim, Number, One, Pad, Product, Split, Sum
from tests.lay.meaning import dimensions, elements, places, seq

KV, REP, HD, F = Atom("kv"), Atom("rep"), Atom("hd"), Atom("f")
SCOPE = ValueScope({"kv": 8, "rep": 4, "hd": 16, "f": 24}, {"tp": 2, "dp": 3})
QKV = Product(
    (Split(KV, "tp"), Sum((Branch("q", REP), Branch("k", One()), Branch("v", One()))), HD)
)


def test_fused_heads_of_megatron() -> None:
    n = length(QKV, {"tp": 1}, SCOPE)
    assert n == 4 * 6 * 16
    group = 6 * 16
    assert boxes(QKV, {"tp": 1}, 0, n, SCOPE) == [
        DimBox(("q",), (Run("kv", 4, 4, group), Run("rep", 0, 4, 16), Run("hd", 0, 16, 1)), 0),
        DimBox(("k",), (Run("kv", 4, 4, group), Run("hd", 0, 16, 1)), 64),
        DimBox(("v",), (Run("kv", 4, 4, group), Run("hd", 0, 16, 1)), 80),
    ]


def test_gate_and_up() -> None:
    fused = Sum((Branch("g", Split(F, "tp")), Branch("u", Split(F, "tp"))))
    assert boxes(fused, {"tp": 1}, 0, 24, SCOPE) == [
        DimBox(("g",), (Run("f", 12, 12, 1),), 0),
        DimBox(("u",), (Run("f", 12, 12, 1),), 12),
    ]
    raw = Split(Sum((Branch("g", F), Branch("u", F))), "dp")
    assert boxes(raw, {"dp": 1}, 0, 16, SCOPE) == [
        DimBox(("g",), (Run("f", 16, 8, 1),), 0),
        DimBox(("u",), (Run("f", 0, 8, 1),), 8),
    ]


def test_padded_rows() -> None:
    padded = Split(Pad(F, Number(32), 7.0), "tp")
    assert boxes(padded, {"tp": 1}, 4, 16, SCOPE) == [
        DimBox((), (Run("f", 20, 4, 1),), 4),
        DimFill(((8, 1),), 8, 7.0),
    ]


def test_a_fill_inside_of_a_product_is_strided() -> None:
    dim = Product((KV, Pad(REP, Number(6)), HD))
    found = boxes(dim, None, 0, 8 * 6 * 16, SCOPE)
    assert found[1] == DimFill(((8, 96), (32, 1)), 64, 0.0)


def test_an_interval_of_three_axes_is_five_boxes() -> None:
    dim = Product((KV, REP, HD))
    assert len(boxes(dim, None, 3, 8 * 64 - 3, SCOPE)) == 5


def test_refined_atom() -> None:
    scope = ValueScope(
        {"two": 2, "half": 4, "h": 3}, {}, {"hd": Product((Atom("two"), Atom("half")))}
    )
    assert boxes(Atom("hd"), None, 2, 8, scope) == [
        DimBox((), (Run("two", 0, 1, 4), Run("half", 2, 2, 1)), 2),
        DimBox((), (Run("two", 1, 1, 4), Run("half", 0, 4, 1)), 4),
    ]


@given(dimensions(), st.data())
def test_same_as_the_definition(drawn: tuple[Dim, ValueScope], data: st.DataObject) -> None:
    dim, scope = drawn
    place = data.draw(st.sampled_from([None, *places()]))
    entries = seq(dim, scope, place)
    assert length(dim, place, scope) == len(entries)
    lo = data.draw(st.integers(0, len(entries)))
    hi = data.draw(st.integers(lo, len(entries)))
    wanted = {i: entries[i] for i in range(lo, hi)}
    assert elements(boxes(dim, place, lo, hi, scope)) == wanted


def test_out_of_bounds() -> None:
    with pytest.raises(IndexError):
        boxes(KV, None, 0, 9, SCOPE)


def test_what_is_not_known() -> None:
    with pytest.raises(UsageError, match="size of nobody"):
        boxes(Atom("nobody"), None, 0, 0, SCOPE)
    with pytest.raises(UsageError, match="coordinate"):
        boxes(QKV, {}, 0, 0, SCOPE)
    with pytest.raises(UsageError, match="zero"):
        boxes(Pad(KV, Number(0)), {}, 0, 0, SCOPE)


def test_hostile_dimensions() -> None:
    deep: Dim = KV
    for _ in range(200):
        deep = Product((deep,))
    with pytest.raises(UsageError, match="too deeply"):
        length(deep, None, SCOPE)
    with pytest.raises(UsageError, match="longer"):
        length(Product((KV,) * 30), None, SCOPE)
    two = Sum((Branch("a", One()), Branch("b", One())))
    with pytest.raises(UsageError, match="ways"):
        length(Product((two,) * 20), None, SCOPE)
