"""A training loop whose result does not depend on the number of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ckptd.elastic import (
    CanonicalGradients,
    ElasticSampler,
    Schedule,
    global_tokens,
    keyed_rng,
    scale_gradients,
)

SCHEDULE = Schedule(size=37, microbatch=3, microbatches=7, seed=5)


def train(wrapped: bool, plan: list[int], start: int = 0) -> list[str]:
    """Train some steps on this world; return a digest of all parameters after each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    unused = torch.nn.Linear(2, 2)
    half = torch.nn.Linear(3, 1).to(torch.bfloat16)
    everything = [*model.parameters(), *unused.parameters(), *half.parameters()]
    optimizer = torch.optim.AdamW(everything, lr=0.01)
    data = torch.randn(SCHEDULE.size, 5, generator=torch.Generator().manual_seed(1))
    sampler = ElasticSampler(SCHEDULE)
    sampler.load_state_dict({"consumed": start * SCHEDULE.batch})
    canonical = CanonicalGradients(everything, microbatches=SCHEDULE.microbatches)
    called: Any = DistributedDataParallel(model) if wrapped else model
    numbers = torch.utils.data.TensorDataset(torch.arange(SCHEDULE.size))
    batches = iter(torch.utils.data.DataLoader(numbers, batch_sampler=sampler))
    digests = []
    for step in plan:
        tokens = 0
        for index in sampler.indices:
            (ids,) = next(batches)
            with keyed_rng(9, step, index):
                if wrapped:
                    with called.no_sync():
                        _loss(called, half, data[ids]).backward()
                else:
                    _loss(called, half, data[ids]).backward()
            tokens += len(ids)
            canonical.add(index)
        canonical.reduce()
        if any(p.grad is not None for p in unused.parameters()):
            raise RuntimeError("nobody used this")
        scale_gradients(everything, global_tokens(tokens), averaged=False)
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance()
        raw = b"".join(p.detach().float().numpy().tobytes() for p in everything)
        digests.append(hashlib.sha256(raw).hexdigest())
    return digests


def _loss(model: Any, half: Any, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    loss: torch.Tensor = out.square().sum() + half(out.to(torch.bfloat16)).float().sum()
    return loss
