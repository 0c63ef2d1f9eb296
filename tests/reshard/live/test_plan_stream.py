"""Both ends of a stream come to the same elements in the same order, whatever their blocks are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ckptd.base.grids.block import Block
from ckptd.lay.live import Transfers
from ckptd.reshard.live.plan import (
    PartBlock,
    SegmentCopies,
    SegmentWindow,
    StreamSegment,
    Takings,
    messages,
    ordered,
)
from tests.lay.test_copies import composed

MeshPositions = list[tuple[int, int]]

PAIRS = pytest.mark.parametrize(
    ("source", "target"), [("mg", "tf"), ("mg-bucket", "fsdp1"), ("hf", "raw")]
)


def places(segment: StreamSegment, lo: int, hi: int) -> MeshPositions:
    """Return source and target of each element, in the order of the stream."""
    out: MeshPositions = []
    for chunk in ordered(segment, lo, hi):
        if isinstance(chunk, PartBlock):
            b = chunk.block
            for ids in product(*(range(n) for n in b.shape)):
                source = b.source_start + sum(
                    i * s for i, s in zip(ids, b.source_strides, strict=True)
                )
                target = b.target_start + sum(
                    i * s for i, s in zip(ids, b.target_strides, strict=True)
                )
                out.append((source, target))
        else:
            out += zip(chunk.source.tolist(), chunk.target.tolist(), strict=True)
    return out


@PAIRS
def test_two_ends_of_every_stream(source: str, target: str) -> None:
    transfers = Transfers(composed(source, target))
    given = {
        (rank, sent.rank, sent.source, sent.target): StreamSegment(
            sent.source, sent.target, SegmentCopies((sent.blocks,))
        )
        for rank in range(transfers.composition.source.mesh.world)
        for sent in transfers.sent(rank)
    }
    taken: dict[tuple[int, int, str, str], list[tuple[Block, ...]]] = {}
    for rank in range(transfers.composition.target.mesh.world):
        for tensor, plan in transfers.local(rank):
            for copy in plan.copies:
                taken.setdefault((copy.rank, rank, copy.name, tensor.name), []).append(copy.blocks)
    assert given.keys() == taken.keys()
    for key, segment in given.items():
        other = StreamSegment(key[2], key[3], SegmentCopies(tuple(taken[key])))
        assert (segment.numel, segment.span) == (other.numel, other.span)
        assert list(messages([segment], [4], 64)) == list(messages([other], [4], 64))
        lo, hi = segment.span
        for start in range(lo, hi, 5):
            found = places(segment, start, min(hi, start + 5))
            assert found == places(other, start, min(hi, start + 5))
            targets = [t for _, t in found]
            assert targets == sorted(targets)
        assert len(places(segment, lo, hi)) == segment.numel


@PAIRS
def test_what_is_listed_for_a_giver_is_what_it_has(source: str, target: str) -> None:
    transfers = Transfers(composed(source, target))
    states = frozenset(transfers.composition.target.states)
    for rank in range(transfers.composition.target.mesh.world):
        wanted: dict[int, dict[tuple[str, str], list[object]]] = {}
        for tensor, plan in transfers.local(rank):
            for c in plan.copies:
                listed = wanted.setdefault(c.rank, {}).setdefault((tensor.name, c.name), [])
                listed.append((c.blocks, c.values, c.of))
        takings = Takings(transfers, rank, states, {})
        assert takings.givers == sorted(wanted)
        for giver in takings.givers:
            found = {
                (i.segment.target, i.segment.source): [
                    (blocks, *part)
                    for blocks, part in zip(i.segment.copies.parts, i.parts, strict=True)
                ]
                for i in takings.of(giver)
            }
            assert list(found) == sorted(wanted[giver])
            assert found == wanted[giver]


def test_layers_share_their_copies() -> None:
    transfers = Transfers(composed("hf", "raw"))
    takings = Takings(transfers, 0, frozenset({""}), {})
    listed = [i for giver in takings.givers for i in takings.of(giver)]
    layers = {i.segment.source.replace(".0.", ".1.") for i in listed if ".0." in i.segment.source}
    assert layers
    assert layers <= {i.segment.source for i in listed}
    assert len({id(i.segment.copies) for i in listed}) <= len(listed) - len(layers)


def test_interleaved_rows_are_found_row_by_row() -> None:
    even = Block((50, 100), 0, (100, 1), 0, (200, 1))
    odd = Block((50, 100), 5000, (100, 1), 100, (200, 1))
    segment = StreamSegment("a", "b", SegmentCopies(((even,), (odd,))))
    found = list(ordered(segment, 0, 10_000))
    assert all(isinstance(c, PartBlock) for c in found)
    assert [t for _, t in places(segment, 0, 10_000)] == list(range(10_000))


def test_single_elements_in_turn_are_listed() -> None:
    parts = tuple((Block((40_000,), i * 40_000, (1,), i, (3,)),) for i in range(3))
    segment = StreamSegment("a", "b", SegmentCopies(parts))
    targets = np.concatenate([c.target for c in ordered(segment, 0, 120_000)])  # type: ignore[union-attr]
    assert np.array_equal(targets, np.arange(120_000))


def test_messages_are_full_and_never_too_long() -> None:
    segments = [
        StreamSegment("s", f"t{i}", SegmentCopies(((Block((n,), 0, (1,), 0, (1,)),),)))
        for i, n in enumerate([10, 1000, 3, 5000, 1, 70, 64])
    ]
    sizes = [4, 4, 2, 8, 16, 0, 1]
    limit = 4096
    seen: dict[int, list[SegmentWindow]] = {}
    found = list(messages(segments, sizes, limit))
    for message in found:
        assert sum(-(-w.numel * sizes[w.segment] // 16) * 16 for w in message) <= limit
        for window in message:
            seen.setdefault(window.segment, []).append(window)
    assert 5 not in seen
    for number, windows in seen.items():
        assert sum(w.numel for w in windows) == segments[number].numel
        assert [w.lo for w in windows] == sorted(w.lo for w in windows)
    assert len(found) <= 14
