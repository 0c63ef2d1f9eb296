from __future__ import annotations

import pytest
import torch

from ckptd.elastic import global_tokens, scale_gradients
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks


def _mean_gradient(averaged: bool) -> list[float]:
    rank = torch.distributed.get_rank()
    x = torch.tensor([[1.0], [2.0], [6.0]])[: rank + 1 if rank == 0 else None]
    x = x if rank == 0 else x[1:]
    model = torch.nn.Linear(1, 1, bias=False)
    called = torch.nn.parallel.DistributedDataParallel(model) if averaged else model
    called(x).sum().backward()
    assert model.weight.grad is not None
    if not averaged:
        torch.distributed.all_reduce(model.weight.grad)
    scale_gradients(model.parameters(), global_tokens(len(x)), averaged=averaged)
    out: list[float] = model.weight.grad.flatten().tolist()
    return out


@pytest.mark.dist
@pytest.mark.parametrize("averaged", [True, False])
def test_each_token_weighs_the_same(averaged: bool) -> None:
    # One sample on rank 0 and two on rank 1: the mean of means would be 2.5.
    assert run_ranks(2, _mean_gradient, averaged) == [[3.0], [3.0]]


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="no rank has a token"):
        global_tokens(0)
    assert global_tokens(4) == 4
