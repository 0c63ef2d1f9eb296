from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.grid import Axis
from ckptd.errors import UsageError
from ckptd.lay.flats import FlatSlot, cell_cuts, flat_axis, pack, shares
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from ckptd.types import Box
from tests.lay.table import Row, bucket_table
from tests.lay.world import bound


def test_a_bucket_is_closed_once_it_is_full() -> None:
    packed = pack((100, 30, 20, 250, 10), 128, 64, 96)
    assert packed.lengths == (192, 384, 96)
    assert packed.slots == (
        FlatSlot(0, 0, 100, 192),
        FlatSlot(0, 128, 30, 192),
        FlatSlot(1, 0, 20, 384),
        FlatSlot(1, 64, 250, 384),
        FlatSlot(2, 0, 10, 96),
    )


def test_one_buffer_or_one_for_each() -> None:
    assert pack((5, 0, 7), None, 4, 2).lengths == (16,)
    assert [s.offset for s in pack((5, 0, 7), None, 4, 2).slots] == [0, 8, 8]
    assert pack((5, 0, 7), 0, 4, 2).lengths == (6, 0, 8)
    assert pack((), 10, 1, 1).lengths == ()


def test_alignment_to_nothing() -> None:
    with pytest.raises(UsageError, match="alignment"):
        pack((1,), 1, 0, 1)


def test_too_large() -> None:
    with pytest.raises(UsageError, match="too large"):
        pack((2**62, 2**62, 2**62), None, 1, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), max_size=3))
def test_cell_cuts(dims: list[tuple[int, int, int]]) -> None:
    shape = tuple(a + b for a, b, _ in dims)
    cell = Box(tuple(b for _, b, _ in dims), tuple(min(a, n) for a, _, n in dims))
    inside = [
        all(o <= i < e for i, o, e in zip(ids, cell.offset, cell.end, strict=True))
        for ids in product(*(range(n) for n in shape))
    ]
    positions = np.arange(len(inside) + 1)
    assert cell_cuts(cell, shape, positions).tolist() == [sum(inside[:p]) for p in positions]


def test_parts_without_elements_are_no_pieces() -> None:
    axis, whose = flat_axis(np.array([0, 0, 3, 3, 8]))
    assert axis == Axis(((3, 1), (5, 1)))
    assert whose.tolist() == [1, 3]
    assert flat_axis(np.array([0, 0]))[0] == Axis(((0, 1),))


def test_shares() -> None:
    assert shares(10, 25, np.array([0, 16, 32, 48])).tolist() == [0, 0, 7, 10]


# Megatron's distributed optimizer, as its source does it: parameters in reverse order, each at a
# multiple of 64, a bucket closed at 512 elements or more and filled to lcm(dp, 128).
MEGATRON = """
mesh M = pp:2 dp:2 tp:2
space s { E[v h] L{l}.w[f h] L{l}.n[h] nf[h] follow m }
let D = layers.{#l@pp}
layout mg of s on M {
  emb = E[v@tp h] on pp=0
  D.n = L{l}.n[h]
  D.w = L{l}.w[f@tp h]
  norm = nf[h] on pp=last
  flat bucket 512 @dp of m order reverse start/64 end/lcm(dp,128)
}
"""
SIZES = {"l": 4, "v": 60, "h": 10, "f": 50}


