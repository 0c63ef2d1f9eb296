"""Bytes that a new layout moves; counts of layouts: tests/cli/reshard/test_relayout.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.placement import Coordinate, NodeSlot
from ckptd.reshard.moved import moved_whole


def slot(node: str, number: int, dp: int | None = None) -> NodeSlot:
    return NodeSlot(node, number, None if dp is None else Coordinate(0, dp, 0))


def test_a_newcomer_takes_the_whole_from_its_own_node_first() -> None:
    left = [slot("a", 0, 0), slot("b", 0, 1), slot("b", 1)]
    found = moved_whole(100, left, left)
    assert found.sources == {"own": 200, "node": 100, "peer": 0, "root": 0}
    assert found.sent == {}


def test_what_nobody_holds_comes_from_the_root() -> None:
    found = moved_whole(7, [slot("a", 0), slot("b", 0)], [slot("a", 0), slot("b", 0)])
    assert found.sources == {"own": 0, "node": 0, "peer": 0, "root": 14}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 1 << 50),
)
def test_every_byte_has_one_source(made: list[tuple[str, bool]], total: int) -> None:
    left = [slot(node, n, n if held else None) for n, (node, held) in enumerate(made)]
    found = moved_whole(total, left, left)
    assert sum(found.sources.values()) == total * len(left)
    assert found.sources["own"] == total * sum(held for _, held in made)
    assert sum(found.sent.values()) == found.sources["peer"]
    by_node = {s: sum(r[s] for r in found.received.values()) for s in found.sources}
    assert by_node == found.sources
