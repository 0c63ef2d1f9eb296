"""Increments arrive once each, whichever sheet or answer is lost."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ckptd.monitor.collectives import (
    CALLS,
    COLLECTIVE,
    OTHER,
    CallTable,
    Key,
    Outbox,
    Totals,
    bus_factor,
    word,
)
from ckptd.monitor.stats import Array

WIDTH = COLLECTIVE["values"].shape[0]
KEY: Key = (b"all_reduce", b"dp", 3)


def calls(number: float) -> Array:
    out = np.zeros((1, WIDTH))
    out[0, CALLS] = number
    return out


def counted(book: CallTable) -> dict[Key, float]:
    keys, values, _ = book.read()
    return dict(zip(keys, values[:, CALLS].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_missed_or_counted_twice(seed: int) -> None:
    """Through a forwarder, with sheets and answers lost on both ways, to a daemon that stays."""
    rng = random.Random(seed)
    made, passed, end = Totals(8), CallTable(), CallTable()
    ways = [(Outbox(made), passed, "agent"), (Outbox(passed.totals), end, "forwarder")]
    taken, truth = [0, 0], dict[Key, float]()
    for number in range(1, 60):
        lossy = number < 50
        key: Key = (rng.choice([b"all_reduce", b"p2p"]), b"dp", rng.randrange(3))
        if lossy:
            more = rng.randrange(4)
            made.add([key], calls(more))
            truth[key] = truth.get(key, 0) + more
        for way, (outbox, book, name) in enumerate(ways):
            rows, after = outbox.take(number, taken[way])
            if lossy and rng.random() < 0.3:
                continue
            book.take(name, number, after, rows, float(number))
            book.take(name, number, after, rows, float(number))  # a replay
            if not lossy or rng.random() < 0.7:
                taken[way] = number
    assert {k: v for k, v in counted(end).items() if v} == {k: v for k, v in truth.items() if v}
    assert not len(outbox.take(60, taken[1])[0]), "all was told"


def test_who_comes_new_is_not_told_what_others_took() -> None:
    made, first, second = Totals(8), CallTable(), CallTable()
    outbox = Outbox(made)
    made.add([KEY], calls(5))
    rows, after = outbox.take(1, 0)
    first.take("a", 1, after, rows, 0.0)
    made.add([KEY], calls(2))
    rows, after = outbox.take(2, 1)
    assert after == 1
    second.take("a", 2, after, rows, 0.0)
    assert counted(second) == {KEY: 2}


def test_keys_beyond_the_bound_are_one() -> None:
    totals = Totals(2)
    for op in (b"a", b"b", b"c", b"d", b"a"):
        totals.add([(op, b"dp", 1)], calls(1))
    assert totals.keys == [(b"a", b"dp", 1), (b"b", b"dp", 1), (OTHER, OTHER, 1)]
    assert totals.values[:, CALLS].tolist() == [2, 1, 2]


def test_recent_is_what_came_lately() -> None:
    book = CallTable()
    for number, now in itertools.pairwise(range(0, 200, 10)):
        row = np.zeros(1, COLLECTIVE)
        row["op"], row["values"] = b"p2p", calls(1)
        book.take("a", now, number, row, float(now))
    _, values, recent = book.read()
    assert values[0, CALLS] == 19
    assert 3 <= recent[0, CALLS] <= 7


@pytest.mark.parametrize(
    ("op", "size", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_reduce_coalesced", 2, 1.0),
        ("all_gather_single", 4, 0.75),
        ("reduce_scatter_single_coalesced", 4, 0.75),
        ("all_to_all_single", 4, 0.75),
        ("scatter", 4, 3.0),
        ("broadcast", 4, 1.0),
        ("p2p_any", 1, 1.0),
        ("all_reduce", 1, 0.0),
        ("barrier", 8, 0.0),
        ("unheard_of", 8, 0.0),
    ],
)
def test_factors_of_the_bus(op: str, size: int, factor: float) -> None:
    assert bus_factor(op, size) == factor


def test_words_for_labels() -> None:
    assert word("all_reduce max", 32) == b"all_reduce"
    assert word('my"gröup', 6) == b"my_gr_"
    assert word("", 8) == b""
