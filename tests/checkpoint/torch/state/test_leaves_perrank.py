from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptd.checkpoint.format import codec, reseed
from ckptd.checkpoint.torch.state.leaves import (
    DROP,
    PerRank,
    PerRankLeaf,
    Reseed,
    derive_seed,
    put_nothing,
)
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.errors import CorruptError, MismatchError, UsageError

HELD = [1]


def ask(on_change: Any, values: list[Any], rank: int, world: int, reduce: Any = None) -> Any:
    read = values.__getitem__
    return leaf(on_change, reduce).choose(read, saved_world=len(values), rank=rank, world=world)


def leaf(on_change: Any, reduce: Any) -> PerRankLeaf:
    return PerRankLeaf("data", None, "data", "state['data']", on_change, reduce, put_nothing, None)


@pytest.mark.parametrize("on_change", ["error", "drop", "reseed", "reduce"])
def test_in_the_same_world_each_rank_gets_its_own(on_change: str) -> None:
    assert [ask(on_change, [10, 20, 30], r, 3, sum) for r in range(3)] == [10, 20, 30]


def test_in_the_same_world_only_the_own_value_is_read() -> None:
    asked: list[int] = []

    def read(rank: int) -> int:
        asked.append(rank)
        return rank

    leaf("reduce", sum).choose(read, saved_world=4, rank=2, world=4)
    assert asked == [2]


def test_error_names_the_value_and_both_worlds() -> None:
    with pytest.raises(MismatchError) as caught:
        ask("error", [1, 2], 0, 3)
    assert (caught.value.message, caught.value.where) == (
        "a per-rank value does not fit another number of ranks",
        "data",
    )
    assert "2 ranks" in str(caught.value.wanted)
    assert "3 ranks" in str(caught.value.found)


def test_drop_keeps_the_live_value() -> None:
    assert ask("drop", [1, 2], 0, 3) is DROP


def test_reduce_is_given_all_values_by_rank() -> None:
    assert ask("reduce", [3, 1, 2], 0, 2, lambda values: values) == [3, 1, 2]


def test_reseed_gives_each_rank_another_seed_and_the_same_again() -> None:
    seeds = [ask("reseed", [11, 12], r, 3) for r in range(3)]
    assert seeds == [ask("reseed", [11, 12], r, 3) for r in range(3)]
    assert all(isinstance(s, Reseed) and 0 <= s.seed < 2**63 for s in seeds)
    assert len({s.seed for s in seeds}) == 3


def test_reseed_moves_on_with_what_was_saved() -> None:
    assert ask("reseed", [11, 12], 0, 3) != ask("reseed", [13, 12], 0, 3)


def test_streams_that_all_ranks_shared_stay_shared() -> None:
    state = torch.Generator().manual_seed(5).get_state()
    for rank in range(3):
        assert torch.equal(ask("reseed", [state, state.clone()], rank, 3), state)


def test_a_single_saved_stream_is_not_given_to_many() -> None:
    assert len({ask("reseed", [7], r, 4) for r in range(4)}) == 4


def marked(name: str, value: Any) -> Any:
    """Return what a load decodes where a reshard has been."""
    return codec.decode(reseed.marked(name, value), "data")


def test_what_a_reshard_left_to_the_load_is_done() -> None:
    assert ask("drop", [marked(reseed.DROP, None)], 0, 1) is DROP
    assert ask("reseed", [marked(reseed.RESEED, 5)] * 2, 1, 2) == Reseed(5)
    gathered = [marked(reseed.REDUCE, [3, 1, 2])] * 2
    assert ask("reduce", gathered, 1, 2, sum) == 6
    assert ask("reduce", gathered, 1, 4, sum) == 6
    with pytest.raises(MismatchError) as caught:
        ask("drop", gathered, 1, 2)
    assert "values of several ranks need a reduction" in caught.value.message


@pytest.mark.parametrize("values", [[11, 12], [[HELD, HELD], [HELD]]])
def test_a_reshard_draws_the_seeds_that_a_load_would(values: list[Any]) -> None:
    drawn = [reseed.derive_seed(codec.encode(values[0], shared=True), r, 3) for r in range(3)]
    assert [ask("reseed", values, r, 3).seed for r in range(3)] == drawn


@pytest.mark.parametrize(
    ("name", "value"), [(reseed.RESEED, "5"), (reseed.RESEED, -1), (reseed.REDUCE, 5)]
)
def test_marks_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(CorruptError):
        marked(name, value)


def test_seeds_come_from_any_savable_value() -> None:
    state = torch.Generator().manual_seed(5).get_state()
    assert derive_seed(state, 0, 2) != derive_seed(state, 1, 2)
    assert derive_seed({"a": (1, 2)}, 0, 2) == derive_seed({"a": (1, 2)}, 0, 2)


class Stream:
    def reseed(self, seed: int) -> None:
        self.seed = seed


@pytest.mark.parametrize("value", [3, torch.Generator(), Rng(), Stream()], ids=type)
def test_what_can_be_reseeded(value: object) -> None:
    assert PerRank(value, on_change="reseed").value is value


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (1, {"on_change": "forget"}),
        (1, {"on_change": "reduce"}),
        (1, {"on_change": "drop", "reduce": sum}),
        ("text", {"on_change": "reseed"}),
        (True, {"on_change": "reseed"}),
        ({"pos": 1}, {"on_change": "reseed"}),
    ],
)
def test_wrong_declarations(value: Any, options: Any) -> None:
    with pytest.raises(UsageError) as caught:
        PerRank(value, **options)
    assert caught.value.message in (
        "a value of this type cannot be reseeded",
        'reduce= and on_change="reduce" belong together',
        "unknown on_change",
    )
