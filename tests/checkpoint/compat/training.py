"""A small training whose state has each kind of leaf: what old versions wrote is compared with it.

``python tests/checkpoint/compat/training.py ROOT`` writes steps 1 to 3 with the ckptd that is
installed; run it with an old version to make a folder ``root-COMMIT``.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch

import ckptd


class Training:
    """Model, optimizer, scheduler, data, random streams and values of one process."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 2, gamma=0.5)
        rows = torch.arange(60, dtype=torch.float32).reshape(10, 6)
        self.data = ckptd.Batches(
            torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        )
        self.others: dict[str, Any] = {
            "half": torch.full((3,), float(seed), dtype=torch.bfloat16),
            "count": seed,
            "name": str(seed),
            "list": [seed, {"b": torch.full((2, 2), seed)}],
        }

    def state(self) -> dict[str, Any]:
        """Return the state as a program writes it down."""
        return {
            "model": self.model,
            "optim": self.optim,
            "schedule": self.schedule,
            "data": self.data,
            "rng": ckptd.Rng(),
            "mine": ckptd.PerRank({"count": self.others["count"]}),
            "others": self.others,
        }

    def step(self) -> torch.Tensor:
        """Train on one batch; return what every part of the state has come to."""
        self.optim.zero_grad()
        batch: torch.Tensor = next(self.data)
        noise = torch.rand(()) + random.random() + np.random.rand()
        loss = (self.model(batch) * noise).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optim.step()
        self.schedule.step()
        tensors = [p.detach().flatten() for p in self.model.parameters()]
        tensors += [b.double().flatten() for b in self.model.buffers()]
        tensors += [torch.tensor([loss.item(), self.optim.param_groups[0]["lr"]])]
        return torch.cat([t.double() for t in tensors])


def main(root: str) -> None:
    """Write steps 1 to 3."""
    training = Training(1)
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2, 3):
            training.step()
            ck.save(step, training.state(), metadata={"loss": step / 2}).durable(60)


if __name__ == "__main__":
    main(sys.argv[1])
