"""Which nodes an agent remembers for the next life, and what the lives make of what they hear."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.save.messages import Neighbours, Request, WriterReady
from ckptd.checkpoint.save.peers import (
    MOST_AGO,
    MOST_TOLD,
    KnownNode,
    followers,
    former_nodes,
    known_node,
    older,
)


def line(count: int) -> list[str]:
    return [f"n{i:05d}" for i in range(count)]


def named(names: list[str], survivors: list[str]) -> set[str]:
    return {told for node in survivors for told in followers(names, node)}


def at(name: str, ago: int = 0, port: int = 1) -> KnownNode:
    return KnownNode(name, f"ckptd://{name}:{port}", "", "ab" * 16, ago)


def test_all_of_nine_know_all_others() -> None:
    for count in range(1, 10):
        names = line(count)
        for node in names:
            assert sorted(followers(names, node)) == [n for n in names if n != node]


@pytest.mark.parametrize(("count", "told"), [(10, 8), (100, 11), (10_000, 18), (65_536, 20)])
def test_a_report_stays_short(count: int, told: int) -> None:
    names = line(count)
    found = followers(names, names[-3])
    assert len(found) == len(set(found)) == told <= MOST_TOLD
    assert names[-3] not in found


@given(st.integers(2, 400), st.data())
def test_one_row_of_at_most_half_is_named(count: int, data: st.DataObject) -> None:
    names = line(count)
    gone = data.draw(st.integers(1, count // 2))
    first = data.draw(st.integers(0, count - 1))
    lost = {names[(first + i) % count] for i in range(gone)}
    assert lost <= named(names, [n for n in names if n not in lost])


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_rows_of_at_most_eight_are_named(gaps: list[int]) -> None:
    names = line(len(gaps) + sum(gaps))
    survivors, place = [], 0
    for gap in gaps:
        survivors.append(names[place])
        place += 1 + gap
    assert {*names} - {*survivors} <= named(names, survivors)


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1), st.randoms())
def test_the_order_of_names_says_nothing(names: list[str], random: object) -> None:
    node = names[0]
    expected = followers(names, node)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert followers(names, node) == expected


def test_who_is_there_is_no_former_node_and_the_latest_word_counts() -> None:
    told = [at("b", 1), at("c", 3), at("b", 0), at("a", 0), at("d", 2)]
    assert former_nodes({"a"}, told) == [at("b", 0), at("d", 2), at("c", 3)]
    assert former_nodes({"a"}, []) == []


def test_a_name_with_two_addresses_is_two() -> None:
    assert former_nodes((), [at("b", 0, 2), at("b", 0, 1)]) == [at("b", 0, 1), at("b", 0, 2)]


def test_no_more_former_nodes_than_are_there() -> None:
    told = [at(name, i % 3) for i, name in enumerate(line(300))]
    found = former_nodes([f"p{i}" for i in range(100)], told)
    assert len(found) == 100
    assert {node.ago for node in found} == {0}
    assert len(former_nodes(["p"], told)) == 64


def test_a_node_is_forgotten_after_some_lives() -> None:
    node: KnownNode | None = at("a")
    lives = 0
    while node is not None:
        assert node.ago == lives
        node = older(node)
        lives += 1
    assert lives == MOST_AGO + 1


def test_a_node_that_nobody_could_reach_is_not_remembered() -> None:
    good = ("n", "ckptd://10.0.0.1:7000", "ckptd://[::1]:7001", "ab" * 32)
    assert known_node(*good) == KnownNode(*good)
    assert known_node("n", "", "", "ab" * 32) is None
    assert known_node("n" * 2000, *good[1:]) is None
    assert known_node("n", "file:///etc", *good[2:]) is None


BAD: list[dict[str, object]] = [
    {"name": ""},
    {"name": "n" * 1025},
    {"memory": "s3://bucket/x"},
    {"memory": "ckptd+unix:///run/x"},
    {"local": "ckptd://user@host:1"},
    {"local": "ckptd://" + "h" * 600},
    {"secret": "a" * 1025},
    {"ago": -1},
    {"ago": MOST_AGO + 1},
]


@pytest.mark.parametrize("bad", BAD)
def test_what_an_agent_is_told_is_checked(bad: dict[str, object]) -> None:
    node = msgspec.structs.replace(at("n"), **bad)
    raw = msgspec.msgpack.encode(Neighbours((at("m"), node)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Request)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode(WriterReady(1, neighbours=(node,))), type=WriterReady
        )


def test_an_agent_is_told_of_a_bounded_number() -> None:
    nodes = tuple(at(name) for name in line(MOST_TOLD))
    raw = msgspec.msgpack.encode(Neighbours(nodes))
    assert msgspec.msgpack.decode(raw, type=Request) == Neighbours(nodes)
    raw = msgspec.msgpack.encode(Neighbours((*nodes, at("x"))))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Request)
