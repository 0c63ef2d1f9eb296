"""The cache of plans forgets by weight and never grows beyond its limit."""

from __future__ import annotations

import threading

from ckptd.base.grids.block import Templates
from tests.processes import PATIENCE_S


def test_the_longest_unused_goes_first() -> None:
    kept: Templates[str, int] = Templates(100)
    for i, key in enumerate("abcd"):
        kept.put(key, i, weight=25)
    assert kept.get("a") == 0
    kept.put("e", 4, weight=25)
    assert [kept.get(k) for k in "abcde"] == [0, None, 2, 3, 4]
    assert kept.weight == 100


def test_a_giant_is_not_kept() -> None:
    kept: Templates[str, int] = Templates(100)
    kept.put("small", 1, weight=1)
    kept.put("giant", 2, weight=26)
    assert (kept.get("small"), kept.get("giant")) == (1, None)


def test_a_value_put_again_weighs_once() -> None:
    kept: Templates[str, int] = Templates(100)
    kept.put("a", 1, weight=25)
    kept.put("a", 2, weight=10)
    assert (kept.get("a"), kept.weight) == (2, 10)
    kept.clear()
    assert (kept.get("a"), kept.weight) == (None, 0)


def test_threads_share_it() -> None:
    kept: Templates[int, int] = Templates(40)

    def work(seed: int) -> None:
        for i in range(2000):
            key = (seed * 7 + i * 13) % 97
            found = kept.get(key)
            assert found in (None, key)
            kept.put(key, key, weight=1 + key % 9)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_S)
    assert not any(t.is_alive() for t in threads)
    assert 0 < kept.weight <= 40
