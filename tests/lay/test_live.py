from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from ckptd.base.grids.block import Block
from ckptd.lay.copies import compose
from ckptd.lay.holders import HolderSet, choose
from ckptd.lay.live import Transfers
from ckptd.lay.local import local_tensors
from tests.lay.test_copies import LAYOUTS, composed
from tests.lay.world import NOTHING, Elements, bound, local_elements, view

PAIRS = [
    ("mg", "tf"),
    ("mg-bucket", "tf"),
    ("tf", "mg-bucket"),
    ("z3", "mg-bucket"),
    ("mg-bucket", "fsdp1"),
    ("raw", "mg"),
    ("hf", "raw"),
    ("mg-bucket", "mg"),
]


def execute(transfers: Transfers, rank: int) -> dict[str, Elements]:
    """Return the tensors and buffers of a rank of the target."""
    source = transfers.composition.source
    held = {
        r: {t.name: local_elements(source, t, r) for t in local_tensors(source, r)}
        for r in range(source.mesh.world)
    }
    out = {}
    for tensor, plan in transfers.local(rank):
        target = np.full(plan.numel, NOTHING, dtype=object)
        for copy in plan.copies:
            given = held[copy.rank][copy.name]
            for b in copy.blocks:
                into = view(target, b.target_start, b.shape, b.target_strides)
                assert (into == NOTHING).all()
                into[...] = view(given, b.source_start, b.shape, b.source_strides)
        for f in plan.fills:
            shape, strides = tuple(n for n, _ in f.steps), tuple(s for _, s in f.steps)
            view(target, f.start, shape, strides)[...] = f.value
        out[tensor.name] = target
    return out


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_is_taken(source: str, target: str) -> None:
    c = composed(source, target)
    transfers = Transfers(c)
    for rank in range(c.target.mesh.world):
        found = execute(transfers, rank)
        for tensor in local_tensors(c.target, rank):
            wanted = local_elements(c.target, tensor, rank)
            assert found[tensor.name].tolist() == wanted.tolist(), tensor.name


def places(b: Block) -> list[tuple[int, int]]:
    return [
        (
            b.source_start + sum(i * s for i, s in zip(ids, b.source_strides, strict=True)),
            b.target_start + sum(i * s for i, s in zip(ids, b.target_strides, strict=True)),
        )
        for ids in product(*(range(n) for n in b.shape))
    ]


def moved(transfers: Transfers) -> tuple[Counter[object], Counter[object]]:
    """Every element that is taken, and every one that is given: from where to where."""
    c = transfers.composition
    taken: Counter[object] = Counter(
        (copy.rank, copy.name, rank, tensor.name, *at)
        for rank in range(c.target.mesh.world)
        for tensor, plan in transfers.local(rank)
        for copy in plan.copies
        for b in copy.blocks
        for at in places(b)
    )
    given: Counter[object] = Counter(
        (rank, s.source, s.rank, s.target, *at)
        for rank in range(c.source.mesh.world)
        for s in transfers.sent(rank)
        for b in s.blocks
        for at in places(b)
    )
    return taken, given


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_both_sides_agree(source: str, target: str) -> None:
    taken, given = moved(Transfers(composed(source, target)))
    assert set(taken.values()) == {1}
    assert given == taken


def test_ranks_that_share_a_buffer_may_number_it_differently() -> None:
    text = """
    mesh A = pp:2 tp:2
    space s { a[x] b[x] }
    layout mine of s on A {
      a = a[x] on pp=0
      b = b[x@tp]
      flat bucket 100 @tp of params
      flat bucket 100 @pp of params
    }
    """
    found = bound(text, "mine", x=8)
    transfers = Transfers(compose(found, found))
    names = [[t.name for t, _ in transfers.local(r)] for r in (0, 2)]
    assert names == [["flat.0.params", "flat.1.params"], ["flat.0.params"]]
    taken, given = moved(transfers)
    assert given == taken


def test_a_rank_takes_from_itself_what_it_has() -> None:
    c = composed("mg", "mg")
    for rank in range(c.target.mesh.world):
        for _, plan in Transfers(c).local(rank):
            assert {copy.rank for copy in plan.copies} == {rank}


def test_replicas_share_the_work() -> None:
    space = "space s { n[h] }"
    source = bound(f"mesh A = dp:8\n{space}\nlayout a of s on A {{ n = n[h] }}", "a", h=4)
    text = f"mesh B = dp:64\n{space}\nlayout b of s on B {{ m = n[h] }}"
    transfers = Transfers(compose(source, bound(text, "b", h=4)))
    givers = Counter(
        copy.rank for r in range(64) for _, plan in transfers.local(r) for copy in plan.copies
    )
    assert set(givers) == set(range(8))
    assert max(givers.values()) < 20


def test_averages_take_from_all() -> None:
    space = "space s { n[f h] follow m }"
    source = bound(
        f"mesh A = dp:3 tp:2\n{space}\nlayout a of s on A {{ n = n[f@tp h] avg(dp) }}",
        "a",
        f=4,
        h=2,
    )
    target = bound(f"mesh B = dp:4\n{space}\nlayout b of s on B {{ m = n[f@dp h] }}", "b", f=4, h=2)
    transfers = Transfers(compose(source, target))
    for rank in range(4):
        for _, plan in transfers.local(rank):
            tp = rank // 2
            assert sorted(c.rank for c in plan.copies) == [tp, tp + 2, tp + 4]
            assert all(c.of == 3 and c.values is not None for c in plan.copies)
    sent = [(r, s.rank) for r in range(6) for s in transfers.sent(r) if s.source == "n"]
    assert sent == [(r, t) for r in range(6) for t in range(4) if t // 2 == r % 2]


def test_layouts_are_all_used() -> None:
    assert {n for pair in PAIRS for n in pair} == set(LAYOUTS)


@pytest.mark.parametrize("free", [(), ((8, 3), (64, 4))])
def test_one_rank_alone_finds_the_holder_that_it_finds_among_many(
    free: tuple[tuple[int, int], ...],
) -> None:
    holders = HolderSet(np.array([5, 2, 1]), free)
    ranks = np.arange(400)
    for nearest in (ranks, np.full(400, 2)):
        many = choose(holders, ranks, nearest, (3, 2**40, 7))
        one = [choose(holders, ranks[i : i + 1], nearest[i : i + 1], (3, 2**40, 7)) for i in ranks]
        assert many.tolist() == np.concatenate(one).tolist()
        assert set(many.tolist()) <= set(holders.all().tolist())
    assert choose(HolderSet(np.array([7]), ()), ranks, ranks, (1,)).tolist() == [7] * 400
