from __future__ import annotations

import pytest
import torch

from ckptd.elastic import CanonicalGradients
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks
from tests.elastic.torch.session.elastic_loop import train

STEPS = [0, 1, 2, 3]


@pytest.mark.dist
def test_training_is_bitwise_equal_on_any_number_of_ranks() -> None:
    (alone,) = run_ranks(1, train, False, STEPS)  # with as many threads as each of several
    assert len(set(alone)) == len(STEPS)
    for world, wrapped in ((2, True), (3, False)):
        for digests in run_ranks(world, train, wrapped, STEPS):
            assert digests == alone


def _model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


def test_each_micro_batch_is_added_once() -> None:
    model = _model()
    canonical = CanonicalGradients(model.parameters(), microbatches=2)
    model(torch.ones(1, 2)).sum().backward()
    canonical.add(0)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UsageError, match="not all micro-batches"):
        canonical.reduce()
    with pytest.raises(UsageError, match="added before"):
        canonical.add(0)
    model(torch.ones(1, 2)).sum().backward()
    canonical.add(1)
    canonical.reduce()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_a_step_leaves_nothing_for_the_next() -> None:
    model = _model()
    canonical = CanonicalGradients(model.parameters(), microbatches=1)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        canonical.add(0)
        canonical.reduce()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
