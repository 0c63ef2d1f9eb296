"""What rank 0 announces is heard by every rank at the same call."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.runtime.announcements import Announcements
from ckptd.base.runtime.ranks import LocalBoard

Heard = list[str]


def play(
    world: int, paces: list[float | None], words: dict[int, str], lags: list[int]
) -> list[Heard]:
    """Every rank makes a call a pace; rank r is `lags[r]` calls behind rank 0."""
    board = LocalBoard(0, world)
    ranks = [
        Announcements(board),
        *(Announcements(LocalBoard(r, world, board)) for r in range(1, world)),
    ]
    heard: list[Heard] = [[] for _ in ranks]
    waiting: list[str] = []

    def decide(announced: Collection[str]) -> str:
        return waiting.pop(0) if waiting and not announced else ""

    for call in range(len(paces) + max(lags)):
        if call in words:
            waiting.append(words[call])
        for rank, lag in enumerate(lags):
            if 0 <= call - lag < len(paces):
                heard[rank].append(ranks[rank].word(decide, paces[call - lag]))
    return heard


@given(
    paces=st.lists(
        st.none() | st.sampled_from([1e-9, 0.004, 0.3, 0.9, 1.0, 60.0]), min_size=1, max_size=400
    ),
    words=st.dictionaries(st.integers(0, 100), st.sampled_from(["save", "stop", "clock"])),
    lags=st.lists(st.integers(0, 60), max_size=3),
)
def test_all_ranks_hear_the_same(
    paces: list[float | None], words: dict[int, str], lags: list[int]
) -> None:
    heard = play(len(lags) + 1, paces, words, [0, *lags])
    assert all(h == heard[0] for h in heard)
    told = [w for w in heard[0] if w]
    assert told == [words[k] for k in sorted(words)][: len(told)]


@pytest.mark.parametrize(("step_s", "most_calls"), [(None, 2), (0.1, 12), (0.001, 102), (2.0, 0)])
def test_a_word_takes_effect_soon(step_s: float | None, most_calls: int) -> None:
    for at in (50, 77, 200):
        heard = play(2, [step_s] * 400, {at: "stop"}, [0, 1])[1]
        assert 0 <= heard.index("stop") - at <= most_calls


def test_quick_steps_rarely_ask_the_board() -> None:
    class Counting(LocalBoard):
        asked = 0

        def get(self, key: str, timeout_s: float) -> bytes:
            Counting.asked += 1
            return super().get(key, timeout_s)

    first = LocalBoard(0, 2)
    zero, one = Announcements(first), Announcements(Counting(1, 2, first))
    for _ in range(1000):
        zero.word(lambda _: "", 0.01)
        one.word(lambda _: "", 0.01)
    assert Counting.asked <= 20
    assert len(first._values) <= 70


def test_alone_a_word_takes_effect_at_once() -> None:
    assert Announcements(LocalBoard()).word(lambda _: "stop", 0.01) == "stop"
