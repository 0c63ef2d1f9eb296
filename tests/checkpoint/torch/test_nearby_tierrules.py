"""Which tiers a save goes to: by step, by the root's rule, by clock, alike on every rank."""

from __future__ import annotations

import threading

import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.root.policy import Every
from ckptd.checkpoint.save.tiers import Local, Memory, Peer, Tier
from ckptd.checkpoint.torch import nearby as tierrules
from ckptd.checkpoint.torch.nearby import TierRules


def due(rules: TierRules, steps: range, *, root_every: int) -> dict[int, tuple[str, ...]]:
    found = {}
    for step in steps:
        near = rules.due(step, step % root_every == 0, forced=False)
        rules.saved(step, near)
        if near:
            found[step] = near
    return found


def test_each_tier_follows_its_own_rule_or_the_roots() -> None:
    rules = TierRules([Local("x", every=4), Peer(), Memory(every=1)], LocalBoard())
    assert due(rules, range(1, 9), root_every=3) == {
        1: ("memory",),
        2: ("memory",),
        3: ("memory", "peer"),
        4: ("memory", "local"),
        5: ("memory",),
        6: ("memory", "peer"),
        7: ("memory",),
        8: ("memory", "local"),
    }


def test_forced_is_everything_and_no_tiers_are_nothing() -> None:
    rules = TierRules([Memory(every=100), Peer(every=100)], LocalBoard())
    assert rules.due(1, False, forced=True) == ("memory", "peer")
    assert TierRules([], LocalBoard()).due(1, True, forced=True) == ()


def test_steps_begin_anew_where_one_was_loaded() -> None:
    rules = TierRules([Memory(every=Every(steps=5))], LocalBoard())
    rules.loaded(5)
    assert rules.due(5, False, forced=False) == ()
    assert due(rules, range(6, 11), root_every=99) == {10: ("memory",)}


@pytest.mark.parametrize("world", [1, 3])
def test_by_clock_every_rank_goes_along_with_rank_0(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr(tierrules.time, "monotonic", lambda: clock)
    tiers: list[Tier] = [Memory(every=1), Local("x", every=Every(minutes=1.0))]
    board = LocalBoard(0, world)
    boards = [board, *(LocalBoard(rank, world, board) for rank in range(1, world))]
    ranks = [TierRules(tiers, board) for board in boards]
    said: list[list[tuple[str, ...]]] = [[] for _ in ranks]

    def call(rank: int, step: int) -> None:
        near = ranks[rank].due(step, False, forced=False)
        ranks[rank].saved(step, near)
        said[rank].append(near)

    for step in range(1, 61):
        clock += 10.0
        threads = [threading.Thread(target=call, args=(rank, step)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(s == said[0] for s in said)
    times = sum("local" in near for near in said[0])
    assert 6 <= times <= 10, "once a minute for ten minutes"