def megatron_buckets(params: list[tuple[str, int]], size: int) -> list[Row]:
    """Return the table of `_ParamAndGradBuffer`: one long buffer that is cut into buckets."""
    rows = []
    begin = bucket = 0
    end = 0
    for name, numel in reversed(params):
        start = -(-end // 64) * 64
        end = start + numel
        rows.append(Row(bucket, name, start - begin, end - begin))
        if end - begin >= size:
            end = begin = -(-end // 128) * 128
            bucket += 1
    return rows


def test_buckets_of_megatron() -> None:
    form = StoredForm(bound(MEGATRON, "mg", **SIZES))
    layers = [(f"layers.{i}.{k}", n) for i in range(2) for k, n in (("n", 10), ("w", 250))]
    first = [("emb", 300), *layers]
    assert list(bucket_table(form, 0, "m")) == megatron_buckets(first, 512)
    assert list(bucket_table(form, 7, "m")) == megatron_buckets([*layers, ("norm", 10)], 512)
    assert bucket_table(form, 0, "") == ()


def test_what_a_rank_holds_of_its_buckets() -> None:
    form = StoredForm(bound(MEGATRON, "mg", **SIZES))
    for rank in range(8):
        flats = [t for t in local_tensors(form, rank) if t.name.startswith("flat")]
        assert [t.name for t in flats] == [f"flat.{i}.m" for i in range(len(flats))]
        for t in flats:
            assert t.shape[0] % 64 == 0
            ends = [0, *(p.at + p.hi - p.lo for p in t.pieces)]
            assert all(p.at >= e for p, e in zip(t.pieces, ends, strict=False))
            assert ends[-1] <= t.numel


def test_layers_are_packed_by_number_wherever_chunks_have_them() -> None:
    # Those of the first model chunk went before layer 0, which is in the second.
    text = """
mesh M = dp:2 local vpp:2
space s { L{l}.w[h] follow m }
layout mg of s on M {
  layers.{l@vpp:at[1 0 0]}.w = L{l}.w[h]
  flat bucket 1 @dp of m
}
"""
    form = StoredForm(bound(text, "mg", l=3, h=4))
    assert [row.name for row in bucket_table(form, 0, "m")] == [f"layers.{n}.w" for n in range(3)]


def test_ranks_of_an_axis_have_one_table() -> None:
    form = StoredForm(bound(MEGATRON, "mg", **SIZES))
    table = bucket_table(form, 3, "m")
    assert table
    assert bucket_table(form, 1, "m") == table


def test_groups() -> None:
    text = MEGATRON.replace(
        "flat bucket 512 @dp of m order reverse start/64 end/lcm(dp,128)",
        "flat group(layers.{u}.*) @dp:ceil of * order module",
    )
    form = StoredForm(bound(text, "mg", **SIZES))
    rows = bucket_table(form, 0, "")
    assert [(r.buffer, r.name) for r in rows] == [
        (0, "layers.0.n"),
        (0, "layers.0.w"),
        (1, "layers.1.n"),
        (1, "layers.1.w"),
    ]
    assert [t.name for t in local_tensors(form, 0)][:3] == ["emb", "flat.0.params", "flat.1.params"]


PARTS = """
mesh M = pp:2 dp:2
space s { L{l}.w[f h] L{l}.n[h] follow m=exp_avg }
layout z of s on M {
  stored "flat.{name}" states "state.{name}.{state}"
  layers.{#l@pp}.w = L{l}.w[f h]
  layers.{#l@pp}.n = L{l}.n[h]
  FLAT
}
"""


def held(flat: str, rank: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Return by buffer which layer's elements ``[lo, hi)`` lie where; w has 15 and n has 3."""
    form = StoredForm(bound(PARTS.replace("FLAT", flat), "z", l=4, f=5, h=3))
    return {
        t.name: [(p.indexes[0], p.lo, p.hi, p.at) for p in t.pieces]
        for t in local_tensors(form, rank)
    }


def test_parts_of_several_tensors_lie_end_to_end() -> None:
    """Each is filled to an even number of elements; 8 of w and 2 of n are a rank's."""
    first = [(0, 0, 8, 0), (0, 0, 2, 8), (1, 0, 8, 10), (1, 0, 2, 18)]
    other = [(0, 8, 15, 0), (0, 2, 3, 8), (1, 8, 15, 10), (1, 2, 3, 18)]
    flat = 'flat parts @dp of * end/dp as "{buffer}"'
    assert held(flat, 0) == {"flat.0": first, "state.0.exp_avg": first}
    assert held(flat, 1)["flat.0"] == other
    assert held(flat, 3)["flat.0"] == [(i + 2, *rest) for i, *rest in other]


def test_buffers_of_parts_are_closed_when_the_first_rank_s_is_full() -> None:
    """Without filling, the second rank has 7 and 1 elements, and as many buffers."""
    flat = "flat parts 9 @dp:ceil of params"
    assert held(flat, 0)["flat.0.params"] == [(0, 0, 8, 0), (0, 0, 2, 8)]
    assert held(flat, 1)["flat.0.params"] == [(0, 8, 15, 0), (0, 2, 3, 7)]
    assert held(flat, 1)["flat.1.params"] == [(1, 8, 15, 0), (1, 2, 3, 7)]
    assert held(flat.replace("9", "8"), 1)["flat.1.params"] == [(0, 2, 3, 0), (1, 8, 15, 1)]


def test_parts_of_some_come_before_those_of_the_rest() -> None:
    how = '@dp of * end/dp as "{buffer}"'
    flats = f"flat parts(**.n) {how}; flat parts {how}"
    assert held(flats, 0)["flat.0"] == [(0, 0, 2, 0), (1, 0, 2, 2)]
    assert held(flats, 0)["flat.1"] == [(0, 0, 8, 0), (1, 0, 8, 8)]
    by_layer = 'flat parts(layers.{u}.*) @dp of params end/dp as "{u}.of.{buffer}"'
    assert list(held(by_layer, 2))[:2] == ["flat.2.of.0", "flat.3.of.1"]


def test_the_table_of_parts_is_the_rank_s_own() -> None:
    form = StoredForm(bound(PARTS.replace("FLAT", "flat parts @dp:ceil of m"), "z", l=4, f=5, h=3))
    assert bucket_table(form, 1, "m")[:3] == (
        Row(0, "layers.0.w", 0, 7),
        Row(0, "layers.0.n", 7, 8),
        Row(0, "layers.1.w", 8, 15),
    )
