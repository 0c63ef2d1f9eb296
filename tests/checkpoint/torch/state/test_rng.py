from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.errors import CorruptError
from tests.checkpoint.torch.bridge import give, take


@pytest.fixture(autouse=True)
def _keep_streams() -> Iterator[None]:
    before = Rng().state_dict()
    yield
    Rng().load_state_dict(before)


def draw() -> tuple[Any, ...]:
    # Gaussians: numpy and Python keep the second of a pair.
    return (
        torch.randn(5).tolist(),
        torch.rand(3, dtype=torch.float64).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        random.random(),
    )


def test_all_streams_go_on_bit_for_bit() -> None:
    draw()
    taken = take({"rng": Rng()})
    wanted = [draw() for _ in range(3)]
    Rng().reseed(1)
    assert [draw() for _ in range(3)] != wanted
    give(taken, {"rng": Rng()})
    assert [draw() for _ in range(3)] == wanted


def test_flattening_draws_nothing() -> None:
    state = {"rng": Rng(), "model": torch.nn.Linear(3, 3), "g": torch.Generator()}
    before = Rng().state_dict()
    wanted = draw()
    Rng().load_state_dict(before)
    flatten(state)
    assert draw() == wanted


def test_another_world_reseeds_each_rank_for_itself() -> None:
    taken = take({"rng": Rng()})
    drawn = []
    for rank in (0, 1, 0):
        give(taken, {"rng": Rng()}, saved_world=1, rank=rank, world=2)
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_reseeding_sets_all_streams(seed: int) -> None:
    Rng().reseed(seed)
    first = draw()
    draw()
    Rng().reseed(seed)
    assert draw() == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("numpy"),
        lambda s: s.update(torch=b"123"),
        lambda s: s.update(python=[3, np.zeros(2, np.uint32), None]),
        lambda s: s.update(numpy=["MT19937", np.zeros(3, np.uint32), 0, 0, 0.0]),
    ],
    ids=["missing", "torch", "python", "numpy"],
)
def test_a_state_that_is_none_is_corrupt_and_changes_nothing(damage: Any) -> None:
    before = Rng().state_dict()
    wanted = draw()
    Rng().load_state_dict(before)
    state = Rng().state_dict()
    damage(state)
    with pytest.raises(CorruptError) as caught:
        Rng().load_state_dict(state)
    assert "not the state of random streams" in caught.value.message
    assert draw() == wanted
