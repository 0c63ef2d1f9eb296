from __future__ import annotations

from itertools import islice

import pytest
import torch

from ckptd.elastic import ElasticSampler, Schedule
from ckptd.errors import CorruptError, UsageError

SCHEDULE = Schedule(size=23, microbatch=2, microbatches=5, seed=1)


def _steps(consumed: int, world: int, steps: int) -> list[list[int]]:
    """Return what all ranks of a world take in each step, in the order of micro-batches."""
    out: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world):
        sampler = ElasticSampler(SCHEDULE, rank=rank, world=world)
        sampler.load_state_dict({"consumed": consumed})
        batches = iter(sampler)
        for step in out:
            for ids in islice(batches, len(sampler.indices)):
                step += ids
    return out


@pytest.mark.parametrize("world", [2, 3, 5])
def test_steps_are_the_same_in_any_world(world: int) -> None:
    assert _steps(0, world, 6) == _steps(0, 1, 6)


def test_a_resume_in_another_world_goes_on_with_the_next_sample() -> None:
    whole = _steps(0, 1, 6)
    assert _steps(0, 4, 2) + _steps(2 * SCHEDULE.batch, 3, 4) == whole


def test_the_state_counts_steps_done_and_not_batches_fetched() -> None:
    sampler = ElasticSampler(SCHEDULE, rank=0, world=1)
    data = torch.utils.data.TensorDataset(torch.arange(SCHEDULE.size))
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    assert len(list(islice(loader, 7))) == 7
    assert sampler.state_dict()["consumed"] == 0
    sampler.advance()
    assert sampler.state_dict()["consumed"] == SCHEDULE.batch
    assert (sampler.step, sampler.epoch) == (1, 0)
    sampler.advance()
    sampler.advance()
    assert (sampler.step, sampler.epoch) == (3, 1)


@pytest.mark.parametrize("state", [{}, {"consumed": -1}, {"consumed": "3"}, {"consumed": True}, 3])
def test_a_strange_state_is_refused(state: object) -> None:
    sampler = ElasticSampler(SCHEDULE, rank=0, world=1)
    with pytest.raises(CorruptError, match="position in the data cannot be read"):
        sampler.load_state_dict(state)


def test_a_rank_without_micro_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="more ranks than micro-batches"):
        ElasticSampler(SCHEDULE, rank=5, world=6)
